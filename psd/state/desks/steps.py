"""Arms workers: lets the shard take their next push_pulls as steps in C (psd_core/steps.py), while all is as a step expects.

A step is never another semantics: what it does not expect it answers AGAIN, and the push is made the long way. What C does not
look at itself is asked here, and whoever changes it revokes (docs/design/life-of-a-push.md). Must not know sockets or memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from psd.state.aggregation.consistency import StaleSynchronous
from psd.state.aggregation.small_block import SmallBlock
from psd.state.core import ShardCore
from psd.state.cuts.cuts import Cuts
from psd.state.desks.cut_schedule import CutSchedule
from psd.state.job import Job
from psd.state.life import Life
from psd.state.workers.membership import WorkerState
from psd.v1 import data_pb2
from psd_core import steps as core_steps
from psd_core.arena import WORKERS_MAX
from psd_core.steps import BLOCKS_MAX, Ranks, StepConnection, Steps

Loop = StepConnection
AGAIN_REVOKED = core_steps.AGAIN_REVOKED
AGAIN_BY_SHARD = AGAIN_REVOKED, core_steps.AGAIN_CUT  # the worker's next push may well be a step
SERVED_CLOSED, SERVED_OTHER, SERVED_WRONG = core_steps.SERVED_CLOSED, core_steps.SERVED_OTHER, core_steps.SERVED_WRONG
SERVED_AGAIN, SERVED_TICKETS, SERVED_ERROR = core_steps.SERVED_AGAIN, core_steps.SERVED_TICKETS, core_steps.SERVED_ERROR

STALENESS_KNOWN = ("", "lr")


@dataclass(frozen=True)
class Armed:
    """A worker that is armed.

    Attributes:
        epoch: in its steps. job: of which they are. steps: its part on this shard.
    """

    epoch: int
    job: Job
    steps: Steps

    def loop(
        self, rank: int, fd: int, gradients: list[Any] | None, parameters: list[list[Any]] | None, memory: Any
    ) -> StepConnection:
        """The loop of its connection; see there for the arguments."""
        return StepConnection(self.steps, rank, fd, gradients, parameters, memory)


class StepDesk:
    """Arms, and looks after what steps leave to Python.

    Args:
        is_busy: returns True while the shard drains, or readers are there.

    Attributes:
        can_arm: False if this shard never arms anybody.
    """

    def __init__(self, core: ShardCore, cuts: Cuts, schedule: CutSchedule, is_busy: Callable[[], bool]) -> None:
        self._core = core
        self._cuts = cuts
        self._schedule = schedule
        self._is_busy = is_busy
        self.can_arm = not core.config.never_armed and core.now is time.monotonic
        self._lanes: dict[int, str] = {}  # by rank, of its steps
        self._ranks: Ranks | None = None  # of these steps

    def arm(self, header: data_pb2.PushHeader, reply: data_pb2.PushReply, lane: str) -> Armed | None:
        """Arm the worker of a push that is answered so; None if its next one may be none for a step, as far as is known."""
        core, caller = self._core, header.caller
        if not self.can_arm or not _is_plain(header):
            return None
        with core.lock:
            job, members = core.job, core.membership
            if job is None or members is None or self._is_busy() or core.life.now is not Life.SERVING:
                return None
            if core.is_announcing or (core.orders.current is not None and reply.orders != core.orders.current):
                return None
            worker = members.worker(caller.rank)
            is_live = worker.state is WorkerState.LIVE and worker.session == caller.session and worker.has_pushed
            if not is_live or worker.is_leaving:
                return None
            if job.policy.has_rounds and not members.is_settled(job.version_min):
                return None
            waited = members.waited_in(job.version_min) if job.policy.has_rounds else members.waited
            if job.steps is None:
                job.steps = steps_of(job, members.ranks)
            if job.steps is None:
                return None
            self._collect(members.ranks)
            members.ranks.revoke_one(worker.rank)
            self._ranks, self._lanes[worker.rank] = members.ranks, lane
            _, at = job.arena.member_word(worker.rank)
            members.is_armed = True
            if job.tables is not None:
                job.tables.core.unit, job.tables.core.has_steps = job.tables.step, True
            epoch = job.steps.arm(worker.rank, worker.session, worker.floor, at, waited, self._stop_at(job))
            return Armed(epoch, job, job.steps) if epoch is not None else None

    def _stop_at(self, job: Job) -> int | None:
        """The clock at which steps stop, as in Steps.arm; None: they go on.

        With rounds, blocks come to an open cut by pushes that are made the long way; without, it may have to hold pushes.
        Whatever lowers this revokes then: what is seen here holds, or these steps end at once.
        """
        open_cuts = [max(0, cut.step - 1) if job.policy.has_rounds else 0 for cut in self._cuts.open]
        due = self._schedule.stop_at(job)
        return min([*open_cuts, *([] if due is None else [due])], default=None)

    def revoke(self, rank: int) -> None:
        """Take no more steps of a rank until it is armed anew."""
        with self._core.lock:
            members = self._core.membership
            if members is not None and rank < len(members.workers):
                members.ranks.revoke_one(rank)

    def end(self, job: Job, rank: int) -> None:
        """Note that the connection of a rank that was armed has ended."""
        with self._core.lock:
            members = self._core.membership
            if members is not None and self._core.job is job:
                members.ranks.revoke_one(rank)
                members.ranks.give_up_half(rank)

    def end_waits(self, job: Job, rank: int) -> None:
        """End the waits for what a step of this rank has done: the callers' that wait by tickets."""
        if job.policy.has_rounds:
            for block in job.blocks.values():
                if isinstance(block, SmallBlock):
                    block.end_waits()
            if job.tables is not None:
                job.tables.end_waits()
        elif job.policy.has_bound:
            core = self._core
            with core.lock:
                if core.job is job and core.membership is not None:
                    core.open_gates(core.membership.worker(rank))
                    if not core.gates and job.steps is not None:
                        job.steps.has_gates = False

    def collect(self) -> None:
        """Add what steps have counted to the shard's counters."""
        with self._core.lock:
            self._collect(self._ranks)

    def _collect(self, following: Ranks | None) -> None:
        counters, ranks = self._core.counters, self._ranks
        for rank, lane in self._lanes.items() if ranks is not None else ():
            assert ranks is not None
            if (found := ranks.take_counts(rank)) is not None:
                accepted, duplicate, pulls, received, sent, took, took_s = found
                counters.pushes_accepted += accepted
                counters.pushes_duplicate += duplicate
                counters.pulls += pulls
                counters.lanes[lane].count_steps(received, sent, took, took_s)
        if following is not ranks:
            self._lanes.clear()


