"""Cuts: when a job is stored, and this shard's part of each. Pins pages; writes nothing.

A shard announces a cut, workers carry it to the others. With rounds it is a version a few rounds ahead, so that every shard
hears of it before its blocks get there; each block's page is pinned when the block reaches that version. Without rounds each
shard pins all its blocks at one instant. Training goes on meanwhile: an update writes to another page. Pages of buffers come
last: whoever keeps them has stored them before the last round closed; where there are no rounds, the shard waits for them.

A `Snapshot` that is complete, or that cannot be completed any more, is put into the queue of whoever began it, who takes it
from there in a thread of its own. Nobody is called back, since pages come under the blocks' locks. Thread-safe.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TypeAlias

from psd.checkpoint.cut import TIME_S_MAX, CutName
from psd.contract.config import CUTS_MAX
from psd.contract.errors import InvalidRequest
from psd.state import locks
from psd.state.aggregation.block import BlockState
from psd.state.job import Job
from psd.v1 import data_pb2, job_pb2
from psd_core.arena import ArenaClosed, Page
from psd_core.table import TableSnapshot

AHEAD = 3
"""Rounds between announcing a cut and its version. If the announcing shard is in round r, every worker hears of it with the
reply to its push of round r + 1 at the latest, and tells the others with its push of round r + 2, before that can close."""

UNWRITTEN_MAX = 2
"""Snapshots to be stored: one that is being written and one that waits. Each may pin another version of every block; what pins
nothing is not limited by it."""

FINAL_ID = "final"
"""Id of the cut taken when all workers have left."""

GOES_BACK = "the job goes back to a checkpoint"
"""The reason when a cut is missed because the job goes back."""

_ID = re.compile(r"[0-9A-Za-z]{1,64}")


_NO_TABLES: list[TableSnapshot] = []
"""Stands for no news of the tables."""


def new_id() -> str:
    """An id for another cut."""
    return secrets.token_hex(4)


def check_cuts(cuts: Sequence[data_pb2.Cut]) -> None:
    """Raise InvalidRequest for a name or a time that no cut has, or too many cuts."""
    if len(cuts) > CUTS_MAX:
        raise InvalidRequest(f"cuts: {len(cuts)} are above the limit of {CUTS_MAX}")
    for cut in cuts:
        if not _ID.fullmatch(cut.id):
            raise InvalidRequest(f"cuts.id: expected 1 to 64 letters and digits, got {cut.id[:80]!r}")
        if not 0 <= cut.created_at <= TIME_S_MAX:  # also refuses NaN, which a manifest could not be compared by
            raise InvalidRequest(f"cuts.created_at: expected seconds from 0 to {TIME_S_MAX:g}, got {cut.created_at}")
        if cut.base and CutName.of(cut.base) is None:
            raise InvalidRequest(f"cuts.base: expected the name of a checkpoint, got {cut.base[:80]!r}")


@dataclass(eq=False)
class Snapshot:
    """This shard's part of a cut.

    Attributes:
        job, timeline: that it belongs to; the shard may have gone back to a checkpoint meanwhile.
        done: where the snapshot is put, once, when all pages are there or cannot be had.
        why_missed: why they cannot; empty if they are there.
        pages: pinned, by block; whoever takes the snapshot unpins them. is_complete: all were there.
        tables: of a cut to be stored: a snapshot of each table, begun; ended with the pages.
        awaits_tables: they have not been begun. lacks_tables: they cannot, because those of an earlier cut are being written.
        worker_clocks, client_states: by rank. learning_rates: scales of the learning rate, on shard 0.
        awaits_buffers: no round says when they are there, and they have not been brought. since: when that was noticed.
    """

    cut: data_pb2.Cut
    job: Job
    done: Done
    why_missed: str = ""
    awaits_buffers: bool = False
    since: float | None = None
    timeline: int = 0
    pages: dict[int, Page] = field(default_factory=dict)
    tables: list[TableSnapshot] = field(default_factory=list)
    awaits_tables: bool = False
    lacks_tables: bool = False
    is_complete: bool = False
    worker_clocks: dict[int, int] = field(default_factory=dict)
    client_states: dict[int, bytes] = field(default_factory=dict)
    learning_rates: list[job_pb2.LearningRateScale] = field(default_factory=list)


Done: TypeAlias = "SimpleQueue[Snapshot | None]"
"""Snapshots that are complete or missed; None comes from the waiting threads themselves, to wake up."""


class Cuts:
    """The cuts of a job that this shard takes part in.

    Args:
        surroundings: fills in clocks and client states.
    """

    def __init__(self, surroundings: Callable[[Snapshot], None]) -> None:
        self._surroundings = surroundings
        self._to_store: Done | None = None
        self._unwritten = 0
        self._lock = locks.new(locks.Level.CUTS)
        self._known: dict[str, data_pb2.Cut] = {}
        self._open: dict[Snapshot, None] = {}
        self._gone: weakref.WeakSet[Job] = weakref.WeakSet()

    def take_part(self) -> Done:
        """Store the cuts announced from now on: returns the queue of snapshots, each to be `release`d.

        Before that the shard ignores cuts; the checkpoints stay incomplete.
        """
        if self._to_store is None:
            self._to_store = SimpleQueue()
        return self._to_store

    @property
    def unwritten(self) -> int:
        """Snapshots that were handed over to be stored and have not been released."""
        return self._unwritten

    @property
    def is_collecting(self) -> bool:
        """True if pages are being collected to be stored."""
        with self._lock:
            return any(snapshot.done is self._to_store for snapshot in self._open)

    @property
    def open(self) -> list[data_pb2.Cut]:
        """Cuts whose version this shard's blocks have not reached yet."""
        with self._lock:
            return [snapshot.cut for snapshot in self._open]

    def latest(self) -> list[data_pb2.Cut]:
        """The cuts for workers to carry to other shards."""
        if not self._known:
            return []
        with self._lock:
            return list(self._known.values())[-CUTS_MAX // 2 :]

    def learn(self, job: Job, cuts: Iterable[data_pb2.Cut]) -> None:
        """Take part in cuts that a worker brings, or that this shard announces. Known ones are ignored."""
        if self._to_store is None:
            return
        for cut in cuts:
            with self._lock:
                if cut.id in self._known:
                    continue
                self._known[cut.id] = cut
                forgotten = list(self._known)[: -2 * CUTS_MAX]
                for old in forgotten:
                    del self._known[old]
                given_up = [snapshot for snapshot in self._open if snapshot.cut.id in forgotten]
            for snapshot in given_up:
                self._miss(snapshot, f"{2 * CUTS_MAX} others have been named since")
            self.begin(Snapshot(cut, job, self._to_store))

    def begin(self, snapshot: Snapshot) -> None:
        """Collect the pages of a cut: as the blocks reach its version, or now if there are no rounds."""
        job = snapshot.job
        is_ruled_by_rounds = job.policy.has_rounds and job.trained_count > 0
        snapshot.awaits_tables = snapshot.done is self._to_store and job.tables is not None
        snapshot.awaits_buffers = snapshot.done is self._to_store and bool(job.buffer_blocks) and not is_ruled_by_rounds
        with self._lock:
            is_gone = job in self._gone
            self._open[snapshot] = None
        try:
            if is_gone:
                self._miss(snapshot, GOES_BACK)
            elif job.policy.has_rounds:
                self._wait_for_versions(snapshot)
            else:
                base = snapshot.cut.base if snapshot.awaits_tables else None
                pages, tables = job.take_all(but=job.buffer_blocks, base=base)
                self._add(snapshot, pages, tables)
        except ArenaClosed:  # since a moment ago
            self._miss(snapshot, GOES_BACK)

    def take_buffers(self, cut_ids: Collection[str]) -> None:
        """Take the buffers for these cuts as they are: their worker has brought them."""
        with self._lock:
            waiting = [snapshot for snapshot in self._open if snapshot.awaits_buffers and snapshot.cut.id in cut_ids]
        self._take_buffers(waiting)

    def on_tick(self, now: float, patience_s: float) -> None:
        """Take the buffers as they are for cuts that have waited for them for so long: their worker is busy, or gone."""
        with self._lock:
            waiting = [snapshot for snapshot in self._open if snapshot.awaits_buffers]
        for snapshot in waiting:
            snapshot.since = now if snapshot.since is None else snapshot.since
        self._take_buffers([s for s in waiting if s.since is not None and now - s.since > patience_s])

    def _take_buffers(self, snapshots: Sequence[Snapshot]) -> None:
        for snapshot in snapshots:
            snapshot.awaits_buffers = False
            try:
                self._add(snapshot, {})
            except ArenaClosed:
                self._miss(snapshot, GOES_BACK)

    def take_final(self, job: Job, cut: data_pb2.Cut) -> None:
        """Take the blocks as they are, now that nothing changes them any more."""
        assert self._to_store is not None
        snapshot = Snapshot(cut, job, self._to_store, awaits_tables=job.tables is not None)
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

    def abandon(self, snapshot: Snapshot) -> None:
        """Drop a snapshot that nobody waits for any more, and its pages."""
        with self._lock:
            self._open.pop(snapshot, None)
        self._give_back(snapshot)

    def release(self, snapshot: Snapshot) -> None:
        """Give back the pages that a snapshot to be stored still holds."""
        self._give_back(snapshot)
        snapshot.job.arena.trim()
        with self._lock:
            self._unwritten -= 1
            waiting = [other for other in self._open if other.lacks_tables]
        for other in waiting:
            assert other.job.tables is not None
            with contextlib.suppress(ArenaClosed):
                self._add(other, {}, other.job.tables.snapshots(other.cut.base))

    def forget(self, job: Job, why: str = GOES_BACK) -> None:
        """Drop all open cuts, also those begun later: the job ends here."""
        with self._lock:
            self._gone.add(job)
            snapshots = list(self._open)
            self._known = {}
        for snapshot in snapshots:
            self._miss(snapshot, why)

    def _wait_for_versions(self, snapshot: Snapshot) -> None:
        blocks = snapshot.job.blocks
        tables = snapshot.job.tables
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
        """Take pages, or the tables' snapshots, for an open snapshot, and with the last ones hand it over; give them back if it
        is not open any more. tables: None: they cannot be begun."""
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
                if len(snapshot.pages) + len(buffers) == len(snapshot.job.blocks) and not snapshot.awaits_buffers:
                    snapshot.pages.update({index: block.pin() for index, block in buffers.items()})
                snapshot.is_complete = len(snapshot.pages) == len(snapshot.job.blocks) and not snapshot.awaits_tables
            if snapshot.is_complete and is_open:
                del self._open[snapshot]
                has_room = self._unwritten < UNWRITTEN_MAX or not (snapshot.pages or snapshot.tables)
                is_taken = not is_to_store or has_room or snapshot.cut.id == FINAL_ID
                is_taken = is_taken and not snapshot.lacks_tables
                self._unwritten += is_to_store and is_taken
        if not is_open:
            self._drop(snapshot.job, pages, tables or [])
        elif not is_taken:
            self._hand_over(snapshot, "earlier ones are not written yet: the storage is too slow for this pace")
        elif snapshot.is_complete:
            self._surroundings(snapshot)
            self._hand_over(snapshot)

    def _miss(self, snapshot: Snapshot, why: str) -> None:
        with self._lock:
            if snapshot not in self._open:
                return  # it is complete, or was given up
            del self._open[snapshot]
        self._hand_over(snapshot, why)

    def _hand_over(self, snapshot: Snapshot, why_missed: str = "") -> None:
        if why_missed:
            self._give_back(snapshot)
        snapshot.why_missed = why_missed
        snapshot.done.put(snapshot)

    def _give_back(self, snapshot: Snapshot) -> None:
        with self._lock:
            pages, snapshot.pages = snapshot.pages, {}
            tables, snapshot.tables = snapshot.tables, []
        # Or whoever names distant cuts and hangs up, again and again, would fill the blocks' memory.
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
