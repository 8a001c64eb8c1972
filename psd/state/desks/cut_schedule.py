"""Announces cuts: by steps or by time, which only shard 0 does, or on request.

Shard 0 checks after each push, whose reply then carries the cut, and at each tick, whether one is due. Must not know files.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator

from psd.checkpoint import Cut, EndNote
from psd.checkpoint.cut import FINAL_ID, WHOLE_KEPT, CutName
from psd.contract.config import CUTS_MAX
from psd.contract.errors import NotDeclared
from psd.state import locks
from psd.state.core import ShardCore
from psd.state.cuts.cuts import AHEAD, Cuts
from psd.state.cuts.snapshots import new_id
from psd.state.job import Job
from psd.state.workers.membership import WorkerState
from psd.v1 import data_pb2

AGAIN_S = 10.0
"""Seconds after a cut that was given up until it is announced again."""


class CutSchedule:
    """Announces the cuts of one shard.

    Args:
        wall: returns seconds since 1970.
    """

    def __init__(self, core: ShardCore, cuts: Cuts, wall: Callable[[], float]) -> None:
        self._core = core
        self._cuts = cuts
        self._wall = wall
        self._lock = locks.new(locks.Level.ANNOUNCING)
        self._era: tuple[int, bytes] | None = None  # timeline and layout of the cuts that were announced last
        self._may_be_known = False  # True if an earlier process may have announced a cut of the same step, or a later one
        self._last_step = 0  # step of the last cut announced; without rounds, the job's if that has been lower since
        self._last_moves = 0
        self._whole_ids: list[str] = []  # ids of the last cuts that build on no others
        self._announced: deque[str] = deque(maxlen=2 * CUTS_MAX)  # ids
        self._last_announced_at = core.now()
        self._last_id, self._announced_at = "", core.now()

    @property
    def is_training(self) -> bool:
        """True if there is a job, and this shard holds a part of it that changes."""
        job = self._job_with_part()
        return job is not None and (job.trained_count > 0 or self._core.storage.vectors is not None)

    def _job_with_part(self) -> Job | None:
        """The job, if there is one and this shard holds a part of it; else None."""
        job = self._core.job  # once: asked without the lock, too
        if job is None or self._core.is_tentative or not self._core.life.has_values:
            return None
        has_part = job.block_count or self._core.storage.vectors is not None
        return job if has_part and not job.arena.is_closed else None

    @property
    def is_left_in_order(self) -> bool:
        """True if every worker has left, so that all shards agree on the step at which the job has ended."""
        members = self._core.membership
        return members is not None and all(worker.state is WorkerState.FINISHED for worker in members.workers)

    @property
    def progress(self) -> int:
        """Number of rounds closed. Without rounds or trained blocks: the clock of the slowest worker, or the highest clock if
        all have gone; plus the number of batches on vectors if nothing is trained."""
        if self._has_rounds and self._core.declared().trained_count:
            return self._core.declared().version_max
        return self._clock() + self._batches()

    def _batches(self) -> int:
        """Number of batches that a job of vectors alone has run, because its clocks stand still; else 0."""
        vectors = self._core.storage.vectors
        return vectors.commits if vectors is not None and not self._core.declared().is_trained else 0

    def _clock(self) -> int:
        with self._core.lock:
            slowest = self._core.members.min_clock()
            return slowest if slowest is not None else max(w.clock for w in self._core.members.workers)

    @property
    def _has_rounds(self) -> bool:
        return self._core.declared().policy.has_rounds

    def has_announced(self, cut_id: str) -> bool:
        """True if this cut is one of those that were last announced here."""
        return cut_id in self._announced

    def announce(self, cut_id: str) -> None:
        """Announce the next cut that all shards can still take part in."""
        with self._lock:
            self._announce(cut_id, self.progress)

    def announce_final(self) -> None:
        """Take this shard's part of the final checkpoint. Call it when no worker can change anything any more.

        If all workers have left in order, all shards choose the same cut.
        """
        job = self._job_with_part()
        if job is not None:
            cut = data_pb2.Cut(id=FINAL_ID, step=self.progress, created_at=job.left_at)
            self._cuts.take_final(job, cut)

    def end_note(self) -> EndNote | None:
        """Describe what this shard holds when nothing changes it any more; None if it holds nothing."""
        job = self._job_with_part()
        if job is None:
            return None
        return EndNote(
            run_id=self._core.run_id,
            timeline=self._core.timeline,
            layout_digest=job.layout.digest.hex(),
            step=self.progress,
            counted={what: sorted(found) for what, found in self._counted(job) if found},
            order=job.arena.word("cut_order"),
            ended_at=self._wall(),
            settled=self._settled(job).SerializeToString().hex(),
        )

    def _settled(self, job: Job) -> data_pb2.PullRequest:
        """On shard 0: what a worker would bring to the others of the latest rounds. Elsewhere nothing."""
        if job.coordinator is None:
            return data_pb2.PullRequest()
        with self._core.lock:
            verdict = job.coordinator.final_verdict
            message = None if verdict is None else verdict.to_message()
            return data_pb2.PullRequest(decisions=job.coordinator.latest(), verdict=message)

    def reach(self, step: int, brought: data_pb2.PullRequest, note: EndNote) -> EndNote:
        """Close the rounds before `step`, which other shards have closed, by what shard 0 has settled; return the note on that.

        No worker has brought it here. All shards have the gradients of a round that is decided, but one that was killed since.

        Raises:
            InvalidRequest: it is not of this job.
        """
        job = self._core.declared()
        decisions = [decided for decided in job.participant.check(brought.decisions) if decided[0] < step]
        verdict = job.participant.verdict_of(brought)
        with self._core.lock:
            self._core.count_staged(decisions)
        for decided in decisions:
            job.participant.follow([decided], verdict if verdict is not None and verdict.round == decided[0] else None)
        counted = {what: sorted(found) for what, found in self._counted(job) if found}
        return dataclasses.replace(note, step=self.progress, counted=counted, reached=step)

    def _counted(self, job: Job) -> Iterator[tuple[str, set[str]]]:
        """Yield what the trained blocks count, in words, for the end note."""
        if self._has_rounds:
            yield "a round", {f"version {version}" for version in job.trained_versions}
        elif job.is_cut_by_positions:
            there = [worker.rank for worker in self._core.members.workers if worker.state is not WorkerState.EXPIRED]
            for rank in there:
                pushes = job.last_pushes(rank)
                yield f"a push of worker {rank}", {f"step {clock} of session {session}" for session, clock in pushes}

    def take_end(self, cut: Cut) -> None:
        """Take this shard's part of the cut that the shards' end notes agree on."""
        message = data_pb2.Cut(id=cut.cut_id, step=cut.step, created_at=cut.created_at, order=cut.order)
        self._cuts.take_final(self._core.declared(), message)

    def announce_due(self) -> None:
        """Announce a cut if one is due and all earlier ones are written."""
        config = self._core.config
        is_scheduled = config.checkpoint_steps or config.checkpoint_secs
        if config.shard_index != 0 or not is_scheduled or not self.is_training:
            return
        with self._lock, contextlib.suppress(NotDeclared):  # raised once the shard goes back to a checkpoint
            job = self._core.declared()
            self._look_at(job)
            if self._cuts.unwritten:
                return
            step = self.progress
            if job.is_cut_by_positions:
                self._last_step = min(self._last_step, step)  # another worker may be the slowest now
            is_due_again = self._core.now() - self._announced_at >= AGAIN_S
            if is_due_again and self._last_id in self._cuts.given_up:  # workers' positions had not come in time
                self._announce(new_id(), step)
            if config.checkpoint_steps:
                self._announce_multiple(step, config.checkpoint_steps)
            if config.checkpoint_secs and self._core.now() - self._last_announced_at >= config.checkpoint_secs:
                self._last_announced_at = self._core.now()
                has_moved = self._moves() != self._last_moves if job.is_cut_by_positions else step > self._last_step
                if has_moved and not self._cuts.is_collecting:
                    self._announce(new_id(), step)

    def stop_at(self, job: Job) -> int | None:
        """The clock at which a cut by steps may be due: no step goes there; with rounds, the push of that clock is none;
        without, that by which all workers have come to it. None: no cut is due before something revokes.

        Takes no lock: whoever lowers it revokes.
        """
        every = self._core.config.checkpoint_steps
        if not every or self._core.config.shard_index != 0 or self._cuts.unwritten:  # see Cuts.release
            return None
        if self._era != (self._core.timeline, job.layout.digest):
            return 0
        last = self._last_step // every * every
        return max(0, last - AHEAD) if job.policy.has_rounds else last + every

    def _announce_multiple(self, step: int, every: int) -> None:
        """Announce a cut at the next multiple of `every` (--checkpoint-steps) steps, if it is due."""
        if not self._has_rounds:
            if step // every > self._last_step // every:
                self._announce_at(new_id(), step)
        elif _next_multiple(step, every) > self._last_step:
            with self._standing_still():
                self._announce_at(new_id(), _next_multiple(self.progress, every))

    def _announce(self, cut_id: str, step: int) -> None:
        if not self._has_rounds:
            self._announce_at(cut_id, step)
            return
        with self._standing_still():
            self._announce_at(cut_id, self.progress + AHEAD)

    @contextlib.contextmanager
    def _standing_still(self) -> Iterator[None]:
        """A context in which no step is made, nor until workers have heard of the cut by their replies."""
        self._core.is_announcing = True
        try:
            self._core.revoke()
            yield
        finally:
            self._core.is_announcing = False

    def _moves(self) -> int:
        """A number that grows with every change that a checkpoint would have, even if the slowest worker makes no step."""
        vectors = self._core.storage.vectors
        return self._core.declared().updates + (vectors.commits if vectors is not None else 0)

    def _look_at(self, job: Job) -> None:
        """Reset the schedule if the timeline or the layout has changed."""
        era, before = (self._core.timeline, job.layout.digest), self._era
        if era != before:
            self._era, self._last_step, self._last_moves = era, 0, 0
            self._may_be_known = job.arena.word("restarts") > 0 or (before is not None and before[0] == era[0])

    def _announce_at(self, cut_id: str, step: int) -> None:
        job = self._core.declared()
        self._look_at(job)
        is_later_by_step = not job.is_cut_by_positions and step > self._last_step and not self._may_be_known
        order = job.arena.word("cut_order") + (0 if is_later_by_step else 1)
        self._may_be_known = False
        self._last_step, self._last_moves = max(self._last_step, step), self._moves()
        self._last_id, self._announced_at = cut_id, self._core.now()
        self._announced.append(cut_id)
        base = job.tables.base if job.tables is not None else ""
        found = CutName.of(base)
        if found is None or found.cut_id not in self._whole_ids:  # else the base may be removed at any time
            base = ""
            self._whole_ids = [*self._whole_ids, cut_id][-WHOLE_KEPT:]
        self._cuts.learn(job, [data_pb2.Cut(id=cut_id, step=step, created_at=self._wall(), base=base, order=order)])


def _next_multiple(step: int, every: int) -> int:
    """The first multiple of `every` for which a cut can still be announced at this step."""
    return -(-(step + AHEAD) // every) * every
