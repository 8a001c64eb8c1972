"""The riders on workers' pushes: each thing beside the gradient that a header brings, or that a reply takes back, is one.

The exchange calls those of a push's job in the order of `riders_of`. A new one is a class here, a line in that function, and a
field of PushHeader or PushReply; its mirror in the worker is a rider of psd_client/worker/exchange/riders.py. Must not know
blocks, nor when they come.
"""

from __future__ import annotations

import math

from psd.contract.errors import InvalidRequest
from psd.state.aggregation.agreement import Voice
from psd.state.core import ShardCore
from psd.state.cuts.cuts import Cuts
from psd.state.cuts.snapshots import check_cuts
from psd.state.desks.cut_schedule import CutSchedule
from psd.state.desks.transfers import Push, PushRider, PushRiders, check_session
from psd.state.durability.client_states import check_client_state
from psd.state.job import Job
from psd.state.tickets import Ticket
from psd.state.workers.membership import WorkerState
from psd.v1 import data_pb2

FIRST_GRADIENT_BYTES = 16


class NoDecisionsOnPush(PushRider):
    """Refuses decisions on rounds, where nobody makes any."""

    def check(self, push: Push) -> None:
        """Raise InvalidRequest if there are some."""
        if push.header.decisions:
            push.job.participant.check(push.header.decisions)


class DecisionsOnPush(NoDecisionsOnPush):
    """Brings the decisions on rounds that shard 0 has made; exact aggregation. Pulls bring them, too."""

    def __init__(self, core: ShardCore) -> None:
        self._core = core

    def begin(self, push: Push) -> None:
        """Tell the blocks."""
        decisions = push.job.participant.check(push.header.decisions)
        with self._core.lock:
            self._core.count_staged(decisions)
        if decisions:
            push.job.participant.follow(decisions)


class CutsOnPush(PushRider):
    """Brings the cuts that workers have heard of to this shard, and tells them of those that it knows; in a job with rounds."""

    def __init__(self, cuts: Cuts, schedule: CutSchedule) -> None:
        self._cuts = cuts
        self._schedule = schedule

    def check(self, push: Push) -> None:
        """Raise InvalidRequest for what is no cut."""
        if push.header.cuts:
            check_cuts(push.header.cuts)

    def entered(self, push: Push) -> None:
        """Take part in the cuts that it brings."""
        if push.header.cuts:
            self._cuts.learn(push.job, push.header.cuts, push.worker, push.session)

    def end(self, _push: Push, reply: data_pb2.PushReply) -> None:
        """Announce a cut that is due by now, and name the latest."""
        self._schedule.announce_due()
        if latest := self._cuts.latest():
            reply.cuts.extend(latest)


class PositionsOnPush(CutsOnPush):
    """Brings, besides, the worker's positions in the cuts of a job without rounds, which pushes therefore wait for."""

    def begin(self, push: Push) -> None:
        """Hear where the worker stands in cuts that wait for it."""
        if self._cuts.awaits_positions and push.header.cuts:
            self._cuts.hear(push.header.cuts, push.worker, push.session)

    def is_awaited(self, push: Push) -> bool:
        """True if a cut waits for this push: who is slower may be held for that cut."""
        return self._cuts.needs(push.worker, push.session, push.clock)

    def hold(self, push: Push) -> Ticket | None:
        """A ticket until the cuts are taken that the push is not in."""
        return self._cuts.hold(push.worker, push.session, push.clock) if self._cuts.awaits_positions else None

    def end(self, push: Push, reply: data_pb2.PushReply) -> None:
        """Take the cuts that are whole by this push, before the latest are named."""
        self._cuts.advance()
        super().end(push, reply)


class ClientStateOnPush(PushRider):
    """Brings what the worker saves of its own program."""

    def __init__(self, core: ShardCore) -> None:
        self._core = core

    def check(self, push: Push) -> None:
        """Raise InvalidRequest if it is too large."""
        if push.header.client_state:
            check_client_state(push.header.client_state)

    def keep(self, push: Push) -> None:
        """Write it down."""
        if not push.header.client_state:
            return
        check_session(self._core, push)
        rank, members = push.worker.rank, self._core.members
        self._core.client_states.on_push(
            rank,
            (push.begun_as, push.clock + 1),
            push.header.client_state,
            counted=push.job.last_counted(rank),
            is_current=lambda: members.session_of(rank) == push.session,
        )


