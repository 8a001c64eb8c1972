"""The tables' block: a shard's part of all tables, which has one version, one open round, and one dedup window.

Each table's rows on this shard are a store of their own (psd_core/table.py), here called a *partition*. A push is one
transaction in each. A partition's notes hold its version, and the pushes that it counts. If a shard is killed between two
transactions, or lacks space for the next one, some partitions are ahead of others. The block's version is the least of theirs,
and it counts what all of them count; so the missing push is sent again, and goes only to the partitions that lack it. Must not
know which sessions are valid, leases, messages or frames.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import psd_core
from psd.contract.custom_rules import ListedRule
from psd.contract.errors import InvalidRequest, OutOfSpace
from psd.contract.jobspec import JobSpec
from psd.contract.rows import TableRows
from psd.contract.verdicts import Squares, Verdict
from psd.state import locks
from psd.state.aggregation.rounds import Contribution, Round, RoundSetting, Unmeasured, Update, segments
from psd.state.aggregation.rules import Gradient, Static
from psd.state.aggregation.staleness import SteppedAges
from psd.state.aggregation.trained import RoundServices, Trained
from psd.state.counts import CoreTimes
from psd.state.pages import Counted, SetMark
from psd.state.tables.fast_round import FastRowsRound
from psd.state.tables.own_rule import RowsFailed
from psd.state.tables.partition import STEP, VERSION, PartitionState, counted_in, notes_count
from psd.state.tables.rounds import ExactRowsRound, MeasuredRowsRound, RowChecks, SumsPool, TableSums
from psd.state.tables.slots import reset_slots
from psd.state.tables.stepped import core_of
from psd.state.tickets import Ticket
from psd_core.arena import ArenaError, StoreClosed, StoreFull
from psd_core.steps import TablesPlace
from psd_core.table import Mark, TableSnapshot, TableStore

_NO_IDS = np.empty(0, np.uint64)
_ALL = segments(1, 1)
_VERSION_OF = attrgetter("version")


class _Given(NamedTuple):
    """The gradients of an update for one table. `is_distinct`: no id comes twice. `more`: ids and gradients of another worker,
    to be added. `ids_count`: number of ids, those in `more` included."""

    ids: NDArray[np.uint64]
    values: NDArray[Any]
    is_distinct: bool
    more: tuple[NDArray[np.uint64], NDArray[Any]] | None
    ids_count: int


class TableCounts(NamedTuple):
    """Numbers of one table's rows on one shard, since the table was made.

    Attributes:
        rows: present number of rows. bytes: size of the file, with index and slots.
        reads: ids read. hits: reads that found a row. Both since the process began.
        refused: gradients for new rows beyond the limit. unadmitted: gradients for ids that the table has not admitted yet.
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


