"""The state of a shard at one moment, for psdctl and the metrics. Must not know messages or Prometheus."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from psd.state.counts import Counters
from psd.state.job import Job
from psd.state.life import Life
from psd.state.readers import KnownReader
from psd.state.tickets import Ticket
from psd.state.workers.membership import Worker
from psd.v1 import job_pb2


class ShardState(enum.Enum):
    """State of a shard for users. Values are those of psd.v1.ShardState."""

    EMPTY = 1
    SERVING = 2
    DRAINING = 3
    RESTORING = 4


STATES = {
    Life.EMPTY: ShardState.EMPTY,
    Life.LOADING: ShardState.RESTORING,
    Life.LOST: ShardState.RESTORING,
    Life.TENTATIVE: ShardState.RESTORING,
}
"""State of a shard by its place in the life cycle; at all other places it is SERVING."""


@dataclass(frozen=True)
class ShardStatus:
    """Copies, made under the shard's lock, so that they can be read without it. Only `job` is not a copy.

    Attributes:
        restarts: number of processes that have gone on with this arena. directory: where the arena is.
        min_clock: clock of the slowest worker; 0 if there is none.
        job: None before one is declared.
        ended_by: the order to end that all workers have followed; None: there was none.
        known_readers: as Readers.all. reader_sent_bytes: bytes sent to readers, those that are forgotten, too.
        total: the clock at which the job ends, as workers say; 0: not known.
    """

    state: ShardState
    life: Life
    run_id: str
    incarnation: int
    timeline: int
    restored_from: str
    restarts: int
    directory: Path
    uptime_s: float
    counters: Counters
    barriers_opened: int
    workers: list[Worker]
    min_clock: int
    waits: list[Ticket]
    job: Job | None
    orders: job_pb2.JobOrders | None
    ended_by: job_pb2.JobOrders | None
    total: int
    known_readers: list[KnownReader]
    reader_sent_bytes: int