class AttendanceOnPush(PushRider):
    """Brings what each worker says of its round, and tells it if others' scalars hold: see agreement.py."""

    def check(self, push: Push) -> None:
        """Raise PartsDisagree or ScalarsDisagree if it may not say so."""
        push.job.agreement.check(push.clock, Voice(push.since, push.worker.rank, push.scalars, push.header.part))

    def enter(self, push: Push) -> None:
        """Hear what it says."""
        push.job.agreement.hear(push.clock, Voice(push.since, push.worker.rank, push.scalars, push.header.part))

    def count(self, push: Push) -> None:
        """Let it stand, also if the worker dies."""
        push.job.agreement.on_counted(push.clock, push.worker.rank)

    def answer(self, push: Push, reply: data_pb2.PushReply) -> None:
        """Tell the worker whose scalars hold in its place."""
        if overruled := push.job.agreement.overruled(push.clock, push.worker.rank):
            reply.overruled.CopyFrom(overruled)


class NormsOnPush(PushRider):
    """Brings the norms of the tensors that are merged by norm and direction."""

    def check(self, push: Push) -> None:
        """Raise InvalidRequest unless there is one for each, finite and not negative; give them to the push."""
        norms, tensors = tuple(push.header.norms), push.job.spec.directed_tensors
        if len(norms) != len(tensors):
            raise InvalidRequest(f"norms: expected {len(tensors)}, one for each tensor that merges by rda, got {len(norms)}")
        for norm, tensor in zip(norms, tensors, strict=True):
            if not 0 <= norm < math.inf:
                name = push.job.spec.tensors[tensor].name
                raise InvalidRequest(f"norms: must be finite and >= 0, got {norm} for tensor {name!r}")
        push.norms = norms


class FirstGradientOnPush(PushRider):
    """Brings what stands for each worker's first gradient, and tells the later one of two that had the same."""

    def __init__(self) -> None:
        self._digests: dict[int, bytes] = {}  # by rank

    def check(self, push: Push) -> None:
        """Raise InvalidRequest unless it has the length of a digest, or none."""
        if len(push.header.first_gradient) not in (0, FIRST_GRADIENT_BYTES):
            raise InvalidRequest(
                f"first_gradient: has {len(push.header.first_gradient)} bytes, expected {FIRST_GRADIENT_BYTES} or none"
            )

    def answer(self, push: Push, reply: data_pb2.PushReply) -> None:
        """Compare it with those of the others; the lowest rank is named."""
        if digest := push.header.first_gradient:
            self._digests[push.worker.rank] = digest
            same = [rank for rank, other in self._digests.items() if other == digest and rank != push.worker.rank]
            if same:
                reply.same_gradient_as = min(same)


class BuffersOnPush(PushRider):
    """Tells workers whether they are to store their buffers: each, or the first that is there."""

    def __init__(self, core: ShardCore) -> None:
        self._core = core

    def answer(self, push: Push, reply: data_pb2.PushReply) -> None:
        """Say whether this one is."""
        before = self._core.members.workers[: push.worker.rank]
        reply.wants_buffers = push.job.wants_all_buffers or all(worker.state is not WorkerState.LIVE for worker in before)


class NewsOnPush(PushRider):
    """Tells workers what an operator has ordered, and learners how fast the fastest is, whose notes it keeps. On shard 0."""

    def __init__(self, core: ShardCore) -> None:
        self._core = core

    def answer(self, push: Push, reply: data_pb2.PushReply) -> None:
        """Name the orders as they now are, and the least time of a step."""
        if (orders := self._core.orders.current) is not None:
            reply.orders.CopyFrom(orders)
        if push.header.HasField("learner"):
            push.job.learners.on_push(push.worker.rank, push.header.learner, push.clock, push.weight)
            reply.fastest_step_s = push.job.learners.fastest_step_s


def riders_of(core: ShardCore, cuts: Cuts, schedule: CutSchedule, job: Job) -> PushRiders:
    """All that ride on the pushes of a job."""
    has_rounds = job.policy.has_rounds
    return PushRiders(
        job,
        DecisionsOnPush(core) if job.is_exact else NoDecisionsOnPush(),
        CutsOnPush(cuts, schedule) if has_rounds else PositionsOnPush(cuts, schedule),
        ClientStateOnPush(core),
        *([AttendanceOnPush()] if has_rounds else []),
        *([NormsOnPush()] if job.spec.directed_tensors else []),
        FirstGradientOnPush(),
        *([BuffersOnPush(core)] if job.wants_buffers else []),
        *([NewsOnPush(core)] if core.config.shard_index == 0 else []),
    )
