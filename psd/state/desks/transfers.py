"""A push or a pull in progress: its header's facts, and its progress.

Exchange moves them on, and the data plane holds them. Must not know messages or waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from psd.state.aggregation.agreement import Scalars, Voice
from psd.state.aggregation.lent_gradients import Loan
from psd.state.aggregation.rounds import Outcome
from psd.state.job import Job
from psd.state.tables.pushes import StagedRows
from psd.state.workers.membership import Worker
from psd.v1 import data_pb2
from psd_core.arena import Page

Found = tuple[int, Page] | tuple[int, None]
"""A block's version, and its page, pinned: to be given back by `BlockState.unpin`. The tables' block has no page."""


@dataclass(slots=True)
class Push:
    """A push in progress: its header's facts, and the blocks that it has covered.

    Attributes:
        job: as it was when the push began; the call ends where there is another one, see Exchange.
        session: of the worker that sends it. begun_as: the session as which it was begun, which is in its name.
        is_entered: a valid block has come. Until then the push has changed nothing but its worker's lease.
        is_finite: the worker has looked for NaN and infinity itself.
        since: see Voice. first_gradient: see PushHeader.
        versions: by block, of the parameters that the worker had read; empty: not known, or pointless.
        loan: of the gradient that blocks may read where the worker has it.
        staged: rows of the tables' block whose last frame has not come.
        arrived: blocks that have come, also those that were covered before. outcomes: how many blocks had each Outcome.
    """

    job: Job
    worker: Worker
    session: int
    begun_as: int
    clock: int
    weight: float
    scalars: Scalars
    scale: float
    since: int = 0
    is_finite: bool = False
    client_state: bytes = b""
    first_gradient: bytes = b""
    cuts: tuple[data_pb2.Cut, ...] = ()
    is_entered: bool = False
    versions: Mapping[int, int] = field(default_factory=dict)
    loan: Loan = field(default_factory=Loan)
    staged: StagedRows = field(default_factory=StagedRows)
    covered: set[int] = field(default_factory=set)
    arrived: int = 0
    outcomes: list[int] = field(default_factory=([0] * len(Outcome)).copy)

    @property
    def voice(self) -> Voice:
        """The worker's say in the scalars of its round, over all groups."""
        return Voice(self.since, self.worker.rank, self.scalars)


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
        """True if the job's workers push in rounds; else each push is an update of its own, applied when it comes."""
        return self.job.policy.has_rounds
