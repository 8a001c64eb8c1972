"""Cuts: when a job is stored, and this shard's part of each. Pins pages; writes nothing.

A shard announces a cut, workers carry it to the others. With rounds it is a version a few rounds ahead, so that every shard
hears of it before its blocks get there; each block's page is pinned when the block reaches that version. Without rounds it is
a position of each worker (positions.py): each shard pins all its blocks when it has counted the pushes before, and none beyond.
Training goes on meanwhile: an update writes to another page. Pages of buffers are pinned last: with rounds, workers have stored
them before the last round closed; without, the shard waits for them.

A `Snapshot` that is complete, or that cannot be completed any more, is put into the queue that its creator has given, and the
creator takes it from there in another thread. There are no callbacks, because pages come under the blocks' locks. Thread-safe.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from psd.contract.config import CUTS_MAX
from psd.contract.errors import error_text
from psd.state import locks
from psd.state.aggregation.block import BlockState
from psd.state.core import ShardCore
from psd.state.cuts.positions import HOLD_S_MAX, Positions
from psd.state.cuts.snapshots import Done, Snapshot, told
from psd.state.job import Job
from psd.state.tickets import Ticket, WaitKind
from psd.state.workers.membership import Worker, WorkerState
from psd.v1 import data_pb2
from psd_core.arena import Page, StoreClosed
from psd_core.table import TableSnapshot

AHEAD = 3
"""Rounds between announcing a cut and its version. If the announcing shard is in round r, every worker hears of it with the
reply to its push of round r + 1 at the latest, and tells the others with its push of round r + 2, before that can close."""

UNWRITTEN_MAX = 2
"""Most snapshots to be stored: one that is being written and one that waits. Each may pin another version of every block;
snapshots that pin nothing are not limited."""

READS_MAX = CUTS_MAX // 2
"""Cuts of readers, in a job without rounds, that may wait for positions at a time: workers carry them."""

GATHER_S_MAX = 60.0
"""Most seconds, beyond a lease, for which a cut waits for the workers' positions."""

GOES_BACK = "the job goes back to a checkpoint"
"""The reason when a cut is missed because the job goes back."""

Surroundings = Callable[[Snapshot, Mapping[int, Page], Collection[TableSnapshot]], None]

_NO_TABLES: list[TableSnapshot] = []
"""Value of `tables` if there is nothing new about the tables."""


