"""The checkpoint that a shard takes before it ends, in one of two ways:

    take      while workers train, who carry the cut to the other shards
    settle    without workers, who may be gone, or hang: each shard stores what it holds, once all have ended and their notes
              show that they hold the same rounds, or pushes (psd/checkpoint/ends.py). With exact aggregation shards that have
              not heard of a round's decision close it before. Where another shard has heard of all workers that they have
              ended well, and has stored its part of that, this one stores its own

Both are bounded in time. A shard may end alone, and begin anew before the job ends: what was taken at its end, perhaps only
seconds ago, is not the job's last checkpoint. Must not know signals, or when a shard ends.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError

from psd.checkpoint import (
    CheckpointDirectory,
    Cut,
    EndNote,
    common_cut,
    read_ends,
    read_lives,
    to_settle,
    write_end,
    write_life,
)
from psd.checkpoint.cut import FINAL_ID, CutName, name_of
from psd.checkpoint.ends import DIRECTORY as ENDS
from psd.contract.config import ServerConfig
from psd.contract.errors import CheckpointFailed, PsdError
from psd.rim.checkpointer import POLL_S, Checkpointer
from psd.state.cuts.snapshots import new_id
from psd.state.job import Job
from psd.state.shard import Shard
from psd.v1 import data_pb2

logger = logging.getLogger(__name__)

LINGER_S = 1.0
"""Seconds for which an end note stays after a failure, so that the other shards can read it."""

_ID = re.compile(r"last(\d+)x\w+")
"""Ids of cuts that are announced because the job ends; they say by which shard."""

FRESH_S = 10.0
"""Seconds that may lie between the signals to end for the shards of a job, with the difference of their clocks."""

LONELY_S = 1.0
"""Seconds without a worker's connection after which workers count as gone: one may have lost it, and open another."""


class _OthersGone(CheckpointFailed):
    """Some shards leave no notes: they have not ended, or before this one was told to."""


