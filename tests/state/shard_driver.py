"""Drives one Shard object with injected time and without gRPC: what the unit tests of psd.state share."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.checkpoint import BlockPart, CheckpointDirectory, Cut
from psd.contract.config import ServerConfig
from psd.contract.consistency import Consistency
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.contract.layout import Layout
from psd.contract.rows import TableRows, parts_of
from psd.contract.tables import SparseTableSpec
from psd.state.aggregation.rounds import FastRound
from psd.state.core import ShardCore
from psd.state.desks.transfers import Push
from psd.state.shard import Shard
from psd.state.tickets import Ticket
from psd.state.workers.membership import tick_s
from psd.v1 import control_pb2, data_pb2, job_pb2

SGD = (1.0, 0.0, 0.0, 0.0)  # lr, momentum, dampening, weight_decay
INCARNATION = 7
_Rows = Mapping[int, tuple[Any, Any]]


_open_shards: list[Shard] = []


def close_all() -> None:
    """Close the shards of all drivers."""
    while _open_shards:
        _open_shards.pop().close(keep=False)


class FakeTime:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.value = 1000.0

    def __call__(self) -> float:
        return self.value


class Killed(BaseException):
    """The shard's process dies here."""


class Fuse:
    """A crash point that kills `steps` steps after that has been set."""

    steps = 0

    def __call__(self, _: str) -> None:
        self.steps -= 1
        if self.steps == 0:
            raise Killed


class Copier:
    """A crash point that copies a directory `steps` steps after that has been set: what the next process would find there.

    For tables: nothing can be raised through their C code.
    """

    steps = 0

    def __init__(self, directory: Path) -> None:
        self.copy = directory.with_name("copy")
        self._directory = directory

    def __call__(self, _: str) -> None:
        self.steps -= 1
        if self.steps == 0:
            shutil.copytree(self._directory, self.copy)

    @property
    def has_copied(self) -> bool:
        return self.copy.exists()


@dataclass
class Seat:
    """A worker that has joined."""

    rank: int
    session: int
    clock: int
    caller: job_pb2.Caller


def job_spec(
    world_size: int = 2,
    *,
    blocks: int = 1,
    size: int = 3,
    mode: str = "sync",
    flags: tuple[str, ...] = (),
    reduction: str = "mean",
    quorum: int = 0,
    dtype: str = "float64",
    aggregation: str = "fast",
    **fields: Any,
) -> JobSpec:
    """A job of so many blocks: every group is a space of its own, and a small space is one block."""
    return JobSpec(
        world_size,
        tuple(TensorSpec(f"t{i}", (size,), dtype, i) for i in range(blocks)),
        tuple(GroupSpec("sgd", flags) for _ in range(blocks)),
        Consistency.parse(mode),
        reduction,
        quorum,
        aggregation,
        **fields,
    )


def tables_spec(
    world_size: int = 2, *, tables: int = 2, blocks: int = 0, dim: int = 3, table: Any = (), **fields: Any
) -> JobSpec:
    """A job of so many tables, of one group, under SGD; `table` has further fields of each."""
    spec = job_spec(world_size, blocks=max(1, blocks), **fields)
    return dataclasses.replace(
        spec,
        tensors=spec.tensors[:blocks],
        groups=(*spec.groups[:blocks], GroupSpec("sgd", ())),
        tables=tuple(SparseTableSpec(f"s{i}", dim, blocks, **dict(table)) for i in range(tables)),
    )


def end_process_of(core: ShardCore) -> None:
    """Do to a shard's files what the kernel does when a process dies: locks are released, and nothing else happens."""
    if core.storage.arena is not None:
        core.storage.arena._directory.close()
    for store in core.storage.tables:
        store._file.close()
        if store.on_close is not None:
            store.on_close()
        store._partition = None
    if core.storage.vectors is not None:
        core.storage.vectors.close(remove=False)


