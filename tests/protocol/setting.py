"""What is explored: the job, its workers' programs, and which faults may strike how often."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.contract.compression import Compression
from psd.contract.consistency import Consistency
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.contract.tables import SparseTableSpec
from psd_client.worker.exchange.sent_push import JobPart
from psd_core.distinct import shard_of

FAULTS = ("lose", "late", "cut", "pause", "timeout", "kill", "crash", "outage", "blank", "die", "stall", "twice", "suspend")
OF_STEPS = ("revoke", "unarmed")
"""lose: a reply is lost, or the connection breaks while the call waits. late: the connection breaks while the request is
still on its way, which comes later, or never. cut: it breaks in the middle of the request. pause: the shard's thread that
serves a request has to wait before it takes a lock. timeout: a wait for others ends by its deadline. kill: a shard dies
between two requests, and is soon back. crash: in the middle of one. outage: it stays away for longer than leases, and
perhaps than workers try again. blank: it has lost its arena, too. die: a worker dies, and has a successor. stall: a
worker does nothing for longer than its lease. twice: its successor is started meanwhile. suspend: a shard does nothing
for longer than leases. Of armed steps also, revoke: a shard takes no more steps of a worker for a reason of its own.
unarmed: a worker is not armed by a reply that might have done so."""

GRADIENTS_MAX = 6
"""Of one process."""

CODEC, LANES = "topk:0.1", 2
"""Where gradients travel compressed: one of at most ten numbers of a block, in which each process has two."""


@dataclass(frozen=True)
class Setting:
    """One thing to explore.

    Attributes:
        programs: of the workers, by rank; see programs.py. successor: what is started when the worker `mortal` is gone.
        mortal: the rank that may die or stall. faults: kinds, see FAULTS. budget: how many of them at most.
        has_schedule: scalars depend on how many steps the process has made. leaves: how a worker leaves is interleaved with the
            rest; else it does so at once. has_slow_beats: so are heartbeats that find a shard
            restarted, and what they lead to; else they are soon done, and no faster than a call that is on its way there.
            has_checkpoint: the job goes on from one, and may go back to it.
            tables: how many there are; each push has a gradient for one of their rows on every shard. rows_max: limit of each
            table; above 0, a program that has made its early steps chooses before each push whether there is also one for a
            row that nobody has named before, for which the rows that were used longest ago make room.
            parts: how many the tensors are in, of which each step is of one; 0: the job has no parts.
            has_residuals: gradients travel compressed, and what is left out of one goes with the next; see residuals.py.
        cuts: how many shard 0 announces, at any moments; workers then save with each push which gradient it has.
        early_cuts: how many of these it announces before the first step, and not at any moment.
        reads: how many readers come, who call the shards one after the other. restores: of the worlds that go on from the
            checkpoints that are stored, on other shards, so many states are looked at; see restored_worlds.py.
        has_armed: push_pulls travel as armed steps where shards offer that. early_steps: so many each worker makes at first,
            one after the other, as far as they can; then all are armed.
        saves: workers save with each push which gradient it has; such a push is no step.
        is_published: the job trains nothing; each round sets all tensors to what its one worker puts. Its readers ask shard 0
            how far it is, and then all shards for that version.
        stored_by: this is such a world, and so many shards have stored its checkpoint.
        small: what is other in the world that is seen whole, with one fault; see `with_one_fault`.
    """

    name: str
    consistency: str = "sync"
    aggregation: str = "fast"
    quorum: int = 0
    blocks: int = 2
    tables: int = 0
    rows_max: int = 0
    parts: int = 0
    has_residuals: bool = False
    shards: int = 2
    steps: int = 2
    programs: tuple[str, ...] = ("push_pull", "push_pull")
    successor: str = "push_pull"
    mortal: int = 0
    faults: frozenset[str] = frozenset(FAULTS) - {"blank", "twice"}
    budget: int = 1
    has_schedule: bool = False
    leaves: bool = False
    has_slow_beats: bool = False
    has_checkpoint: bool = False
    cuts: int = 0
    early_cuts: int = 0
    reads: int = 0
    restores: int = 0
    has_armed: bool = False
    early_steps: int = 0
    saves: bool = True
    is_published: bool = False
    stored_by: int = 0
    lease_s: float = 10.0
    job: dict[str, Any] = field(default_factory=dict)
    small: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def spec(self) -> JobSpec:
        """What the workers declare."""
        shape, dtype = ((self.width,), "float32") if self.has_residuals else ((1,), "float64")
        return JobSpec(
            len(self.programs),
            tuple(TensorSpec(f"t{i}", shape, dtype, i) for i in range(self.blocks)),
            tuple(GroupSpec("published" if self.is_published else "sgd", ()) for _ in range(self.groups)),
            Consistency.parse(self.consistency),
            "sum",
            self.quorum,
            self.aggregation,
            tables=tuple(
                SparseTableSpec(f"r{i}", len(self.processes), group=self.blocks, max_rows=self.rows_max)
                for i in range(self.tables)
            ),
            compression=Compression(self.codec),
            **self.job,
        )

    @property
    def width(self) -> int:
        """Of a block whose gradients travel compressed."""
        return LANES * len(self.processes)

    @property
    def codec(self) -> str:
        """In which gradients travel."""
        return CODEC if self.has_residuals else ""

    @property
    def has_rounds(self) -> bool:
        return self.consistency == "sync"

    @property
    def processes(self) -> tuple[tuple[int, str], ...]:
        """Rank and program of each process; the successor is the last one."""
        return (*enumerate(self.programs), (self.mortal, self.successor))

    @property
    def groups(self) -> int:
        """Number of groups: one for each tensor, and one for all tables."""
        return self.blocks + bool(self.tables)

    @cached_property
    def job_parts(self) -> tuple[JobPart, ...]:
        """The parts; neighbouring blocks are of one, so that it lies on several shards."""
        return tuple(
            JobPart(part + 1, frozenset(block for block in range(self.blocks) if self.part_of(block) == part))
            for part in range(self.parts)
        )

    def part_of(self, block: int) -> int:
        """The part that a block is of, from 0."""
        return block * self.parts // self.blocks

    @cached_property
    def ids(self) -> NDArray[np.uint64]:
        """The row of each shard that all gradients have, or of each that has stored what the job goes on from."""
        return np.array([own[0] for own in self._ids_of_shards], np.uint64)

    def new_ids(self, gradient: int) -> NDArray[np.uint64]:
        """Likewise the rows that this gradient alone has."""
        return np.array([own[1 + gradient] for own in self._ids_of_shards], np.uint64)

    @cached_property
    def _ids_of_shards(self) -> list[list[int]]:
        shards = self.stored_by or self.shards
        owners = shard_of(np.arange(1000, dtype=np.uint64), shards).tolist()
        return [[number for number, owner in enumerate(owners) if owner == shard] for shard in range(shards)]

    def scalars(self, step: int) -> list[list[float]]:
        """Of the step that a process makes as its `step`th. What differs has no part in the arithmetic."""
        dampening = 0.5 / (1 + step) if self.has_schedule else 0.0
        return [[1.0, 0.0, dampening, 0.0]] * self.groups

    def with_one_fault(self) -> Setting:
        """The world that is small enough to be seen whole with one fault."""
        return self.but(budget=1, small={}, **self.small)

    def but(self, **changes: Any) -> Setting:
        """The same with changes."""
        return replace(self, **changes)


def gradient_of(process: int, number: int) -> int:
    """The name of a process's gradient: its place in a sum, whose digits to the base of 4 say how often it has each."""
    assert number < GRADIENTS_MAX, "the process makes more gradients than a sum has places for"
    return process * GRADIENTS_MAX + number


def value_of(gradient: int) -> float:
    """The gradient's number."""
    return float(4**gradient)


def row_of(gradient: int, width: int) -> NDArray[np.float32]:
    """The gradient's numbers for a row, where each process has a place of its own: so they stay exact in float32."""
    row = np.zeros(width, np.float32)
    row[gradient // GRADIENTS_MAX] = value_of(gradient % GRADIENTS_MAX)
    return row


def counts_in_row(row: NDArray[np.float32]) -> dict[int, int]:
    """How often the sum of such rows has each gradient; raises as `counts_in`."""
    return {
        gradient_of(process, number): count
        for process, total in enumerate(row.tolist())
        for number, count in counts_in(total).items()
    }


def counts_in(total: float) -> dict[int, int]:
    """How often a sum has each gradient; raises AssertionError if it is no such sum."""
    assert total == int(total), f"{total} is no sum of gradients"
    assert 0 <= total < 2**53, f"{total} is no sum of gradients"
    left, gradient, found = int(total), 0, {}
    while left:
        left, count = divmod(left, 4)
        if count:
            found[gradient] = count
        gradient += 1
    return found
