"""The tables' block: a shard's part of all tables, which has one version, one open round, and one dedup window.

Each table's rows on this shard are a store of their own (psd_core/table.py), here a *partition*: a push is one transaction in
each. Its notes say up to which version it is, and which pushes it counts. A shard that is killed between two of them, or lacks
space for the next one, has partitions that are ahead of others. The block is at the least of their versions, and counts what
all of them count; so what is missing is sent again, and goes only to those that lack it. Must not know sessions' validity,
leases, messages or frames.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psd.contract.custom_rules import ListedRule
from psd.contract.errors import OutOfSpace
from psd.contract.jobspec import JobSpec
from psd.contract.rows import TableRows
from psd.contract.staleness import RATE
from psd.contract.tables import SparseTableSpec
from psd.contract.verdicts import Squares, Verdict
from psd.state.aggregation.pages import Counted
from psd.state.aggregation.rounds import Contribution, Round, RoundSetting, Unmeasured, Update, segments
from psd.state.aggregation.rules import Gradient, Static
from psd.state.aggregation.staleness import Readers
from psd.state.aggregation.trained import RoundServices, Trained
from psd.state.counts import RoundTimes
from psd.state.tables.own_rule import OwnRule, RowsFailed
from psd.state.tables.pushes import RowChecks
from psd.state.tables.rounds import ExactRowsRound, FastRowsRound, MeasuredRowsRound, SumsPool, TableSums
from psd_core.arena import ArenaClosed, ArenaError, ArenaFull
from psd_core.table import Mark, TableSnapshot, TableStore

_NO_IDS = np.empty(0, np.uint64)
_ALL = segments(1, 1)

_VERSION = 0
"""Place of the version in a partition's notes; the sessions by rank follow, and then the clocks."""


def notes_count(world_size: int) -> int:
    """Words that a partition's notes have."""
    return 1 + 2 * world_size


def counted_in(notes: NDArray[np.uint64]) -> list[Counted]:
    """The last push of each rank that a partition with these notes counts."""
    _, *words = notes.tolist()
    half = len(words) // 2
    return list(zip(words[:half], words[half:], strict=True))


class TableCounts(NamedTuple):
    """Numbers of one table's rows on one shard, since the table was made.

    Attributes:
        rows: there are now. bytes: of the file, index and slots included.
        reads: of rows. hits: those that found one; both since the process began.
        refused: gradients for new rows at the limit. unadmitted: gradients of ids that have no row yet.
    """

    name: str
    rows: int
    bytes: int
    reads: int
    hits: int
    created: int
    evicted: int
    expired: int
    removed: int
    refused: int
    unadmitted: int


class Partition:
    """One table's rows on this shard.

    Attributes:
        notes: as the store has them; shared by partitions that are alike, and never changed in place.
        version: updates that it has.
        ages: the learning rate is divided by 1 + the age of a gradient.
        expired_at: clock at which old rows were removed last.
        own: the rule, if it is a user's own.
    """

    __slots__ = ("_scalars", "_values", "ages", "expired_at", "group", "notes", "own", "spec", "store", "version")

    def __init__(self, spec: SparseTableSpec, job: JobSpec, store: TableStore, rules: Mapping[str, ListedRule]) -> None:
        group = job.groups[spec.group]
        self.spec = spec
        self.store = store
        self.group = spec.group
        self.ages = group.staleness == RATE
        self.own = OwnRule(rules[group.rule]) if group.info.is_custom else None
        self.note(store.notes())
        self.expired_at = 0
        self._values: Sequence[float] = ()
        self._scalars: dict[str, float] = dict.fromkeys(group.info.scalars, 0.0)

    def note(self, notes: NDArray[np.uint64]) -> None:
        """Note what the store's notes are now."""
        self.notes = notes
        self.version = int(notes[_VERSION])

    def counted(self, rank: int) -> Counted:
        """The last push of a rank that it counts."""
        counted: Counted = counted_in(self.notes)[rank]
        return counted

    def scalars(self, values: Sequence[float], age: int) -> Mapping[str, float]:
        """The rule's scalars by name."""
        if values != self._values:
            self._values = values
            self._scalars = dict(zip(self._scalars, values, strict=True))
        if self.ages and age:
            return {**self._scalars, "lr": self._scalars["lr"] / (1 + age)}
        return self._scalars


