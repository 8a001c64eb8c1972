"""Pushes and pulls in progress, and the riders on pushes: each thing beside the gradient that a header brings, or that a reply
takes back, is one.

Exchange moves them on, and the data plane holds them. It calls the riders of a push's job in the order of `riders_of`. A new
one is a class here, a line in that function, and a field of PushHeader or PushReply; its mirror in the worker is a rider of
psd_client/worker/exchange/riders.py. Must not know blocks, nor when they come.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import ref

from psd.contract.errors import InvalidRequest
from psd.state.aggregation.agreement import Scalars, Voice
from psd.state.aggregation.lent_gradients import Loan
from psd.state.aggregation.rounds import Outcome
from psd.state.core import ShardCore
from psd.state.cuts.cuts import Cuts
from psd.state.cuts.snapshots import check_cuts
from psd.state.desks.cut_schedule import CutSchedule
from psd.state.durability.client_states import check_client_state
from psd.state.job import Job
from psd.state.tables.rounds import StagedRows
from psd.state.tickets import Ticket
from psd.state.workers.membership import Worker, WorkerState
from psd.v1 import data_pb2, job_pb2
from psd_core.arena import Page

FIRST_GRADIENT_BYTES = 16

Found = tuple[int, Page] | tuple[int, None]
"""A block's version, and its pinned page, to be given back by `BlockState.unpin`. The tables' block has no page."""


@dataclass(slots=True)
class Push:
    """A push in progress: what its header says, and the blocks that it has covered.

    Attributes:
        job: as it was when the push began; the call ends where there is another one, see Exchange.
        session: of the worker that sends it. begun_as: the session as which it was begun, which is in its name.
        is_entered: a valid block has come. Until then the push has changed nothing but its worker's lease.
        is_finite: the worker has looked for NaN and infinity itself.
        riders, header: what rides on it, and what they know it by. since: see Voice.
        norms: as in Contribution.
        versions: by block, of the parameters that the worker had read; empty: not known, or pointless.
        held: as in Pull, for the answer.
        loan: of the gradient that blocks may read where the worker has it.
        staged: rows of the tables' block whose last frame has not come.
        arrived: blocks that have come, also those that were covered before. outcomes: how many blocks had each Outcome.
        late: which were late.
        half: bits of the blocks that have counted it in a step that was answered AGAIN, by Job.place_of.
    """

    job: Job
    riders: PushRiders
    header: data_pb2.PushHeader
    worker: Worker
    session: int
    begun_as: int
    clock: int
    weight: float
    scalars: Scalars
    scale: float
    since: int = 0
    is_finite: bool = False
    is_entered: bool = False
    norms: Sequence[float] = ()
    versions: Mapping[int, int] = field(default_factory=dict)
    held: Mapping[int, int] = field(default_factory=dict)
    loan: Loan = field(default_factory=Loan)
    staged: StagedRows = field(default_factory=StagedRows)
    covered: set[int] = field(default_factory=set)
    arrived: int = 0
    outcomes: list[int] = field(default_factory=([0] * len(Outcome)).copy)
    late: list[int] = field(default_factory=list)
    half: int = 0


@dataclass(slots=True)
class Pull:
    """A pull in progress: who reads, and at which clock.

    Attributes:
        job: as it was when the pull began; the call ends where there is another one, see Exchange.
        held: by block, the version that the worker holds, where it pulls differences.
    """

    job: Job
    worker: Worker
    session: int
    clock: int
    held: Mapping[int, int]

    @property
    def has_rounds(self) -> bool:
        """True if pushes form rounds; otherwise each push is an update of its own, applied when it comes."""
        return self.job.policy.has_rounds


class PushRider:
    """Rides on the pushes of one job to this shard. A method that a rider does not define does nothing, and costs nothing."""

    def check(self, push: Push) -> None:
        """Raise for what no worker of this job sends; change nothing. Under the shard's lock."""

    def begin(self, push: Push) -> None:
        """Act on the header, now that all of it is sound. Takes locks itself."""

    def is_awaited(self, _push: Push) -> bool:
        """True if others wait for this push, which therefore waits for no slower worker. Under the shard's lock."""
        return False

    def hold(self, push: Push) -> Ticket | None:
        """A ticket if the push has to wait before its first block. Takes locks itself."""

    def keep(self, push: Push) -> None:
        """Write down what has to last as the push does; it has a sound block, which nothing counts yet. Takes locks itself."""

    def enter(self, push: Push) -> None:
        """Take part: the push has a sound block, and its session stands. May still raise. Under the shard's lock."""

    def entered(self, push: Push) -> None:
        """Take part likewise, once every rider has entered. Takes locks itself."""

    def count(self, push: Push) -> None:
        """Note that a first block has counted the push. Under the shard's lock."""

    def answer(self, push: Push, reply: data_pb2.PushReply) -> None:
        """Add to the reply: all blocks have come. Under the shard's lock."""

    def end(self, push: Push, reply: data_pb2.PushReply) -> None:
        """Add to the reply what other workers may see by now. Takes locks itself."""


class PushRiders:
    """The riders of one job, in their order.

    Attributes:
        job: not kept alive by them.
        check, begin, is_awaited, hold, keep, enter, entered, count, answer, end: that method of each rider that has one.
    """

    def __init__(self, job: Job, *riders: PushRider) -> None:
        self.job = ref(job)
        self.check = [rider.check for rider in riders if type(rider).check is not PushRider.check]
        self.begin = [rider.begin for rider in riders if type(rider).begin is not PushRider.begin]
        self.is_awaited = [rider.is_awaited for rider in riders if type(rider).is_awaited is not PushRider.is_awaited]
        self.hold = [rider.hold for rider in riders if type(rider).hold is not PushRider.hold]
        self.keep = [rider.keep for rider in riders if type(rider).keep is not PushRider.keep]
        self.enter = [rider.enter for rider in riders if type(rider).enter is not PushRider.enter]
        self.entered = [rider.entered for rider in riders if type(rider).entered is not PushRider.entered]
        self.count = [rider.count for rider in riders if type(rider).count is not PushRider.count]
        self.answer = [rider.answer for rider in riders if type(rider).answer is not PushRider.answer]
        self.end = [rider.end for rider in riders if type(rider).end is not PushRider.end]


def check_begun_as(session: int, caller: job_pb2.Caller) -> int:
    """The session with which a call began: the caller's own, or an earlier one; InvalidRequest if it is a later one."""
    if session > caller.session:
        raise InvalidRequest(f"session: {session} is later than the caller's, {caller.session}")
    return session or caller.session


def check_session(core: ShardCore, call: Push | Pull) -> None:
    """Raise SessionFenced if the session has ended since the call began, and ShardRestarted if the shard has gone back to a
    checkpoint. Takes no lock: it is asked for every block."""
    if call.worker is not core.members.worker(call.worker.rank):
        raise core.gone_back()
    if call.worker.session != call.session or call.worker.state is not WorkerState.LIVE:
        core.members.check_session(call.worker.rank, call.session)


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
