"""Cuts: when a job is stored, and what of this shard belongs to it. Pins pages; writes nothing.

A shard announces a cut, workers carry it to the others. With rounds it is a version a few rounds ahead, so that every shard
hears of it before its blocks get there; each block's page is pinned when the block reaches that version. Without rounds each
shard pins all its blocks at one instant. Training goes on meanwhile: an update writes to another page.

A cut that is complete here is handed over as a `Snapshot`. Thread-safe; called under the blocks' locks, so it takes no other
lock than its own.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from psd.contract.errors import InvalidRequest
from psd.state import locks
from psd.state.job import Job
from psd.v1 import data_pb2
from psd_core.arena import ArenaClosed, Page

AHEAD = 3
"""Rounds between announcing a cut and its version. If the announcing shard is in round r, every worker hears of it with the
reply to its push of round r + 1 at the latest, and tells the others with its push of round r + 2, before that can close."""

CUTS_MAX = 8
TIME_S_MAX = 253_402_300_799.0
"""The last second of the year 9999."""
CLIENT_STATE_BYTES_MAX = 1 << 20
CLIENT_STATES_KEPT = 8

GOES_BACK = "the job goes back to a checkpoint"
"""Why a cut is missed then."""

_ID = re.compile(r"[0-9A-Za-z]{1,64}")


def check_cuts(cuts: Sequence[data_pb2.Cut]) -> None:
    """Raise InvalidRequest for a name or a time that no cut has, or too many cuts."""
    if len(cuts) > CUTS_MAX:
        raise InvalidRequest(f"cuts: {len(cuts)} are above the limit of {CUTS_MAX}")
    for cut in cuts:
        if not _ID.fullmatch(cut.id):
            raise InvalidRequest(f"cuts.id: expected 1 to 64 letters and digits, got {cut.id[:80]!r}")
        if not 0 <= cut.created_at <= TIME_S_MAX:  # also refuses NaN, which a manifest could not be compared by
            raise InvalidRequest(f"cuts.created_at: expected seconds from 0 to {TIME_S_MAX:g}, got {cut.created_at}")


def check_client_state(state: bytes) -> None:
    """Raise InvalidRequest if a client state is too large."""
    if len(state) > CLIENT_STATE_BYTES_MAX:
        raise InvalidRequest(f"client_state: has {len(state)} bytes, the limit is {CLIENT_STATE_BYTES_MAX}")


@dataclass(eq=False)
class Snapshot:
    """This shard's part of a cut.

    Attributes:
        job, timeline: that it belongs to; the shard may have gone back to a checkpoint meanwhile.
        on_ready, on_missed: told when all pages are there, or that they cannot be had. They return at once.
        pages: pinned, by block; whoever takes the snapshot unpins them. is_complete: all were there.
        worker_clocks, client_states: by rank.
    """

    cut: data_pb2.Cut
    job: Job
    on_ready: Callable[[Snapshot], None]
    on_missed: Callable[[data_pb2.Cut, str], None]
    timeline: int = 0
    pages: dict[int, Page] = field(default_factory=dict)
    is_complete: bool = False
    worker_clocks: dict[int, int] = field(default_factory=dict)
    client_states: dict[int, bytes] = field(default_factory=dict)


class ClientStates:
    """What workers need to go on after a restore: a few per rank, each with the clock at which it applies."""

    def __init__(self) -> None:
        self._lock = locks.new(locks.Level.LEAF)
        self._states: dict[int, dict[int, bytes]] = {}

    def on_push(self, rank: int, clock: int, state: bytes) -> None:
        """Keep what came with the push of `clock`: it says how to go on at clock + 1."""
        if not state:
            return
        with self._lock:
            kept = self._states.setdefault(rank, {})
            kept[clock + 1] = state
            for old in sorted(kept)[:-CLIENT_STATES_KEPT]:
                del kept[old]

    def at(self, step: int | None) -> dict[int, bytes]:
        """By rank, the latest that applies at `step` or before; None: the latest."""
        found = {}
        with self._lock:
            for rank, kept in self._states.items():
                clocks = [clock for clock in kept if step is None or clock <= step]
                if clocks:
                    found[rank] = kept[max(clocks)]
        return found

    def restore(self, states: dict[int, bytes], step: int) -> None:
        """Begin with those of a checkpoint."""
        with self._lock:
            self._states = {rank: {step: state} for rank, state in states.items()}


def _nothing() -> None:
    pass


class Cuts:
    """The cuts of a job that this shard takes part in.

    Args:
        surroundings: fills in clocks and client states.
    """

    def __init__(self, surroundings: Callable[[Snapshot], None]) -> None:
        self._surroundings = surroundings
        self._on_ready: Callable[[Snapshot], None] | None = None
        self._on_missed: Callable[[data_pb2.Cut, str], None] | None = None
        self._on_progress: Callable[[], None] = _nothing
        self._lock = locks.new(locks.Level.CUTS)
        self._known: dict[str, data_pb2.Cut] = {}
        self._open: dict[str, Snapshot] = {}
        self._gone: weakref.WeakSet[Job] = weakref.WeakSet()

    def hand_to(
        self,
        on_ready: Callable[[Snapshot], None],
        on_missed: Callable[[data_pb2.Cut, str], None],
        on_progress: Callable[[], None],
    ) -> None:
        """Tell who takes complete snapshots, hears of cuts that cannot be completed here, and of pushes; all return at once."""
        self._on_ready, self._on_missed, self._on_progress = on_ready, on_missed, on_progress

    def on_push(self) -> None:
        """A push has ended: a cut may be due, which its reply should carry."""
        self._on_progress()

    def latest(self) -> list[data_pb2.Cut]:
        """The cuts to be carried around."""
        with self._lock:
            return list(self._known.values())[-CUTS_MAX // 2 :]

    def learn(self, job: Job, cuts: Iterable[data_pb2.Cut]) -> None:
        """Take part in cuts that a worker brings, or that this shard announces. Known ones are ignored."""
        if self._on_ready is None or self._on_missed is None:
            return  # this shard stores nothing; the checkpoint stays incomplete
        for cut in cuts:
            with self._lock:
                if cut.id in self._known:
                    continue
                self._known[cut.id] = cut
                forgotten = list(self._known)[: -2 * CUTS_MAX]
                for old in forgotten:
                    del self._known[old]
                given_up = [self._open[old] for old in forgotten if old in self._open]
            for snapshot in given_up:
                self._miss(snapshot, f"{2 * CUTS_MAX} others have been named since")
            self.begin(Snapshot(cut, job, self._on_ready, self._on_missed))

    def begin(self, snapshot: Snapshot) -> None:
        """Collect the pages of a cut: as the blocks reach its version, or now if there are no rounds."""
        with self._lock:
            is_gone = snapshot.job in self._gone
            if not is_gone:
                self._open[snapshot.cut.id] = snapshot
        if is_gone:
            snapshot.on_missed(snapshot.cut, GOES_BACK)
            return
        try:
            if snapshot.job.policy.has_rounds:
                self._wait_for_versions(snapshot.job, snapshot)
            else:
                self._take_now(snapshot.job, snapshot)
        except ArenaClosed:  # since a moment ago; so the cut may have been given up meanwhile, and its owner told
            if self._is_open(snapshot):
                self._miss(snapshot, GOES_BACK)

    def abandon(self, snapshot: Snapshot) -> None:
        """Give up a snapshot that nobody waits for any more, and its pages."""
        with self._lock:
            self._open.pop(snapshot.cut.id, None)
            pages, snapshot.pages = snapshot.pages, {}
        # Or whoever names distant cuts and hangs up, again and again, would fill the blocks' memory.
        for index in () if snapshot.is_complete else snapshot.job.blocks.keys() - pages.keys():
            snapshot.job.blocks[index].not_at_version(snapshot.cut.step, snapshot)
        snapshot.job.unpin_all(pages)

    def _wait_for_versions(self, job: Job, snapshot: Snapshot) -> None:
        if not job.blocks:
            self._finish(snapshot)
        for index, block in job.blocks.items():

            def take(page: Page, index: int = index) -> None:
                self._take(job, snapshot, index, page)

            if not block.plan.trained:
                take(block.pin())
            elif not block.at_version(snapshot.cut.step, snapshot, take):
                self._miss(snapshot, f"block {index} is at version {block.version}, beyond the cut's {snapshot.cut.step}")
                return

    def _take_now(self, job: Job, snapshot: Snapshot) -> None:
        pages = job.pin_all()
        with self._lock:
            is_open = self._open.get(snapshot.cut.id) is snapshot
            if is_open:
                snapshot.pages.update(pages)
        if is_open:
            self._finish(snapshot)
        else:
            job.unpin_all(pages)

    def _is_open(self, snapshot: Snapshot) -> bool:
        with self._lock:
            return self._open.get(snapshot.cut.id) is snapshot

    def _take(self, job: Job, snapshot: Snapshot, index: int, page: Page) -> None:
        with self._lock:
            is_open = self._open.get(snapshot.cut.id) is snapshot
            if is_open:
                snapshot.pages[index] = page
            is_complete = is_open and len(snapshot.pages) == len(job.blocks)
        if not is_open:
            job.arena.unpin(page)
        elif is_complete:
            self._finish(snapshot)

    def _finish(self, snapshot: Snapshot) -> None:
        with self._lock:
            self._open.pop(snapshot.cut.id, None)
            snapshot.is_complete = True
        self._surroundings(snapshot)
        snapshot.on_ready(snapshot)

    def _miss(self, snapshot: Snapshot, why: str) -> None:
        self.abandon(snapshot)
        snapshot.on_missed(snapshot.cut, why)

    def take_final(self, job: Job, cut: data_pb2.Cut) -> None:
        """Take the blocks as they are, now that nothing changes them any more."""
        pages = job.pin_all()
        versions = {page.version for index, page in pages.items() if job.blocks[index].plan.trained}
        assert self._on_ready is not None
        assert self._on_missed is not None
        snapshot = Snapshot(cut, job, self._on_ready, self._on_missed, pages=pages)
        if job.policy.has_rounds and not versions <= {cut.step}:
            self._miss(snapshot, f"blocks are at versions {sorted(versions)}, the last round is {cut.step}")
        else:
            self._finish(snapshot)

    @property
    def open(self) -> list[data_pb2.Cut]:
        """Cuts that this shard's blocks have not reached yet."""
        with self._lock:
            return [snapshot.cut for snapshot in self._open.values()]

    def forget(self, job: Job, why: str = GOES_BACK) -> None:
        """Give up all open cuts, and those that anybody still begins: the job ends here."""
        with self._lock:
            self._gone.add(job)
            snapshots = list(self._open.values())
            self._known = {}
        for snapshot in snapshots:
            self._miss(snapshot, why)