class TablesBlock(Trained):
    """A shard's part of all tables.

    Args:
        stores: of the job's tables, in their order.
        wall: seconds since 1970.
        rules: users' own ones, by path.

    Attributes:
        partitions: one for each table.
        checks: of what is sent about rows.
        base: the checkpoint for later ones to build on, see psd/state/durability/table_bases.py; empty: none.
        bases: those that this shard has stored whole, with the marks of the tables' snapshots. Both are set by whoever stores.
    """

    def __init__(
        self,
        index: int,
        spec: JobSpec,
        stores: Sequence[TableStore],
        services: RoundServices,
        times: RoundTimes,
        checks: RowChecks,
        wall: Callable[[], float],
        rules: Mapping[str, ListedRule],
    ) -> None:
        self.partitions = [Partition(table, spec, store, rules) for table, store in zip(spec.tables, stores, strict=True)]
        self.checks = checks
        self.base = ""
        self.bases: Mapping[str, Sequence[Mark]] = {}
        self._wall = wall
        self._world_size = spec.world_size
        self._pool = SumsPool([table.dim for table in spec.tables])
        self._no_rows = [
            TableRows(number, _NO_IDS, np.empty((0, table.dim), np.float32)) for number, table in enumerate(spec.tables)
        ]
        kind: type[Round] = ExactRowsRound if spec.aggregation == "exact" else FastRowsRound
        kind = MeasuredRowsRound if spec.has_verdicts else kind
        setting = RoundSetting(np.ones(1, np.uint32), Static(), services.is_mean, services.policy, self._pool, services.members)
        super().__init__(
            index,
            services,
            lambda number: kind(number, setting),
            times,
            Readers(index, lambda _: None),
            min(partition.version for partition in self.partitions),
        )
        self._recall()

    def _recall(self) -> None:
        """Note what the partitions count, and let those that are alike share their notes."""
        first = self.partitions[0].notes
        for partition in self.partitions:
            if np.array_equal(partition.notes, first):
                partition.notes = first
        self._window: list[Counted] = [
            min(counted) for counted in zip(*(counted_in(p.notes) for p in self.partitions), strict=True)
        ]
        self._clock = max(clock for _, clock in self._window)

    def begin(self, version: int) -> None:
        """Let the block begin at a version, with no push counted, and whatever rows there are.

        Raises:
            OutOfSpace: some tables may have begun.
        """
        with self.lock:
            notes = np.zeros(notes_count(self._world_size), np.uint64)
            notes[_VERSION] = version
            for partition in self.partitions:
                self._keep(partition, notes)
            self._open(version)
            self._recall()
            self._clock = version

    # -- updates -----------------------------------------------------------------------------------------------------------

    def _counted(self, rank: int) -> Counted:
        return self._window[rank]

    def last_counted(self, rank: int) -> Counted:
        """See Trained."""
        return max(partition.counted(rank) for partition in self.partitions)

    def _alone(self, part: Contribution, age: int) -> Update:
        values = part.values if part.weight else None
        gradient = Gradient(None, values, 1.0, part.scale, _ALL, age=age)
        return Update(gradient, part.scalars, {part.rank: part.session})

    def _write(self, update: Update, clock: int) -> int:
        gradient = update.gradient
        sums = gradient.accumulator if isinstance(gradient.accumulator, TableSums) else None
        given: list[Any] = [rows for rows in (gradient.accumulator, gradient.last) if rows is not None and rows is not sums]
        lent = None
        if given and gradient.weight not in (0, 1):  # it is rounded where it is summed, so that all shards have the same bits
            sums = lent = self._pool.lend()
            sums.add(given[0], gradient.weight)
        self._clock = max(self._clock, clock)
        now = int(self._wall())
        following: dict[int, NDArray[np.uint64]] = {}
        try:
            for number, partition in enumerate(self.partitions):
                if self._has(partition, update, clock):
                    continue
                notes = following.get(id(partition.notes))
                if notes is None:
                    notes = following[id(partition.notes)] = self._noted(partition.notes, update.sessions, clock)
                more = None
                if sums is not None:
                    table = sums.tables[number]
                    ids, values, is_distinct = table.ids, table.values, True
                elif given:
                    _, ids, values = given[0].get(number, self._no_rows[number])
                    is_distinct, more = False, given[1].get(number, self._no_rows[number])[1:] if len(given) > 1 else None
                else:
                    self._keep(partition, notes)
                    continue
                named = partition.scalars(update.scalars[partition.group], gradient.age)
                used = now if partition.spec.expire_s else self._clock
                own = None if partition.own is None else partition.own.with_numbers(named, gradient.age)
                partition.store.push(
                    ids,
                    values,
                    named if own is None else {},
                    scale=gradient.scale,
                    clock=used,
                    notes=notes,
                    distinct=is_distinct,
                    own=own,
                    more=more,
                )
                partition.note(notes)
        except ArenaFull as error:
            raise OutOfSpace(f"table {partition.spec.name!r}: no room for its rows: {error.strerror}") from error
        except RowsFailed as failed:
            raise self._note_failed(failed.error, failed.path, "table", partition.spec.name) from failed.error
        finally:
            if lent is not None:
                self._pool.give_back(lent)
        for rank, session in update.sessions.items():
            self._window[rank] = session, clock + 1
        return min([partition.version for partition in self.partitions])

    def _has(self, partition: Partition, update: Update, clock: int) -> bool:
        """True if the update was written to this partition before the process died, or found no room in another one."""
        if self._policy.has_rounds:
            return partition.version > self.version
        ((rank, session),) = update.sessions.items()
        return partition.counted(rank) >= (session, clock + 1)

    def _noted(self, before: NDArray[np.uint64], sessions: Mapping[int, int], clock: int) -> NDArray[np.uint64]:
        notes: NDArray[np.uint64] = before.copy()
        notes[_VERSION] += np.uint64(1)
        for rank, session in sessions.items():
            notes[1 + rank] = session
            notes[1 + self._world_size + rank] = clock + 1
        return notes

    def _keep(self, partition: Partition, notes: NDArray[np.uint64]) -> None:
        """Change the notes, and no row."""
        spec = partition.store.spec
        rows = np.empty((0, spec.layout.width), np.float32)
        try:
            partition.store.write(_NO_IDS, rows, notes=notes)
        except ArenaFull as error:
            raise OutOfSpace(f"table {spec.name!r}: no room for its state: {error.strerror}") from error
        partition.note(notes)

    def _measured(self, under: Verdict | None) -> Squares | Unmeasured:
        return self._round.measure(None, under)

    # -- reading -----------------------------------------------------------------------------------------------------------

    def read(self, version_min: int, reader: int | None = None) -> tuple[int, None] | None:
        """See Trained: the version alone."""
        del reader
        if self.version < version_min and not self._is_due:
            return None  # without the lock, which another call may hold while its kernel works
        with self.lock:
            return (self.version, None) if self._reach(version_min) else None

    def fill(self, rows: Sequence[TableRows], clock: int | None) -> None:
        """Read rows into the arrays of `rows`, in their dtype. Takes no lock.

        Args:
            clock: of the worker that uses them; None counts no use.
        """
        for number, ids, values in rows:
            partition = self.partitions[number]
            used = clock
            if clock is not None:
                used = int(self._wall()) if partition.spec.expire_s else max(self._clock, clock)
            if values.dtype == np.float32:
                partition.store.read(ids, values, clock=used)
            else:
                _narrow(partition.store.read(ids, clock=used), values)

    def snapshots(self, base: str) -> list[TableSnapshot] | None:
        """A snapshot of each table, begun; None while others are under way. Under the lock.

        base: the checkpoint whose rows they need not have again; they have all if this shard does not remember it.
        """
        marks: Sequence[Mark | None] = self.bases.get(base) or [None] * len(self.partitions)
        begun: list[TableSnapshot] = []
        try:
            for partition, mark in zip(self.partitions, marks, strict=True):
                begun.append(partition.store.snapshot(mark))
        except ArenaClosed:
            raise
        except ArenaError:
            for snapshot in begun:
                snapshot.close()
            return None
        return begun

    # -- the life of rows --------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Remove the rows that nobody has used for as long as their table says, or up to an eighth longer: it is not looked at
        all rows each time. Takes no lock."""
        for partition in self.partitions:
            spec = partition.spec
            age = spec.expire_s or spec.expire_steps
            clock = int(self._wall()) if spec.expire_s else self._clock
            # A clock that was ahead, and has been set right, must not put this off until it is there again.
            if age and not 0 <= clock - partition.expired_at <= age // 8:
                partition.expired_at = clock
                partition.store.expire(clock, age)

    @property
    def counts(self) -> list[TableCounts]:
        """Numbers of each table's rows on this shard."""
        found = []
        with contextlib.suppress(ArenaClosed):  # the job goes back meanwhile
            for partition in self.partitions:
                now = partition.store.counters()
                counted = {name: now[name] for name in TableCounts._fields if name in now}
                found.append(TableCounts(name=partition.spec.name, bytes=partition.store.used_bytes, **counted))
        return found


def _narrow(values: NDArray[np.float32], out: NDArray[Any]) -> None:
    """Round to the 16 bits of `out`: float16, or uint16, which has those of bfloat16."""
    if out.dtype == np.float16:
        np.copyto(out, values, casting="same_kind")
        return
    bits = values.view(np.uint32)
    is_nan = np.isnan(values)
    np.copyto(out, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16, casting="same_kind")
    out[is_nan] = 0x7FC0
