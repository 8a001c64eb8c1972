"""The result of one look at a job: plain values, ready to be shown. Must not know where they come from.

Totals are as the shards told them, so that they agree with psdctl status and the metrics. Rates are those of the last seconds
(`RATE_S` in psd/watch/sampler.py); they are 0 where nothing is known yet.
"""

from __future__ import annotations

from dataclasses import dataclass

WAIT_S = 0.5
"""Waits that are shorter are part of every step, and not told one by one."""


@dataclass(frozen=True)
class CallTimes:
    """Calls of one kind: how many a second, and how long one takes, waits for other workers included."""

    call: str
    count: int
    per_s: float
    mean_s: float


@dataclass(frozen=True)
class TableTotals:
    """A sparse table, over all shards that answer."""

    name: str
    rows: int
    bytes: int
    reads: int
    hits: int


@dataclass(frozen=True)
class CheckpointSnapshot:
    """The last checkpoint of a shard, or of the job. `error`: why the last attempt has failed; empty: it has not."""

    name: str
    age_s: float
    bytes: int
    took_s: float
    error: str


@dataclass(frozen=True)
class ShardSnapshot:
    """One shard.

    Attributes:
        state: "serving", "empty", "draining", "restoring", or "no answer"; `error` says why then, and totals are those of the
            last answer.
        detail: its place in the life cycle, if that says more.
        rounds: updates of its foremost block. updates: over all its blocks. cpu_share: cores that it uses.
        in_calls_share: the part of a worker's time that it spends in calls at this shard.
        ages: numbers of gradients by age, as in psdctl status.
    """

    index: int
    address: str
    state: str
    detail: str = ""
    error: str = ""
    incarnation: str = ""
    restarts: int = 0
    uptime_s: float = 0.0
    tensors: int = 0
    blocks: int = 0
    tables: int = 0
    parameter_bytes: int = 0
    slot_bytes: int = 0
    table_bytes: int = 0
    memory_bytes: int = 0
    cpu_s: float = 0.0
    cpu_share: float = 0.0
    rounds: int = 0
    updates: int = 0
    rounds_per_s: float = 0.0
    pushes_accepted: int = 0
    pushes_late: int = 0
    pushes_duplicate: int = 0
    requests_refused: int = 0
    pulls: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    received_per_s: float = 0.0
    sent_per_s: float = 0.0
    in_calls_share: float = 0.0
    calls: tuple[CallTimes, ...] = ()
    ages: tuple[int, ...] = ()
    checkpoint: CheckpointSnapshot | None = None

    @property
    def latency_s(self) -> float:
        """Mean seconds of its slowest kind of call; 0 if none is made."""
        return max((call.mean_s for call in self.calls), default=0.0)


@dataclass(frozen=True)
class WorkerSnapshot:
    """One worker, as all shards together know it.

    Attributes:
        state: "live", "absent", "expired", "failed" or "finished".
        behind: steps behind the foremost worker.
        awaited_s: how long others have waited for it, at the shard where that was longest, the present wait included.
        awaited_share: the same as a part of the last seconds.
        last_seen_s: seconds ago; negative: never.
        waits: what it waits for, in words; empty: for nothing.
    """

    rank: int
    state: str
    host: str
    pid: int
    lane: str
    clock: int
    steps_per_s: float
    behind: int
    awaited_s: float
    awaited_share: float
    last_seen_s: float
    waits: str


@dataclass(frozen=True)
class Event:
    """Something that has happened between two looks.

    Attributes:
        at: seconds since 1970. kind: "join", "leave", "lost", "restart", "checkpoint", "refused", "order", "state" or "run".
        level: "info", "warning" or "error".
        step: of the job, or of the checkpoint.
    """

    at: float
    kind: str
    level: str
    text: str
    step: int


@dataclass(frozen=True)
class CurvePoint:
    """A number that a worker has logged."""

    rank: int
    step: int
    value: float
    at: float

    @property
    def place(self) -> float:
        """Step, along which curves are drawn."""
        return self.step


@dataclass(frozen=True)
class JobSnapshot:
    """The job at one moment.

    Attributes:
        at: seconds since 1970.
        state: "training", "starting", "waiting", "stalled", "finished" or "unreachable".
        headline: the state in a sentence. limit: what limits the job's speed, in a sentence; empty: it does not train.
        slow: ranks of workers that hold others back.
        clock: of the job, as in psdctl status. steps_per_s: of that clock. worker_steps_per_s: of all workers together.
        waits: who waits for whom, a sentence for each group of workers that wait alike.
        orders: what an operator has ordered and holds, or will, a sentence for each.
        checkpoint: of shard 0, the last one. problems: as in psdctl status.
    """

    at: float
    run_id: str
    state: str
    headline: str
    limit: str
    slow: tuple[int, ...]
    consistency: str
    reduction: str
    aggregation: str
    world_size: int
    quorum: int
    timeline: int
    restored_from: str
    clock: int
    steps_per_s: float
    worker_steps_per_s: float
    parameter_bytes: int
    slot_bytes: int
    received_per_s: float
    sent_per_s: float
    shards: tuple[ShardSnapshot, ...]
    workers: tuple[WorkerSnapshot, ...]
    tables: tuple[TableTotals, ...]
    waits: tuple[str, ...]
    orders: tuple[str, ...]
    checkpoint: CheckpointSnapshot | None
    problems: tuple[str, ...]