class TablesBlock(Trained, TablesPlace):
    """A shard's part of all tables.

    Args:
        stores: one for each of the job's tables, in their order.
        checks: checks the rows that are sent.
        now: returns monotonic seconds. wall: returns seconds since 1970, for rows that expire by time.
        rules: users' own rules, by import path. measures_ranks: others wait for each rank as long as this block says.

    Attributes:
        partitions: one for each table. core: what steps see and change of them, too; they count what needs nothing of Python.
        base: the checkpoint on which later ones build (psd/state/cuts/table_bases.py); empty: none.
        bases: checkpoints whose tables this shard has stored whole, with the marks of their snapshots. The code that stores
            checkpoints sets both.
    """

    def __init__(
        self,
        index: int,
        spec: JobSpec,
        stores: Sequence[TableStore],
        services: RoundServices,
        checks: RowChecks,
        now: Callable[[], float],
        wall: Callable[[], float],
        rules: Mapping[str, ListedRule],
        *,
        measures_ranks: bool,
    ) -> None:
        self._members, self._policy = services.members, services.policy
        self.partitions = [
            PartitionState(table, spec, store, rules, wall) for table, store in zip(spec.tables, stores, strict=True)
        ]
        self._expires_by_time = any(table.expire_seconds for table in spec.tables)
        dims = [table.dim for table in spec.tables]
        sums = TableSums(dims)
        self.core = core_of(spec, stores, checks, services.policy, sums)
        self.core.attend(services.members.ranks, measures_ranks)
        self.lie_in(self.core)
        self._seen = 0  # updates by steps
        for number, partition in enumerate(self.partitions):
            partition.attend(self.core, number)
        self.checks = checks
        self.base = ""
        self.bases: Mapping[str, Sequence[Mark]] = {}
        self._world_size = spec.world_size
        self._pool = SumsPool(dims)
        kind: type[Round] = MeasuredRowsRound if spec.has_verdicts else ExactRowsRound
        scalars = [len(group.info.scalars) for group in spec.groups]
        setting = RoundSetting(np.ones(1, np.uint32), Static(), services.is_mean, services.policy, self._pool, services.members)
        is_exact = spec.aggregation == "exact" or spec.has_verdicts

        def open_round(number: int) -> Round:
            return kind(number, setting) if is_exact else FastRowsRound(setting, self.core, sums, scalars)

        super().__init__(
            index,
            services,
            open_round,
            CoreTimes(self.core, now),
            min(partition.version for partition in self.partitions),
        )
        self.ages = SteppedAges(index, self.core)
        self._last_reset: SetMark | None = None  # in this life of the shard
        self._recall()

    def _recall(self) -> None:
        """Derive the dedup window from the partitions' notes, and let partitions with equal notes share one array."""
        first = self.partitions[0].notes
        for partition in self.partitions:
            if np.array_equal(partition.notes, first):
                partition.notes = first
        self._window: list[Counted] = [
            min(counted) for counted in zip(*(counted_in(p.notes) for p in self.partitions), strict=True)
        ]

    @override
    def _new_lock(self, index: int) -> threading.Lock:
        return locks.new(locks.Level.BLOCK, index, self.core.lock)

    def _see(self) -> None:
        """Take over what steps have made of the partitions. Under the lock."""
        updates = self.core.updates
        try:
            noted = [partition.store.notes() for partition in self.partitions]
        except StoreClosed:
            return  # the job is going back to a checkpoint: nothing more counts here
        for partition, notes in zip(self.partitions, noted, strict=True):
            partition.note(notes)
        self._recall()
        self._seen = updates

    @override
    def settle(self) -> None:
        with self.lock:
            if self._seen != self.core.updates:
                self._see()
            self._settle()

    @override
    def _add_wait(self, version: int, ticket: Ticket) -> None:
        self.core.has_tickets = True  # until `end_waits`
        super()._add_wait(version, ticket)

    def end_waits(self) -> None:
        """Apply the round that a step has completed, if that was left to Python; end the waits for the version that it made."""
        with self.lock:
            if self._round.is_due:
                self._settle()
            self._waits.up_to(self.version)
            self.core.has_tickets = self._waits.has_tickets

    @property
    def step(self) -> int:
        """Units of the clock that the next update takes. A round is one step; without rounds, one push of every worker is."""
        return STEP if self._policy.has_rounds else max(1, STEP // max(1, self._members.taking_part()))

    def begin(self, version: int) -> None:
        """Let the block begin at a version, with no push counted and the rows that its tables have.

        Raises:
            OutOfSpace: some tables may have begun already.
        """
        with self.lock:
            notes = np.zeros(notes_count(self._world_size), np.uint64)
            notes[VERSION] = version
            for partition in self.partitions:
                partition.find_clock()
                self._keep(partition, notes, partition.clock)
            self._open(version)
            self._recall()

    # -- updates -----------------------------------------------------------------------------------------------------------

    def _counted(self, rank: int) -> Counted:
        if self._seen != self.core.updates:
            self._see()
        return self._window[rank]

    @override
    def last_counted(self, rank: int) -> Counted:
        if self._seen != self.core.updates:
            with self.lock:  # once after steps, which hold it for an update of theirs at most
                if self._seen != self.core.updates:
                    self._see()
        return max(partition.counted(rank) for partition in self.partitions)

    def _alone(self, part: Contribution, age: int) -> Update:
        values = part.values if part.weight else None
        gradient = Gradient(None, values, 1.0, part.scale, _ALL, age=age)
        return Update(gradient, part.scalars, {part.rank: part.session})

    def _write(self, update: Update, clock: int) -> int:
        if self._seen != self.core.updates:
            self._see()
        gradient = update.gradient
        sums = gradient.accumulator if isinstance(gradient.accumulator, TableSums) else None
        given: list[Any] = [rows for rows in (gradient.accumulator, gradient.last) if rows is not None and rows is not sums]
        lent = None
        following: dict[int, NDArray[np.uint64]] = {}
        pending: list[tuple[PartitionState, int, _Given | None]] = []
        held: list[PartitionState] = []
        try:
            if given and gradient.weight not in (0, 1):  # weighted as a sum would be, so that all shards have the same bits
                sums = lent = self._pool.lend()
                sums.add(given[0], gradient.weight)
            step = self.step
            for number, partition in enumerate(self.partitions):  # removes old rows first, so that none goes amid the update
                if not self._has(partition, update, clock):
                    pending.append((partition, partition.begin_update(step), _given_to(number, sums, given)))
            for partition, _, rows in pending:  # without room for all of them nothing else changes
                partition.store.hold(0 if rows is None else rows.ids_count)
                held.append(partition)
            for partition, used, rows in pending:
                notes = following.get(id(partition.notes))
                if notes is None:
                    notes = following[id(partition.notes)] = self._noted(partition.notes, update.sessions, clock)
                if rows is None:
                    self._write_notes(partition, notes, used, is_held=True)
                    continue
                named = partition.scalars(update.scalars[partition.group], gradient.age)
                own = None if partition.own is None else partition.own.with_numbers(named, gradient.age)
                partition.store.push(
                    rows.ids,
                    rows.values,
                    named if own is None else {},
                    scale=gradient.scale,
                    clock=used,
                    notes=notes,
                    distinct=rows.is_distinct,
                    own=own,
                    more=rows.more,
                    is_held=True,
                )
            for partition, used, _ in pending:
                partition.store.commit()
                self.core.set_clock(partition.number, used)
                partition.notes = following[id(partition.notes)]
                partition.version += 1
        except StoreFull as error:
            raise OutOfSpace(f"table {partition.spec.name!r}: no room for its rows: {error.strerror}") from error
        except MemoryError as error:
            raise OutOfSpace(f"tables: no memory for an update of their rows: {error}") from error
        except RowsFailed as failed:
            raise self._note_failed(failed.error, failed.path, "table", partition.spec.name) from failed.error
        finally:
            for partition in held:
                partition.store.let_go()
            if lent is not None:
                self._pool.give_back(lent)
        for rank, session in update.sessions.items():
            self._window[rank] = session, clock + 1
        least: int = min(map(_VERSION_OF, self.partitions))
        return least

    def _has(self, partition: PartitionState, update: Update, clock: int) -> bool:
        """True if this partition has the update from an earlier try: the process died, or another partition had no room."""
        if self._policy.has_rounds:
            return partition.version > self.version
        ((rank, session),) = update.sessions.items()
        return partition.counted(rank) >= (session, clock + 1)

    def _noted(self, before: NDArray[np.uint64], sessions: Mapping[int, int], clock: int) -> NDArray[np.uint64]:
        notes: NDArray[np.uint64] = before.copy()
        notes[VERSION] += np.uint64(1)
        for rank, session in sessions.items():
            notes[1 + rank] = session
            notes[1 + self._world_size + rank] = clock + 1
        return notes

    def _keep(self, partition: PartitionState, notes: NDArray[np.uint64], clock: int) -> None:
        """Change a partition's notes and clock, but no row."""
        try:
            self._write_notes(partition, notes, clock, is_held=False)
        except StoreFull as error:
            raise OutOfSpace(f"table {partition.spec.name!r}: no room for its state: {error.strerror}") from error
        partition.clock = clock
        partition.note(notes)

    def _write_notes(self, partition: PartitionState, notes: NDArray[np.uint64], clock: int, *, is_held: bool) -> None:
        rows = np.empty((0, partition.store.spec.layout.width), np.float32)
        partition.store.write(_NO_IDS, rows, notes=notes, clock=clock, is_held=is_held)

    def _measured(self, under: Verdict | None) -> Squares | Unmeasured:
        return self._round.measure(None, under)

    # -- reading -----------------------------------------------------------------------------------------------------------

    @override
    def read(self, version_min: int) -> tuple[int, None] | None:
        """The version alone."""
        if self.version < version_min and not self._is_due:
            return None  # without the lock, which another call may hold while its kernel works
        with self.lock:
            return (self.version, None) if self._reach(version_min) else None

    def fill(self, rows: Sequence[TableRows], *, is_use: bool) -> None:
        """Read rows into the arrays of `rows`, converting to their dtype. Takes no lock.

        Args:
            is_use: True: mark the rows as used.
        """
        step = self.step
        for number, ids, values in rows:
            partition = self.partitions[number]
            used = partition.next_clock(step) if is_use else None
            if values.dtype == np.float32:
                partition.store.read(ids, values, clock=used)
            else:
                values[...] = psd_core.narrowed(partition.store.read(ids, clock=used), values.dtype)

    def snapshots(self, base: str) -> list[TableSnapshot] | None:
        """Begin a snapshot of each table; None while other snapshots are under way. The caller holds the lock.

        Args:
            base: the checkpoint whose rows the snapshots can leave out. If this shard does not remember it, they have all rows.
        """
        marks: Sequence[Mark | None] = self.bases.get(base) or [None] * len(self.partitions)
        begun: list[TableSnapshot] = []
        try:
            for partition, mark in zip(self.partitions, marks, strict=True):
                begun.append(partition.store.snapshot(mark))
        except StoreClosed:
            raise
        except (ArenaError, MemoryError) as error:
            for snapshot in begun:
                snapshot.close()
            if isinstance(error, MemoryError):
                raise
            return None
        return begun

    def check_reset(self) -> None:
        """Raise InvalidRequest if slots cannot begin anew, because steps have changed rows that nobody has trained."""
        for partition in self.partitions:
            if partition.store.moves_untrained:
                raise InvalidRequest(
                    f"table {partition.spec.name!r}: its slots cannot begin anew, because rows that nobody has trained have "
                    'changed with its steps, by weight decay say; it has updates="catch_up"'
                )

    def reset_slots(self, mark: SetMark, clock: int) -> None:
        """Let the slots of all rows, and the tables' counts of steps, begin anew; as with BlockState.setting, once for a load.

        Raises:
            OutOfSpace: some slots have begun anew.
        """
        with self.lock:
            is_beyond = self._policy.has_rounds and self.version > clock
            if is_beyond or self._last_reset == mark:
                return
            for partition in self.partitions:
                reset_slots(partition.spec.name, partition.store)
            self._last_reset = mark

    # -- the life of rows --------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Remove the rows that have expired by time; updates remove those that expire by steps. Does nothing while an update
        runs: it removes such rows, too, and a user's rule may take longer than the caller can wait."""
        if self._expires_by_time and self.lock.acquire(blocking=False):
            try:
                for partition in self.partitions:
                    if partition.time is not None:
                        with contextlib.suppress(StoreFull, MemoryError):  # the next tick, or update, tries again
                            partition.begin_update(self.step)
            finally:
                self.lock.release()

    @property
    def counts(self) -> list[TableCounts]:
        """Numbers of each table's rows on this shard."""
        found = []
        with contextlib.suppress(StoreClosed):  # the job is going back to a checkpoint
            for partition in self.partitions:
                now = partition.store.counters()
                counted = {name: now[name] for name in TableCounts._fields if name in now}
                found.append(TableCounts(name=partition.spec.name, bytes=partition.store.used_bytes, **counted))
        return found


def _given_to(number: int, sums: TableSums | None, given: Sequence[Any]) -> _Given | None:
    """The gradients of an update for one table; None if the update has no step of that table."""
    if sums is not None:
        table = sums.tables[number]
        if not table.is_touched:
            return None
        return _Given(table.ids, table.values, True, None, len(table))
    found: _Given | None = None
    for gradients in given:
        if number in gradients:
            _, ids, values = gradients[number]
            if found is None:
                found = _Given(ids, values, False, None, len(ids))
            else:
                found = _Given(found.ids, found.values, False, (ids, values), found.ids_count + len(ids))
    return found