def _is_plain(header: data_pb2.PushHeader) -> bool:
    """False if the worker sends with its pushes what no step has."""
    has_more = header.HasField("learner") or header.HasField("scale") or header.part or header.norms or header.held
    return not has_more and header.session in (0, header.caller.session)


def steps_of(job: Job, ranks: Ranks) -> Steps | None:
    """A job's part on this shard for steps; None if it has a block, a rule or a way of aggregation that they do not know."""
    spec, blocks, tables = job.spec, [block for block in job.blocks.values() if block.is_trained], job.tables
    if job.is_exact or spec.clip_norm or not 0 < len(blocks) + (tables is not None) <= BLOCKS_MAX:
        return None
    if not spec.has_plain_tables or spec.is_publication or spec.sample or spec.world_size > WORKERS_MAX:
        return None
    if any(group.staleness not in STALENESS_KNOWN for group in spec.groups):
        return None
    low: list[float] = []
    high: list[float] = []
    first: list[int] = []
    for group in spec.groups:
        ranges = group.info.ranges_together(group.flags)
        if ranges is None:
            return None
        first.append(len(low))
        low += [each.low for each in ranges]
        high += [each.high for each in ranges]
    found = []
    for block in blocks:
        if not isinstance(block, SmallBlock) or block.pull_codec or not block.plan.length:
            return None
        found.append(block.of_steps(first[block.plan.group]))
    bound = job.policy.staleness_bound if isinstance(job.policy, StaleSynchronous) else None
    mapping, _ = job.arena.member_word(0)
    core = tables.core if tables is not None else None
    made = Steps(ranks, found, low, high, job.policy.has_rounds, bound, mapping, core)
    if job.policy.has_rounds:
        job.agreement.listen_to(made)
    return made
