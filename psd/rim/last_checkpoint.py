"""The checkpoint that a shard takes before it ends, in one of two ways:

    take      while workers train, who carry the cut to the other shards
    settle    without workers, who may be gone, or hang: each shard stores what it holds, once all have ended and their notes
              show that they hold the same (psd/checkpoint/ends.py)

Both are bounded in time. Must not know signals, nor when a shard ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError

from psd.checkpoint import CheckpointDirectory, EndNote, common_cut
from psd.checkpoint.cut import CutName
from psd.contract.config import ServerConfig
from psd.contract.errors import CheckpointFailed, PsdError
from psd.rim.checkpointer import POLL_S, Checkpointer
from psd.state.durability.cuts import new_id
from psd.state.job import Job
from psd.state.shard import Shard

logger = logging.getLogger(__name__)

LONELY_S = 1.0
"""Seconds without any worker's connection after which none is waited for: one may have lost it, and open another."""


class LastCheckpoint:
    """The last checkpoint of one shard's life.

    Args:
        has_workers: tells whether a worker is there that may train.

    Attributes:
        is_taken: it is stored, by all shards.
    """

    def __init__(
        self,
        shard: Shard,
        config: ServerConfig,
        directory: CheckpointDirectory,
        checkpointer: Checkpointer,
        has_workers: Callable[[], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_taken = False
        self._shard = shard
        self._config = config
        self._directory = directory
        self._checkpointer = checkpointer
        self._has_workers = has_workers
        self._now = now
        self._lock = threading.Lock()
        self._is_given_up = threading.Event()
        self._name = ""  # of the checkpoint that this shard has stored its part of

    def begin(self) -> None:
        """Remove the note that an earlier process of this shard may have left: the shard has not ended."""
        try:
            self._directory.remove_end_note(self._config.shard_index, self._config.shard_count)
        except CheckpointFailed as error:
            logger.warning("the shard goes on without its place for checkpoints: %s", error)

    def give_up(self) -> None:
        """End a call of `take` in another thread; return when it has ended. One that comes later ends at once."""
        self._is_given_up.set()
        with self._lock:
            pass

    def take(self, timeout_s: float) -> str:
        """Take a checkpoint while workers train; returns its name.

        Any shard may be the one that is told to end: shard 0 announces the cut at once, another one when none comes from there.

        Raises:
            CheckpointFailed: there is nothing to store, or it was not stored in time.
        """
        with self._lock:
            self._take(timeout_s)
            return self._name

    def _take(self, timeout_s: float) -> None:
        schedule, cuts = self._shard.schedule, self._shard.cuts
        if not schedule.is_training:
            raise CheckpointFailed("there is nothing to store yet")
        known = {cut.id for cut in cuts.latest()}
        began = heard_at = self._now()
        announces_at = began if self._config.shard_index == 0 else began + timeout_s / 4
        while self._now() < began + timeout_s and not self._is_given_up.is_set():
            if self._now() >= announces_at and {cut.id for cut in cuts.latest()} <= known:
                schedule.announce(new_id())
            last = CutName.of(self._checkpointer.progress.last)
            if last is not None and last[2] not in known:
                self._name = self._checkpointer.progress.last
                if self._checkpointer.why_incomplete(self._name) is None:
                    self.is_taken = True
                    return
            if self._has_workers():
                heard_at = self._now()
            elif self._now() > heard_at + LONELY_S:
                raise CheckpointFailed("there is no worker left to train up to it")
            self._is_given_up.wait(POLL_S)
        raise CheckpointFailed(f"the workers have not trained up to it, or not all shards have stored it, in {timeout_s:g} s")

    def settle(self, timeout_s: float) -> None:
        """Store what the shards hold, unless `take` has succeeded; when nothing changes this shard any more.

        A cut that was begun before is then complete, older than this one, or removed. A failure is the checkpointer's to tell.
        """
        job, note = self._shard.job, self._shard.schedule.end_note()
        if job is None or note is None or self.is_taken:
            return
        index, count = self._config.shard_index, self._config.shard_count
        try:
            if self._name and self._checkpointer.why_incomplete(self._name) is None:
                self.is_taken = True
                return
            try:
                self._settle(job, note, timeout_s)
            finally:
                self._directory.remove_end_note(index, count)
        except PsdError as error:
            self._checkpointer.fail(error)

    def _settle(self, job: Job, note: EndNote, timeout_s: float) -> None:
        began = self._now()
        if not self._checkpointer.await_written(timeout_s):
            raise CheckpointFailed("an earlier checkpoint was not written in time, so that there is none of the end")
        self._directory.write_end_note(note, self._config.shard_index, self._config.shard_count)
        wanted = {index for index in range(job.layout.shard_count) if job.layout.blocks_of(index)}
        while lacking := wanted - (notes := self._directory.end_notes(note, self._config.shard_count)).keys():
            if self._now() > began + timeout_s / 2:
                names = ", ".join(f"shard {index}" for index in sorted(lacking))
                raise CheckpointFailed(f"{names} did not end at the same time, so that there is no checkpoint of the end")
            time.sleep(POLL_S)  # the other shards write to the same directory and do not talk to this one
        try:
            cut = common_cut(notes, job.layout)
        except CheckpointFailed:
            self._directory.discard_unfinished(note.timeline)
            raise
        self._directory.discard_unfinished(note.timeline, but=cut.name)
        with self._checkpointer.storing(cut.cut_id) as stored:
            self._shard.schedule.take_end(cut)
            try:
                if stored.exception(max(0.0, began + timeout_s - self._now())) is not None:
                    return  # the checkpointer has told it
                self._checkpointer.await_complete(cut.name, began + timeout_s)
            except (FutureTimeoutError, CheckpointFailed) as error:
                self._directory.discard(cut)
                raise CheckpointFailed(f"{cut.name} was not stored by all shards within {timeout_s:g} s") from error
        self.is_taken = True
