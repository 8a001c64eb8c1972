"""A push or a pull in progress: its header's facts, its progress, and the moments at which riders have a say (riders.py).

Exchange moves them on, and the data plane holds them. Must not know what rides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import ref

from psd.state.aggregation.agreement import Scalars
from psd.state.aggregation.lent_gradients import Loan
from psd.state.aggregation.rounds import Outcome
from psd.state.core import ShardCore
from psd.state.job import Job
from psd.state.tables.pushes import StagedRows
from psd.state.tickets import Ticket
from psd.state.workers.membership import Worker, WorkerState
from psd.v1 import data_pb2
from psd_core.arena import Page

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
        loan: of the gradient that blocks may read where the worker has it.
        staged: rows of the tables' block whose last frame has not come.
        arrived: blocks that have come, also those that were covered before. outcomes: how many blocks had each Outcome.
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
    loan: Loan = field(default_factory=Loan)
    staged: StagedRows = field(default_factory=StagedRows)
    covered: set[int] = field(default_factory=set)
    arrived: int = 0
    outcomes: list[int] = field(default_factory=([0] * len(Outcome)).copy)


@dataclass(slots=True)
class Pull:
    """A pull in progress: who reads, and at which clock.

    Attributes:
        job: as it was when the pull began; the call ends where there is another one, see Exchange.
    """

    job: Job
    worker: Worker
    session: int
    clock: int

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


def check_session(core: ShardCore, call: Push | Pull) -> None:
    """Raise SessionFenced if the session has ended since the call began, and ShardRestarted if the shard has gone back to a
    checkpoint. Takes no lock: it is asked for every block."""
    if call.worker is not core.members.worker(call.worker.rank):
        raise core.gone_back()
    if call.worker.session != call.session or call.worker.state is not WorkerState.LIVE:
        core.members.check_session(call.worker.rank, call.session)
