"""One table's rows on a shard, and what the shard knows of them: a *partition*. Its notes hold the version, and which pushes it
counts, in one transaction with the rows.

Must not know rounds, workers' leases, messages, or other tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from psd.contract.custom_rules import ListedRule
from psd.contract.jobspec import JobSpec
from psd.contract.staleness import RATE
from psd.contract.tables import SparseTableSpec
from psd.state.pages import Counted
from psd.state.tables.elapsed import MICROSECONDS, Elapsed
from psd.state.tables.own_rule import OwnRule
from psd_core.steps import TablesCore
from psd_core.table import TableStore

STEP = 720_720
"""Units of a table's clock in one step. Without rounds it is divided by the number of workers; it is divisible by 1 to 16."""

VERSION = 0
"""Place of the version in a partition's notes. The sessions by rank follow it, and then the clocks by rank."""


def notes_count(world_size: int) -> int:
    """Number of words in a partition's notes."""
    return 1 + 2 * world_size


def counted_in(notes: NDArray[np.uint64]) -> list[Counted]:
    """The last push of each rank that is counted according to these notes of a partition."""
    _, *words = notes.tolist()
    half = len(words) // 2
    return list(zip(words[:half], words[half:], strict=True))


class PartitionState:
    """One table's rows on this shard, and what the shard knows of them.

    Attributes:
        notes: as the store had them when Python last looked; shared by partitions that are alike, and never changed in place.
        version: updates that it has, likewise. core: where its clock lies, which steps move, too; number: its own there.
        has_aged_rate: the learning rate is divided by 1 + the age of a gradient.
        age_max: in units of the clock: rows that were not used for longer are removed; 0: they stay.
        own: the rule, if it is a user's own.
    """

    __slots__ = (
        "_scalars",
        "_values",
        "_wall",
        "age_max",
        "core",
        "group",
        "has_aged_rate",
        "notes",
        "number",
        "own",
        "spec",
        "store",
        "time",
        "version",
    )

    def __init__(
        self,
        spec: SparseTableSpec,
        job: JobSpec,
        store: TableStore,
        rules: Mapping[str, ListedRule],
        wall: Callable[[], float],
    ) -> None:
        group = job.groups[spec.group]
        self.spec = spec
        self.store = store
        self.group = spec.group
        self.has_aged_rate = group.staleness == RATE
        self.own = OwnRule(rules[group.rule]) if group.info.is_custom else None
        self.age_max = spec.expire_seconds * MICROSECONDS or spec.expire_steps * STEP
        self.core: TablesCore | None = None
        self.number = -1
        self._wall = wall
        self.note(store.notes())
        self._values: Sequence[float] = ()
        self._scalars: dict[str, float] = dict.fromkeys(group.info.scalars, 0.0)

    def note(self, notes: NDArray[np.uint64]) -> None:
        """Take over the store's present notes."""
        self.notes = notes
        self.version = int(notes[VERSION])

    def attend(self, core: TablesCore, number: int) -> None:
        """Let the clock lie in that core, where it is the store's."""
        self.core, self.number = core, number
        self.find_clock()

    @property
    def clock(self) -> int:
        """The clock of the last update; rows are marked by it, see `next_clock`. Read without a lock."""
        assert self.core is not None
        return self.core.clock(self.number)

    @clock.setter
    def clock(self, clock: int) -> None:
        assert self.core is not None
        self.core.set_clock(self.number, clock)

    def find_clock(self) -> None:
        """Set the clock to the store's."""
        self.clock = self.store.counters()["clock"]
        self.time = Elapsed(self._wall, self.clock) if self.spec.expire_seconds else None

    def next_clock(self, step: int) -> int:
        """The clock of the next update, and of reads until then: it is beyond those of all updates before.

        A table whose rows expire by time counts microseconds, all others count steps (docs/design/tables.md: Clocks).

        Args:
            step: the units of one update (TablesBlock.step).
        """
        assert self.core is not None
        clock = self.core.clock(self.number)
        return clock + step if self.time is None else max(clock + 1, self.time.now())

    def begin_update(self, step: int) -> int:
        """Remove the rows that are too old at the next update, and return the clock of that update."""
        clock = self.next_clock(step)
        if self.age_max:
            self.store.expire(clock, self.age_max)
        return clock

    def counted(self, rank: int) -> Counted:
        """The last push of a rank that this partition counts. Called for each table with each push, so it makes no list."""
        return int(self.notes[1 + rank]), int(self.notes[1 + len(self.notes) // 2 + rank])

    def scalars(self, values: Sequence[float], age: int) -> Mapping[str, float]:
        """The rule's scalars by name; if `ages`, the learning rate is divided by 1 + age."""
        if values != self._values:
            self._values = values
            self._scalars = dict(zip(self._scalars, values, strict=True))
        if self.has_aged_rate and age:
            return {**self._scalars, "lr": self._scalars["lr"] / (1 + age)}
        return self._scalars
