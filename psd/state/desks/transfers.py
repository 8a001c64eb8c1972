"""A push or a pull in progress: what its header says, and how far it is.

The data plane keeps these objects, and Exchange changes them. Must not know messages or waits.
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
"""A block's version, and its pinned page, to be given back by `BlockState.unpin`. The tables' block has no page."""


@dataclass(slots=True)
class Push:
    """A push in progress: what its header says, and the blocks that it has covered.

    Attributes:
        job: the job when the push began; if another one has replaced it, the call fails (see Exchange).
        session: session that sends the push. begun_as: session that began it, which is part of its name.
        is_entered: True once a valid block has come. Until then the push has changed nothing but its worker's lease.
        is_finite: True if the worker has checked for NaN and infinity itself.
        since: as in Voice. first_gradient: as in PushHeader.
        versions: by block, the version that the worker had read; empty: not known, or not needed.
        loan: lends the gradient to blocks that read it where it lies.
        staged: rows for the tables' block whose last frame has not come.
        arrived: number of blocks that have come, repeated ones included. outcomes: number of blocks for each Outcome.
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
        """The scalars (such as lr) that this worker states for its round, for all groups."""
        return Voice(self.since, self.worker.rank, self.scalars)


@dataclass(slots=True)
class Pull:
    """A pull in progress: who reads, and at which clock.

    Attributes:
        job: the job when the pull began; if another one has replaced it, the call fails (see Exchange).
        reader: rank of the worker, if it will compute gradients from what it reads; None: it only waits.
    """

    job: Job
    worker: Worker
    session: int
    clock: int
    reader: int | None

    @property
    def has_rounds(self) -> bool:
        """True if pushes form rounds; otherwise each push is an update of its own, applied when it comes."""
        return self.job.policy.has_rounds