class Driver:
    """One shard and the calls on it, as plain values."""

    def __init__(
        self,
        spec: JobSpec | None = None,
        *,
        shard: int = 0,
        shards: int = 1,
        lease_s: float = 10.0,
        on_worker_failure: str = "continue",  # so that a test may end a session without letting a lease pass
        directory: CheckpointDirectory | None = None,
        crash_point: Any = None,
        **config: Any,
    ) -> None:
        self.time = FakeTime()
        self.spec = spec if spec is not None else job_spec()
        self.layout = Layout(self.spec, shards)
        self.config = ServerConfig(shard, shards, lease_s=lease_s, on_worker_failure=on_worker_failure, **config)
        self.incarnation = INCARNATION
        self._start(directory=directory, crash_point=crash_point)

    def _start(self, **arguments: Any) -> None:
        self.shard = Shard(self.config, now=self.time, wall=self.time, incarnation=self.incarnation, **arguments)
        self.core = self.shard._core
        _open_shards.append(self.shard)

    def kill(self) -> None:
        """What the kernel does: memory is gone, locks are released, the arena's file stays as it is."""
        _open_shards.remove(self.shard)
        end_process_of(self.core)

    def restart(self, *seats: Seat, copy: Path | None = None, **arguments: Any) -> None:
        """Kill the process and start it again on its state directory, or on a copy of it, where these workers resume."""
        self.kill()
        if copy is not None:
            shutil.rmtree(self.config.state_dir)
            copy.rename(self.config.state_dir)
        self.incarnation += 1
        self._start(**arguments)
        for seat in seats:
            self.resume(seat)

    # -- coming and going --

    def join(self, rank: int = 0, *, session: int = 0, run_id: str = "", world_size: int = 0, connection: int = 0) -> Seat:
        request = control_pb2.JoinRequest(
            run_id=run_id,
            shard_index=self.config.shard_index,
            shard_count=self.config.shard_count,
            rank=rank,
            world_size=world_size or self.spec.world_size,
            session=session,
            host=f"host{rank}",
            pid=100 + rank,
            connection=connection,
        )
        reply = self.shard.admission.join(request)
        caller = job_pb2.Caller(run_id=reply.run_id, incarnation=reply.incarnation, rank=rank, session=reply.session)
        return Seat(rank, reply.session, reply.clock, caller)

    def resume(self, seat: Seat, *, timeline: int = 0, connection: int = 0) -> control_pb2.JoinReply:
        """Go on with the same session at the shard's next incarnation."""
        reply = self.shard.admission.join(
            control_pb2.JoinRequest(
                run_id=seat.caller.run_id,
                shard_index=self.config.shard_index,
                shard_count=self.config.shard_count,
                rank=seat.rank,
                world_size=self.spec.world_size,
                session=seat.session,
                resume=True,
                timeline=timeline,
                host=f"host{seat.rank}",
                connection=connection,
            )
        )
        seat.caller.incarnation, seat.clock = reply.incarnation, reply.clock
        return reply

    def rollback(self, checkpoint: str, timeline: int, *, run_id: str = "mine", incarnation: int = 0) -> None:
        """As a worker asks for it that has found the shard as it is, or as that incarnation."""
        request = control_pb2.RollbackRequest(run_id=run_id, checkpoint=checkpoint, timeline=timeline)
        request.incarnation = incarnation or self.core.incarnation
        self.shard.restoration.rollback(request)

    def declare(self, seat: Seat, spec: JobSpec | None = None) -> tuple[control_pb2.DeclareReply, Ticket | None]:
        return self.shard.admission.declare(
            control_pb2.DeclareRequest(caller=seat.caller, spec=(spec or self.spec).to_message())
        )

    def begin_initialize(self, seat: Seat, choice: int = 0) -> Any:
        """With shard 0's last choice, or 1 on another shard, unless `choice` says which."""
        last = self.core.initial.choice if self.config.shard_index == 0 else 1
        return self.shard.admission.begin_initialize(seat.caller, self.layout.digest, choice or last)

    def initialize(self, seat: Seat, value: float = 0.0, choice: int = 0) -> bool:
        init = self.begin_initialize(seat, choice)
        self.offer(init, value)
        return self.shard.admission.end_initialize(init)

    def offer(self, init: Any, value: float) -> None:
        for block in self.layout.blocks_of(self.config.shard_index):
            self.shard.admission.initialize_block(init, block.index, memoryview(np.full(block.length, value, block.dtype)))

    def start(self, *ranks: int, value: float = 0.0) -> list[Seat]:
        """Join and declare these ranks (all by default); the first one initializes."""
        seats = [self.join(rank) for rank in ranks or range(self.spec.world_size)]
        for seat in seats:
            self.declare(seat)
        assert self.initialize(seats[0], value)
        return seats

    def heartbeat(self, seat: Seat, clock: int = 0, *, leaving: bool = False) -> list[Ticket]:
        return self.shard.admission.heartbeat(control_pb2.HeartbeatRequest(caller=seat.caller, clock=clock, leaving=leaving))

    def leave(self, seat: Seat, *, failed: bool = False) -> None:
        self.shard.admission.leave(seat.caller, failed=failed)

    def advance(self, seconds: float) -> list[int]:
        """Let time pass, tick by tick; returns the ranks that expired."""
        expired: list[int] = []
        step = tick_s(self.config.lease_s)
        while seconds > 0:
            self.time.value += min(step, seconds)
            seconds -= step
            expired += [worker.rank for worker in self.shard.tick()]
        return expired

    def expire(self, *gone: Seat, keep: Sequence[Seat] = ()) -> None:
        """Let the leases of `gone` run out while `keep` send heartbeats."""
        expired: list[int] = []
        for _ in range(6):
            for seat in keep:
                self.heartbeat(seat)
            expired += self.advance(self.config.lease_s / 4)
        assert set(expired) >= {seat.rank for seat in gone}

    def arrive(self, seat: Seat, name: str = "b", seq: int = 1, *, session: int = 0, **numbers: Any) -> Ticket:
        return self.shard.arrive(control_pb2.BarrierRequest(caller=seat.caller, name=name, seq=seq, session=session, **numbers))

    def learn_cuts(self, cuts: Sequence[data_pb2.Cut]) -> None:
        """Hear of cuts, as from a worker."""
        self.shard.cuts.learn(self.core.declared(), cuts)

    def choose(self, *cuts: data_pb2.Cut, position: int | None = None) -> None:
        """Have all live workers choose their positions in cuts: that one, or the clocks that they are known to be at."""
        for worker in self.core.members.workers:
            at = worker.clock if position is None else position
            self.shard.cuts.hear([data_pb2.Cut(id=cut.id, position=at) for cut in cuts], worker, worker.session)

    # -- numbers --

    def header(
        self,
        seat: Seat,
        clock: int,
        *,
        weight: float = 1.0,
        scalars: Sequence[float] = SGD,
        versions: Sequence[int] = (),
        session: int = 0,
        **fields: Any,
    ) -> data_pb2.PushHeader:
        return data_pb2.PushHeader(
            caller=seat.caller,
            session=session,
            clock=clock,
            weight=weight,
            layout_digest=self.layout.digest,
            scalars=[data_pb2.GroupScalars(values=scalars) for _ in self.spec.groups],
            versions=versions,
            **fields,
        )

    def begin_push(self, seat: Seat, clock: int, **header: Any) -> Push:
        return self.shard.exchange.begin_push(self.header(seat, clock, **header))

    def push_block(self, push: Push, block: int, value: Any, present: bytes = b"") -> Ticket | None:
        payload = b"" if value is None else self.gradient(block, value).tobytes()
        return self.shard.exchange.push_block(push, block, present, memoryview(payload))

    def push_rows(
        self, seat: Seat, clock: int, rows: _Rows, *, frames: int = 1, present: bytes = b"", **header: Any
    ) -> data_pb2.PushReply:
        """A whole push, of ids and one number for each by table, and of zeros for the blocks; it need not wait."""
        push = self.begin_push(seat, clock, **header)
        for plan in self.layout.blocks_of(self.config.shard_index):
            assert self.push_block(push, plan.index, 0.0) is None
        assert self.push_tables(push, rows, frames=frames, present=present) is None
        return self.shard.exchange.end_push(push)

    def push_tables(
        self, push: Push, rows: _Rows, *, frames: int = 1, memory: bytearray | None = None, present: bytes = b""
    ) -> Ticket | None:
        """Push to the tables' block, in so many frames; where a number stands for a row, the row is full of it.

        memory: where the last frame lies, which is then lent.
        """
        index = self.layout.tables_block(self.config.shard_index)
        assert index is not None
        ticket = None
        cut = [self.table_rows(table, ids, values) for table, (ids, values) in rows.items()]
        for frame in range(frames):
            share = [TableRows(t, ids[frame::frames], values[frame::frames].copy()) for t, ids, values in cut]
            payload = b"".join([r.ids.tobytes() for r in share] + [r.values.tobytes() for r in share])
            more, is_lent = frame < frames - 1, memory is not None
            if memory is not None and not more:
                memory[:] = payload
            place = memoryview(payload if memory is None or more else memory)
            options = {"is_lent": is_lent and not more, "rows": parts_of(share), "more": more}
            ticket = self.shard.exchange.push_block(push, index, b"" if more else present, place, **options)
        return ticket

    def table_rows(self, table: int, ids: Any, values: Any) -> TableRows:
        """Rows as they travel, of ids and a number or a row for each."""
        dim = self.spec.tables[table].dim
        keys = np.array(ids, np.uint64)
        numbers = np.asarray(values, np.float32).reshape(-1, 1) if np.ndim(values) < 2 else np.asarray(values, np.float32)
        return TableRows(table, keys, np.ascontiguousarray(np.broadcast_to(numbers, (len(keys), dim))))

    def pull_rows(self, seat: Seat, clock: int, table: int, ids: Any, *, counts_no_use: bool = False) -> Any:
        """The rows of a table, or the ticket that a pull of them waits for."""
        exchange = self.shard.exchange
        request = data_pb2.PullRequest(caller=seat.caller, clock=clock, layout_digest=self.layout.digest)
        pull, tables = exchange.begin_pull_rows(request)
        found = exchange.gate(pull, clock) or exchange.read(tables, pull)
        if isinstance(found, Ticket):
            return found
        keys = np.array(ids, np.uint64)
        parts = [data_pb2.RowsPart(table=table, rows=len(keys), dtype=job_pb2.DTYPE_FLOAT32)]
        (rows,) = exchange.read_rows(tables, parts, memoryview(keys.tobytes()), 0, is_use=not counts_no_use)
        return rows.values

    def rows(self, table: int, ids: Any) -> list[float]:
        """The first numbers of rows, whatever the round."""
        store = self.core.declared().tables.partitions[table].store
        return store.read(np.array(ids, np.uint64))[:, 0].tolist()

    def gradient(self, block: int, value: Any) -> NDArray[Any]:
        """A block's gradient as workers have it; of bfloat16, which must be able to hold the value, the bits."""
        plan = self.layout.blocks[block]
        if plan.gradient_dtype != np.uint16:
            return np.full(plan.length, value, plan.gradient_dtype)
        bits = np.full(plan.length, value, np.float32).view(np.uint32)
        assert not (bits & 0xFFFF).any()
        return (bits >> 16).astype(np.uint16)

    def lend_block(self, push: Push, block: int, value: float) -> NDArray[Any]:
        """Push a block that stays where it is; returns the memory."""
        gradient = self.gradient(block, value)
        assert self.shard.exchange.push_block(push, block, b"", memoryview(gradient).cast("B"), is_lent=True) is None
        return gradient

    def push(self, seat: Seat, clock: int, value: Any, *, present: bytes = b"", **header: Any) -> data_pb2.PushReply:
        """A whole push that need not wait."""
        push = self.begin_push(seat, clock, **header)
        assert self.shard.exchange.gate(push, clock) is None
        for plan in self.layout.blocks_of(self.config.shard_index):
            assert self.push_block(push, plan.index, value, present) is None
        return self.shard.exchange.end_push(push)

    def pull(self, seat: Seat, clock: int) -> dict[int, NDArray[Any] | Ticket]:
        """What a pull finds now: per block its numbers, or what it waits for."""
        pull, blocks = self.shard.exchange.begin_pull(
            data_pb2.PullRequest(caller=seat.caller, clock=clock, layout_digest=self.layout.digest)
        )
        gate = self.shard.exchange.gate(pull, clock)
        if gate is not None:
            return {block.plan.index: gate for block in blocks}
        found: dict[int, NDArray[Any] | Ticket] = {}
        for block in blocks:
            answer = self.shard.exchange.read(block, pull)
            if isinstance(answer, Ticket):
                found[block.plan.index] = answer
            else:
                found[block.plan.index] = answer[1].parameter.copy()
                block.unpin(answer[1])
        return found

    def values(self, block: int = 0) -> list[float]:
        """The parameters of a block, whatever its round."""
        state = self.core.declared().blocks[block]
        found = state.read(0)
        assert found is not None
        numbers = found[1].parameter.tolist()
        self.core.declared().arena.unpin(found[1])
        return numbers

    def write_part(self, directory: CheckpointDirectory, cut: Cut, **beside: Any) -> None:
        """Write the shard's blocks as they are, with the workers' clocks."""
        job = self.core.declared()
        parts = []
        for block in job.blocks.values():
            plan, page, group = block.plan, block._page, job.spec.groups[block.plan.group]
            slots = dict(zip(group.info.slots(group.flags), page.slots, strict=True))
            where = plan.space, plan.offset, plan.length
            parts.append(BlockPart(*where, block.version, page.parameter, slots, page.steps, page.sessions, page.clocks))
        clocks = {worker.rank: worker.clock for worker in self.core.members.workers}
        directory.write_part(cut, self.config.shard_index, parts, worker_clocks=clocks, **beside)

    def lent_accumulators(self) -> set[int]:
        """The accumulators that are lent, from here on: a set that follows them."""
        lent: set[int] = set()
        arena = self.core.job.arena
        lend, give = arena.lend_accumulator, arena.return_accumulator
        arena.lend_accumulator = lambda block: lent.add(id(array := lend(block))) or array
        arena.return_accumulator = lambda array: (lent.discard(id(array)), give(array))
        return lent

    def version(self, block: int = 0) -> int:
        return self.core.declared().blocks[block].version

    def worker(self, rank: int) -> Any:
        return self.core.members.workers[rank]

    def fingerprint(self, *, but: int = -1) -> Any:
        """All that a refused request must leave as it is: pages, rounds, dedup windows, and the other workers' clocks."""
        job = self.core.job
        blocks: list[Any] = []
        for state in job.blocks.values() if job is not None else ():
            page, round_ = job.arena.current(state._slot), state._round
            held = page and ([array.tobytes() for array in page.arrays], page.steps.tobytes())
            blocks.append(
                (
                    state.version,
                    held,
                    None
                    if not isinstance(round_, FastRound)
                    else (
                        round_._contributors,
                        round_._total_weight,
                        round_._touched.tobytes(),
                        round_._voice,
                        None if round_._sum._sum is None else round_._sum._sum.tobytes(),
                    ),
                    None if page is None else (page.sessions.tobytes(), page.clocks.tobytes()),
                )
            )
        workers = [
            (w.rank, w.state, w.session, w.clock, w.floor, w.has_pushed)
            for w in (self.core.membership.workers if self.core.membership is not None else [])
            if w.rank != but
        ]
        if job is not None and job.tables is not None:
            blocks += [(p.version, p.notes.tobytes(), p.store.counters()["version"]) for p in job.tables.partitions]
        scalars = None if job is None else job.agreement.known()
        return blocks, workers, scalars, self.core.life.has_values, self.core.run_id