class LastCheckpoint:
    """The last checkpoint of one shard's life.

    Args:
        has_workers: returns True if there is a worker that may train.

    Attributes:
        name: the checkpoint's name, once all shards have stored it; empty before.
    """

    def __init__(
        self,
        shard: Shard,
        config: ServerConfig,
        directory: CheckpointDirectory,
        checkpointer: Checkpointer,
        has_workers: Callable[[], bool],
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.name = ""
        self._shard = shard
        self._config = config
        self._directory = directory
        self._checkpointer = checkpointer
        self._has_workers = has_workers
        self._now = now
        self._wall = wall
        self._since: float | None = None  # see _told_since
        self._lives: dict[int, float] = {}  # by shard, when its process began: those of then
        self._lock = threading.Lock()
        self._is_given_up = threading.Event()

    def begin(self) -> None:
        """Remove the notes of an earlier process of this shard, and leave one: the shard has not ended."""
        notes, index, count = self._directory.notes, self._config.shard_index, self._config.shard_count
        try:
            notes.remove(ENDS, index)
            write_life(notes, self._wall(), index, count)
        except CheckpointFailed as error:
            logger.warning("the shard goes on without its place for checkpoints: %s", error)

    def end(self) -> None:
        """Remove this shard's notes: it has ended in order."""
        try:
            self._directory.notes.remove(ENDS, self._config.shard_index)
        except CheckpointFailed as error:
            logger.warning("the shard's notes stay where its checkpoints are: %s", error)

    def give_up(self) -> None:
        """End a call of `take` in another thread; return when it has ended. Later calls end at once."""
        self._is_given_up.set()
        with self._lock:
            pass

    def take(self, timeout_s: float) -> None:
        """Take a checkpoint while workers train.

        Any shard may be told to end: shard 0 announces the cut at once, another shard only if none comes from shard 0.

        Raises:
            CheckpointFailed: there is nothing to store, or it was not stored in time.
        """
        schedule, began = self._shard.schedule, self._now()
        if not schedule.is_training:
            raise CheckpointFailed("this shard holds nothing that is trained")
        heard_at = began
        announces_at = began if self._config.shard_index == 0 else began + timeout_s / 4
        with self._lock:
            while self._now() < began + timeout_s and not self._is_given_up.is_set():
                if self._is_taken():
                    return
                if self._now() >= announces_at and not self._last_cuts():
                    schedule.announce(f"last{self._config.shard_index}x{new_id()}")
                if self._has_workers():
                    heard_at = self._now()
                elif self._now() > heard_at + LONELY_S:
                    raise CheckpointFailed("there is no worker left to train up to it")
                self._is_given_up.wait(POLL_S)
            if self._is_taken():  # perhaps that is why the shard was told to end
                return
        raise CheckpointFailed(f"the workers have not trained up to it, or not all shards have stored it, in {timeout_s:g} s")

    def _last_cuts(self) -> list[data_pb2.Cut]:
        """The cuts that any shard announced because the job ends: a worker may bring one here before the signal comes."""
        since, cuts = self._told_since(), self._shard.cuts
        announced = [(cut, _ID.fullmatch(cut.id)) for cut in cuts.latest() if cut.id not in cuts.given_up]
        return [cut for cut, by in announced if by and cut.created_at > max(since, self._lives.get(int(by[1]), 0.0))]

    def _told_since(self) -> float:
        """The time from which on shards may have been told of this end, in seconds since 1970."""
        if self._since is None:
            self._since = self._wall() - FRESH_S
            self._lives = read_lives(self._directory.notes, self._config.shard_count)
        return self._since

    def _is_taken(self) -> bool:
        timeline = self._shard.status().timeline
        names = [name_of(timeline, cut.step, cut.id, cut.order) for cut in self._last_cuts()]
        self.name = next((name for name in names if self._checkpointer.why_incomplete(name) is None), "")
        return self.name != ""

    def settle(self, timeout_s: float) -> None:
        """Store what the shards hold, unless `take` has succeeded. Call it when nothing changes this shard any more.

        A cut that began before is then complete, older than this one, or removed. The checkpointer reports failures.
        """
        job, note = self._shard.job, self._shard.schedule.end_note()
        if job is None or note is None or self.name:
            return
        try:
            if self._is_taken():
                return
            try:
                self._settle(job, note, timeout_s)
            except _OthersGone:
                self.name = self._stored_by_others(note)
                if not self.name:
                    raise
                logger.info("the other shards have ended with %s, and so does this one, which has begun anew since", self.name)
            finally:
                if not self.name:
                    time.sleep(min(LINGER_S, timeout_s))
        except PsdError as error:
            self._checkpointer.fail(error)

    def _settle(self, job: Job, note: EndNote, timeout_s: float) -> None:
        began = self._now()
        self._tell(note, timeout_s)
        cut = self._agreed(job, note, began + timeout_s / 2)
        if cut.cut_id != FINAL_ID:
            self._directory.discard_unfinished(note.timeline, but=cut.name)
        self._store(cut, began, timeout_s)

    def _stored_by_others(self, note: EndNote) -> str:
        """Name of the last checkpoint that was taken at this end, perhaps before this process began; empty if there is none."""
        newest = self._directory.newest()
        if newest is None or (newest.run_id, newest.timeline) != (note.run_id, note.timeline):
            return ""
        name = CutName.of(newest.name)
        is_of_an_end = name is not None and _ID.fullmatch(name.cut_id) and newest.created_at > self._told_since()
        return newest.name if is_of_an_end else ""

    def _tell(self, note: EndNote, timeout_s: float) -> None:
        """Write this shard's note when nothing else of it is being written, which others may then remove."""
        if not self._checkpointer.await_written(timeout_s):
            raise CheckpointFailed("an earlier checkpoint was not written in time, so that there is none of the end")
        write_end(self._directory.notes, note, self._config.shard_index, self._config.shard_count)

    def _agreed(self, job: Job, note: EndNote, until: float) -> Cut:
        """The cut that all shards hold, or that another one has stored when all workers had left.

        Raises:
            CheckpointFailed: there is none; _OthersGone if some shards leave no notes.
        """
        notes, index, count = self._directory.notes, self._config.shard_index, self._config.shard_count
        final = Cut(FINAL_ID, note.step, note.timeline, note.run_id, created_at=note.ended_at, layout=job.layout)
        have_all = bool(job.spec.tables) or self._shard.vectors.has_vectors
        wanted = {other for other in range(count) if have_all or job.layout.blocks_of(other)}
        while True:
            ends = read_ends(notes, note, count)
            if lacking := wanted - ends.keys():
                found = next(filter(None, (self._directory.stored(final, other) for other in sorted(lacking))), None)
                if found is not None and found.step >= note.step:  # else it belongs to an earlier end
                    return found
                if self._now() > until:
                    names = ", ".join(f"shard {other}" for other in sorted(lacking))
                    raise _OthersGone(f"{names} did not end at the same time, so that there is no checkpoint of the end")
            else:
                try:
                    return common_cut(ends, job.layout)
                except CheckpointFailed:
                    step, behind = to_settle(ends)
                    if not behind or self._now() > until:
                        self._directory.discard_unfinished(note.timeline)
                        raise
                if index in behind:
                    note = self._shard.schedule.reach(step, ends[0].brings, note)
                    self._tell(note, until - self._now())
                    continue
            time.sleep(POLL_S)  # the other shards write to the same directory and do not talk to this one

    def _store(self, cut: Cut, began: float, timeout_s: float) -> None:
        with self._checkpointer.storing(cut.cut_id) as stored:
            self._shard.schedule.take_end(cut)
            try:
                if stored.exception(max(0.0, began + timeout_s - self._now())) is not None:
                    return  # the checkpointer has reported it
                self._checkpointer.await_complete(cut.name, began + timeout_s)
            except (FutureTimeoutError, CheckpointFailed) as error:
                if cut.cut_id != FINAL_ID:  # other shards may have ended with their parts of it
                    self._directory.discard(cut)
                raise CheckpointFailed(f"{cut.name} was not stored by all shards within {timeout_s:g} s") from error
        self.name = cut.name