class Cuts:
    """The cuts of a job that this shard takes part in.

    Args:
        surroundings: adds the clocks and client states that belong to these pages and tables to a snapshot.

    Attributes:
        awaits_positions: True if some cut waits for positions. given_up: ids of cuts that some shard cannot take, latest last.
    """

    def __init__(self, core: ShardCore, surroundings: Surroundings) -> None:
        self._core = core
        self._surroundings = surroundings
        self.awaits_positions = False
        self.given_up: list[str] = []
        self._to_store: Done | None = None
        self._unwritten: set[Snapshot] = set()
        self._lock = locks.new(locks.Level.CUTS)
        self._known: dict[str, data_pb2.Cut] = {}
        self._open: dict[Snapshot, None] = {}
        self._gone: weakref.WeakSet[Job] = weakref.WeakSet()

    def take_part(self) -> Done:
        """Collect the cuts announced from now on. Returns the queue of their snapshots, each of which must be `release`d.

        Before this is called, the shard ignores cuts to be stored, and their checkpoints stay incomplete.
        """
        if self._to_store is None:
            self._to_store = SimpleQueue()
        return self._to_store

    @property
    def unwritten(self) -> int:
        """Number of snapshots that were handed over to be stored and are not released yet."""
        return len(self._unwritten)

    @property
    def is_storing(self) -> bool:
        """True if snapshots are still to be written, or the final one waits until the tables of one of them are written."""
        with self._lock:
            return bool(self._unwritten) or any(snapshot.is_final and snapshot.lacks_tables for snapshot in self._open)

    @property
    def is_collecting(self) -> bool:
        """True if pages are being collected to be stored."""
        with self._lock:
            return any(snapshot.done is self._to_store for snapshot in self._open)

    @property
    def open(self) -> list[data_pb2.Cut]:
        """The cuts for which this shard has not collected everything yet."""
        with self._lock:
            return [snapshot.cut for snapshot in self._open]

    def latest(self) -> list[data_pb2.Cut]:
        """The cuts for workers to carry to other shards."""
        if not self._known and not self.awaits_positions:
            return []
        with self._lock:
            latest = {cut.id: cut for cut in list(self._known.values())[-CUTS_MAX // 2 :]}
            if self.awaits_positions:
                awaiting = {snapshot.cut.id: snapshot.cut for snapshot in self._open if snapshot.awaits_positions}
                older = {cut_id: cut for cut_id, cut in awaiting.items() if cut_id not in latest}
                latest = older | latest | awaiting
            return list(latest.values())[-CUTS_MAX:]

    def learn(self, job: Job, cuts: Iterable[data_pb2.Cut], worker: Worker | None = None, session: int = 0) -> None:
        """Take part in cuts that this shard announces, or that a worker brings. Known cuts are ignored; but what the worker
        says about its position, in that session, is noted."""
        to_store = self._to_store
        for cut in cuts:
            if cut.given_up:
                self.give_up(cut.id, "another shard cannot have it")
            if to_store is None or cut.is_read or cut.given_up:  # a reader calls each shard
                continue
            with self._lock:
                if cut.id in self._known:
                    continue
                own = data_pb2.Cut(id=cut.id, step=cut.step, created_at=cut.created_at, base=cut.base, order=cut.order)
                own.waits = job.is_cut_by_positions
                self._known[cut.id] = own
                forgotten = list(self._known)[: -2 * CUTS_MAX]
                for old in forgotten:
                    del self._known[old]
                given_up = [snapshot for snapshot in self._open if snapshot.cut.id in forgotten]
            for snapshot in given_up:
                self._miss(snapshot, f"{2 * CUTS_MAX} others have been named since")
            if not job.is_cut_by_positions:
                job.note_cut(cut.order)
            self.begin(Snapshot(own, job, to_store))
        if worker is not None and self.awaits_positions:
            self.hear(cuts, worker, session)

    def begin(self, snapshot: Snapshot) -> None:
        """Collect the pages of a cut: as the blocks reach its version, or, without rounds, at the workers' positions."""
        job = snapshot.job
        if job.is_cut_by_positions:
            is_read = snapshot.done is not self._to_store
            snapshot.positions = Positions(self._core.now(), is_read)
            snapshot.cut = told(snapshot.cut, waits=True, is_read=is_read)
        is_ruled_by_rounds = job.policy.has_rounds and job.trained_count > 0
        snapshot.awaits_tables = snapshot.done is self._to_store and job.tables is not None
        snapshot.awaits_buffers = snapshot.done is self._to_store and bool(job.buffer_blocks) and not is_ruled_by_rounds
        with self._lock:
            is_gone = job in self._gone
            reads = sum(other.cut.is_read and other.awaits_positions for other in self._open)
            self._open[snapshot] = None
            self._see_whether_positions_are_awaited()
        self._core.revoke()
        try:
            if is_gone:
                self._miss(snapshot, GOES_BACK)
            elif snapshot.cut.is_read and reads >= READS_MAX:
                self._miss(snapshot, f"{reads} readers wait for the workers' positions already")
            elif snapshot.positions is not None:
                self.advance()
            elif job.policy.has_rounds:
                self._wait_for_versions(snapshot)
            else:  # nothing of the job is trained
                self._add(snapshot, job.take_all(but=job.buffer_blocks, base=None)[0])
        except StoreClosed:  # since a moment ago
            self._miss(snapshot, GOES_BACK)

    # -- without rounds --------------------------------------------------------------------------------------------------

    def _see_whether_positions_are_awaited(self) -> None:
        self.awaits_positions = any(snapshot.awaits_positions for snapshot in self._open)

    def _awaiting_positions(self) -> list[Snapshot]:
        with self._lock:
            return [snapshot for snapshot in self._open if snapshot.awaits_positions]

    def hear(self, cuts: Iterable[data_pb2.Cut], worker: Worker, session: int) -> None:
        """Note what a worker says, in this session, about cuts that wait for positions."""
        with self._core.lock:
            said = {cut.id: cut for cut in cuts if cut.ready or cut.HasField("position")}
            is_news = False
            for snapshot in self._awaiting_positions() if said else ():
                assert snapshot.positions is not None
                cut = said.get(snapshot.cut.id)
                if cut is not None and worker.state is WorkerState.LIVE and worker.session == session:
                    position = cut.position if cut.HasField("position") else None
                    order = 0 if position is None else cut.order
                    is_news |= snapshot.positions.hear(worker.rank, session, position, is_ready=cut.ready, order=order)
            if is_news:
                # A push that a cut needs does not wait for other workers, which may be held for the cut.
                for gate in self._core.gates:
                    if gate.rank == worker.rank:
                        gate.resolve()
        if is_news:
            self.advance()

    def needs(self, worker: Worker, session: int, clock: int) -> bool:
        """True if a cut waits for this worker's push of this clock."""
        awaiting = [snapshot.positions for snapshot in self._awaiting_positions()]
        return any(positions is not None and positions.needs(worker.rank, session, clock) for positions in awaiting)

    def hold(self, worker: Worker, session: int, clock: int) -> Ticket | None:
        """A ticket if this worker's push of this clock is beyond its position in a cut that is not taken yet."""
        for snapshot in self._awaiting_positions():
            positions = snapshot.positions
            assert positions is not None
            with self._core.lock:
                if not positions.holds(worker.rank, session, clock):
                    continue
                ticket = self._core.ticket(worker, session, WaitKind.CUT, clock, partial(self._lacking, snapshot))
                with self._lock:
                    is_held = snapshot in self._open and not positions.is_taken
                    if is_held:
                        positions.tickets.append(ticket)
                        positions.held_since = positions.held_since or self._core.now()
                if is_held:
                    return ticket
                ticket.resolve()
        return None

    def _lacking(self, snapshot: Snapshot) -> int:
        """Mask of the workers that a cut waits for (Positions.lacking). The caller holds the shard's lock."""
        assert snapshot.positions is not None
        return snapshot.positions.lacking(self._core.members.workers, by_clock=snapshot.job.trained_count > 0)

    def advance(self) -> None:
        """Take the cuts for which all positions are reached now; on shard 0, also tell workers to choose positions."""
        for snapshot in self._awaiting_positions() if self.awaits_positions else ():
            try:
                self._advance(snapshot)
            except StoreClosed:  # since a moment ago
                self._miss(snapshot, GOES_BACK)

    def _advance(self, snapshot: Snapshot) -> None:
        """Tell workers to choose their positions in a cut, or take its pages, if everything for that is there."""
        positions, job = snapshot.positions, snapshot.job
        assert positions is not None
        with self._core.lock:
            workers, is_first = self._core.members.workers, self._core.config.shard_index == 0
            if is_first and not positions.is_ready and positions.have_all_heard(workers) and self._is_next(snapshot):
                positions.is_ready = True
                if not snapshot.cut.is_read:
                    positions.order = job.arena.word("cut_order") + 1
                    job.note_cut(positions.order)
                self._tell(snapshot, waits=True, ready=True, order=positions.order)
            if positions.is_taken or self._lacking(snapshot):
                return
            positions.found = positions.agreed(workers)
            # Only workers that are not live can change the pages meanwhile; of them, the cut has the pushes that have counted.
            pages, tables = job.take_all(but=job.buffer_blocks, base=snapshot.cut.base if snapshot.awaits_tables else None)
            beyond = positions.beyond(workers, job.counted_on(pages, tables or [])) if job.trained_count else ""
            if not beyond:
                positions.is_taken = True
                order = positions.order or snapshot.cut.order
                if not snapshot.cut.is_read:
                    job.note_cut(order)
                step = positions.step(workers, snapshot.cut.step, has_bound=job.policy.has_bound)
                self._tell(snapshot, step=step, order=order)
                # Before others can complete it, by the buffers, and hand it over.
                self._surroundings(snapshot, pages, tables or [])
                self._add(snapshot, pages, tables)
        if beyond:
            self._drop(job, pages, tables or [])
            self._miss(snapshot, beyond)
        else:
            self._let_go(snapshot)

    def _is_next(self, snapshot: Snapshot) -> bool:
        """True unless workers are choosing positions in another cut to be stored: one at a time, so that the cuts' names tell
        which one is later, even if workers come and go in between."""
        others = [] if snapshot.cut.is_read else self._awaiting_positions()
        return not any(other.positions is not None and other.positions.is_ready and not other.cut.is_read for other in others)

    def _tell(self, snapshot: Snapshot, **news: Any) -> None:
        """Change what the shard's replies say about a cut."""
        with self._lock:
            given_up = snapshot.cut.id in self.given_up
            snapshot.cut = told(snapshot.cut, **{"waits": False, "ready": False, "given_up": given_up, **news})
            if snapshot.cut.id in self._known:
                self._known[snapshot.cut.id] = snapshot.cut

    def _let_go(self, snapshot: Snapshot) -> None:
        """Release the pushes that were held for a cut."""
        with self._lock:
            self._see_whether_positions_are_awaited()
            held = snapshot.positions.tickets if snapshot.positions is not None else []
        for ticket in held:
            ticket.resolve()

    def _give_up_late(self, now: float, lease_s: float) -> None:
        """Give up the cuts that hold pushes, or wait for positions, for too long."""
        for snapshot in self._awaiting_positions():
            positions = snapshot.positions
            assert positions is not None
            is_held_long = positions.held_since is not None and now - positions.held_since > HOLD_S_MAX
            if not is_held_long and now - positions.since <= lease_s + GATHER_S_MAX:
                continue
            with self._core.lock:
                lacking = [worker.rank for worker in self._core.members.in_mask(self._lacking(snapshot))]
            self.give_up(snapshot.cut.id, f"the positions of workers {lacking}, or pushes before them, have not come in time")

    def give_up(self, cut_id: str, why: str) -> None:
        """Give up a cut by positions, because a shard cannot take its part, or has another part. Workers tell all shards."""
        with self._lock:
            if cut_id in self.given_up:
                return
            self.given_up = [*self.given_up, cut_id][-2 * CUTS_MAX :]
            if cut_id in self._known:
                self._known[cut_id] = told(self._known[cut_id], given_up=True)
        for snapshot in self._awaiting_positions():
            if snapshot.cut.id == cut_id:
                self._miss(snapshot, why)

    # -- buffers -----------------------------------------------------------------------------------------------------------

    def take_buffers(self, cut_ids: Collection[str]) -> None:
        """Take the present buffers for these cuts, because workers have stored them."""
        with self._lock:
            waiting = [snapshot for snapshot in self._open if snapshot.awaits_buffers and snapshot.cut.id in cut_ids]
        self._take_buffers(waiting)

    def on_tick(self, now: float, patience_s: float) -> None:
        """Take the present buffers for cuts that have waited longer than `patience_s`, and give up those without positions."""
        if self.awaits_positions:
            self.advance()
            self._give_up_late(now, patience_s)
        with self._lock:
            waiting = [snapshot for snapshot in self._open if snapshot.awaits_buffers and not snapshot.awaits_positions]
        for snapshot in waiting:
            snapshot.since = now if snapshot.since is None else snapshot.since
        self._take_buffers([s for s in waiting if s.since is not None and now - s.since > patience_s])

    def _take_buffers(self, snapshots: Sequence[Snapshot]) -> None:
        for snapshot in snapshots:
            snapshot.awaits_buffers = False
            try:
                self._add(snapshot, {})
            except StoreClosed:
                self._miss(snapshot, GOES_BACK)

    def take_final(self, job: Job, cut: data_pb2.Cut) -> None:
        """Take this shard's part of the final cut. Call it when nothing changes the blocks any more."""
        assert self._to_store is not None
        job.note_cut(cut.order)
        snapshot = Snapshot(cut, job, self._to_store, is_final=True, awaits_tables=job.tables is not None)
        versions = {*job.trained_versions}
        pages, tables = job.take_all(base=cut.base)
        with self._lock:
            self._open[snapshot] = None
        if job.policy.has_rounds and not versions <= {cut.step}:
            self._drop(job, pages, tables or [])
            self._miss(snapshot, f"blocks are at versions {sorted(versions)}, the last round is {cut.step}")
        elif tables is None:  # an earlier cut is being written; nothing changes until that is done
            snapshot.lacks_tables = True
            self._add(snapshot, pages)
        else:
            self._add(snapshot, pages, tables)

    def end_reads(self) -> None:
        """Miss the cuts for which readers wait: the shard is shutting down."""
        for snapshot in list(self._open):
            if snapshot.done is not self._to_store:
                self._miss(snapshot, "the shard is shutting down")

    def abandon(self, snapshot: Snapshot) -> None:
        """Drop a snapshot that is no longer wanted, and its pages."""
        with self._lock:
            self._open.pop(snapshot, None)
        self._let_go(snapshot)
        self._give_back(snapshot)

    def release(self, snapshot: Snapshot) -> None:
        """Give back the pages that a snapshot to be stored still holds. Idempotent."""
        self._give_back(snapshot)
        snapshot.job.arena.trim()
        with self._lock:
            self._unwritten.discard(snapshot)
            waiting = [other for other in self._open if other.lacks_tables]
        if self._core.config.checkpoint_steps and not self._unwritten:
            self._core.revoke()  # a cut by steps may be due, see CutSchedule.stop_at
        for other in waiting:
            assert other.job.tables is not None
            try:
                self._add(other, {}, other.job.tables.snapshots(other.cut.base))
            except StoreClosed:
                self._miss(other, GOES_BACK)
            except (MemoryError, OSError) as error:  # must not fail the snapshot that is released
                self._miss(other, error_text(error))

    def forget(self, job: Job, why: str = GOES_BACK) -> None:
        """Drop all open cuts of a job that this shard gives up, and later those that are begun for it."""
        with self._lock:
            self._gone.add(job)
            snapshots, self._known = list(self._open), {}
        job.kept.forget(for_ever=True)
        for snapshot in snapshots:
            self._miss(snapshot, why)

    def _wait_for_versions(self, snapshot: Snapshot) -> None:
        blocks, tables = snapshot.job.blocks, snapshot.job.tables
        if len(blocks) == len(snapshot.job.buffer_blocks) and not snapshot.awaits_tables:
            self._add(snapshot, {})
        for index, block in blocks.items():

            def take(index: int = index, block: BlockState = block) -> None:
                self._add(snapshot, {index: block.pin()})

            if index in snapshot.job.buffer_blocks:
                continue
            if not block.plan.trained:
                take()
            elif not block.at_version(snapshot.cut.step, snapshot, take):
                self._miss(snapshot, f"block {index} is at version {block.version}, beyond the cut's {snapshot.cut.step}")
                return
        if tables is None or not snapshot.awaits_tables:
            return

        def take_tables() -> None:
            self._add(snapshot, {}, tables.snapshots(snapshot.cut.base))

        if not tables.at_version(snapshot.cut.step, snapshot, take_tables):
            self._miss(snapshot, f"the tables are at version {tables.version}, beyond the cut's {snapshot.cut.step}")

    def _add(self, snapshot: Snapshot, pages: Mapping[int, Page], tables: list[TableSnapshot] | None = _NO_TABLES) -> None:
        """Add pages, or the tables' snapshots, to an open snapshot, and hand it over once it is complete. If it is not open any
        more, give them back. tables: None: the tables' snapshots cannot be begun now."""
        is_to_store = snapshot.done is self._to_store
        is_taken = True
        with self._lock:
            is_open = snapshot in self._open
            if is_open:
                snapshot.pages.update(pages)
                if tables is not _NO_TABLES:
                    snapshot.awaits_tables, snapshot.lacks_tables = False, tables is None
                    snapshot.tables = tables or []
                buffers = snapshot.job.buffer_blocks
                lacks_buffers = len(snapshot.pages) + len(buffers) == len(snapshot.job.blocks)
                if lacks_buffers and not (snapshot.awaits_positions or snapshot.awaits_buffers):
                    snapshot.pages.update({index: block.pin() for index, block in buffers.items()})
                snapshot.is_complete = len(snapshot.pages) == len(snapshot.job.blocks) and not snapshot.awaits_tables
                snapshot.is_complete = snapshot.is_complete and not snapshot.awaits_positions
            is_last = is_open and snapshot.is_complete
            if is_last:
                del self._open[snapshot]
                has_room = len(self._unwritten) < UNWRITTEN_MAX or not (snapshot.pages or snapshot.tables)
                is_taken = (not is_to_store or has_room or snapshot.is_final) and not snapshot.lacks_tables
                self._unwritten.update([snapshot] if is_to_store and is_taken else [])
        if not is_open:
            self._drop(snapshot.job, pages, tables or [])
        elif not is_taken:
            self._hand_over(snapshot, "earlier ones are not written yet: the storage is too slow for this pace")
        elif is_last:
            if snapshot.positions is None:
                self._surroundings(snapshot, snapshot.pages, snapshot.tables)
            self._hand_over(snapshot)

    def _miss(self, snapshot: Snapshot, why: str) -> None:
        with self._lock:
            if snapshot not in self._open:
                return  # it is complete, or was given up
            del self._open[snapshot]
        if snapshot.positions is not None:
            self._tell(snapshot)
            self._let_go(snapshot)
        self._hand_over(snapshot, why)

    def _hand_over(self, snapshot: Snapshot, why_missed: str = "") -> None:
        if why_missed:
            self._give_back(snapshot)
        snapshot.why_missed = why_missed
        snapshot.done.put(snapshot)

    def _give_back(self, snapshot: Snapshot) -> None:
        with self._lock:
            pages, snapshot.pages, tables, snapshot.tables = snapshot.pages, {}, snapshot.tables, []
        # Otherwise a reader that names distant cuts and hangs up, again and again, would fill the blocks' memory.
        for index in () if snapshot.is_complete else snapshot.job.blocks.keys() - pages.keys():
            snapshot.job.blocks[index].not_at_version(snapshot.cut.step, snapshot)
        if snapshot.awaits_tables and snapshot.job.tables is not None:
            snapshot.job.tables.not_at_version(snapshot.cut.step, snapshot)
        self._drop(snapshot.job, pages, tables)

    @staticmethod
    def _drop(job: Job, pages: Mapping[int, Page], tables: Iterable[TableSnapshot]) -> None:
        job.unpin_all(pages)
        for table in tables:
            table.close()
