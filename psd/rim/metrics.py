"""The shard's counts as Prometheus metrics, read at each scrape, so that counting costs nothing here.

Names follow Prometheus' conventions: base units at their end, `_total` for what only grows. Labels are bounded: lanes, calls,
states, classes of errors, and at most WORKERS_MAX workers and TABLES_MAX tables. Must not know HTTP or sockets; the only module
that imports prometheus_client.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import psd
from psd.rim.bulk_server import LaneConnections
from psd.rim.checkpointer import CheckpointProgress
from psd.state.counts import SECONDS, Histogram
from psd.state.job import Job
from psd.state.shard import Shard
from psd.state.status import ShardState, ShardStatus
from psd.state.tables.block import TableCounts
from psd.state.tickets import WaitKind
from psd.state.vectors.desk import VectorCounts
from psd.state.workers.membership import Worker, WorkerState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

WORKERS_MAX = 128
"""Workers with a series of their own, by rank; the others share one, of the worker "other"."""

TABLES_MAX = 128
"""Tables with series of their own, the job's first; the others share one, of the table "other"."""

OTHER = "other"

AGE_BUCKETS = 18
"""Buckets of gradients' ages: 0, 1, 2, 4, and so on to 65536, and beyond."""

Sample = tuple[tuple[str, ...], float]


class Metrics:
    """Renders the metrics of a shard.

    Args:
        progress: of its checkpoints; gives None if it takes none. connections: of the bulk lane, by lane.
    """

    def __init__(
        self,
        shard: Shard,
        progress: Callable[[], CheckpointProgress | None],
        connections: Callable[[], Mapping[str, LaneConnections]],
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_ShardCollector(shard, progress, connections))
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """Render the metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _ShardCollector(Collector):
    def __init__(
        self,
        shard: Shard,
        progress: Callable[[], CheckpointProgress | None],
        connections: Callable[[], Mapping[str, LaneConnections]],
    ) -> None:
        self._shard = shard
        self._progress = progress
        self._connections = connections
        self._index = str(shard.config.shard_index)

    def describe(self) -> list[Metric]:
        """Return nothing: the metrics depend on the job."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics, now."""
        now = self._shard.status()
        yield from self._identity(now)
        yield from self._calls(now)
        yield from self._workers(now)
        if now.job is not None:
            yield from self._job(now.job)
            if now.job.tables is not None:
                yield from self._tables(by_table(now.job.tables.counts))
        yield from self._vectors(self._shard.vectors.status())
        yield from self._checkpoints()
        yield from self._bulk()

    # -- what they are made of -------------------------------------------------------------------------------------------

    def _gauge(self, name: str, help_: str, *samples: Sample, labels: tuple[str, ...] = ()) -> Metric:
        family = GaugeMetricFamily(name, help_, labels=("shard", *labels))
        for values, number in samples:
            family.add_metric((self._index, *values), number)
        return family

    def _counter(self, name: str, help_: str, *samples: Sample, labels: tuple[str, ...] = ()) -> Metric:
        family = CounterMetricFamily(name, help_, labels=("shard", *labels))
        for values, number in samples:
            family.add_metric((self._index, *values), number)
        return family

    def _seconds(
        self, name: str, help_: str, *samples: tuple[tuple[str, ...], Histogram], labels: tuple[str, ...] = ()
    ) -> Metric:
        family = HistogramMetricFamily(name, help_, labels=("shard", *labels))
        for values, histogram in samples:
            buckets = _cumulative(SECONDS, histogram.counts)
            family.add_metric((self._index, *values), buckets, histogram.total)
        return family

    # -- groups of metrics -----------------------------------------------------------------------------------------------

    def _identity(self, now: ShardStatus) -> Iterator[Metric]:
        build = GaugeMetricFamily("psd_build_info", "1; the version of psd and of Python.", labels=("version", "python"))
        build.add_metric((psd.__version__, platform.python_version()), 1)
        yield build
        yield self._gauge(
            "psd_shard_info",
            "1; the number of shards, and the shard's incarnation, another one after each restart.",
            ((str(self._shard.config.shard_count), f"{now.incarnation:x}"), 1),
            labels=("shards", "incarnation"),
        )
        yield self._gauge(
            "psd_shard_state",
            "1 for the state that the shard is in, 0 for the others; it can be trained while it is serving.",
            *(((each.name.lower(),), float(each is now.state)) for each in ShardState),
            labels=("state",),
        )
        yield self._counter(
            "psd_shard_restarts_total", "Processes that have used this arena, one after the other.", ((), now.restarts)
        )
        yield self._gauge("psd_timeline", "How often the job has gone back to a checkpoint.", ((), now.timeline))

    def _calls(self, now: ShardStatus) -> Iterator[Metric]:
        counters = now.counters
        results = (
            (("accepted",), counters.pushes_accepted),
            (("duplicate",), counters.pushes_duplicate),
            (("late",), counters.pushes_late),
        )
        errors = sorted(counters.errors.items())
        lanes = counters.lanes
        yield self._counter("psd_pushes_total", "Pushes, by outcome.", *results, labels=("result",))
        yield self._counter("psd_pulls_total", "Pulls that were begun.", ((), counters.pulls))
        yield self._counter(
            "psd_request_errors_total", "Requests that ended in an error, by kind.", *errors, labels=("reason", "code")
        )
        yield self._seconds(
            "psd_call_seconds",
            "Seconds from the start of a call to its end, including waits for other workers; failed calls are not counted.",
            *(((name, call), histogram) for name, lane in lanes.items() for call, histogram in lane.calls.items()),
            labels=("lane", "call"),
        )
        yield self._counter(
            "psd_received_bytes_total",
            "Bytes of gradients and initial values.",
            *(((name,), lane.bytes_received) for name, lane in lanes.items()),
            labels=("lane",),
        )
        yield self._counter(
            "psd_sent_bytes_total",
            "Bytes of parameters.",
            *(((name,), lane.bytes_sent) for name, lane in lanes.items()),
            labels=("lane",),
        )
        yield self._seconds(
            "psd_barrier_seconds", "From a worker's arrival at a barrier to its opening.", ((), counters.barriers)
        )
        yield self._counter("psd_barriers_opened_total", "How often a barrier has opened.", ((), now.barriers_opened))
        kinds = [ticket.kind for ticket in now.waits]
        yield self._gauge(
            "psd_waits",
            "Calls that wait for other workers, by what they wait for.",
            *(((kind.name.lower(),), kinds.count(kind)) for kind in WaitKind),
            labels=("kind",),
        )

    def _workers(self, now: ShardStatus) -> Iterator[Metric]:
        counters, workers = now.counters, now.workers
        states = [worker.state for worker in workers]
        yield self._gauge(
            "psd_workers",
            "Workers of the job, by state.",
            *(((state.name.lower(),), states.count(state)) for state in WorkerState),
            labels=("state",),
        )
        yield self._counter(
            "psd_worker_leases_expired_total", "Workers that were silent for too long.", ((), counters.leases_expired)
        )
        yield self._counter(
            "psd_worker_sessions_total", "Joins of workers, including those that came back.", ((), counters.sessions)
        )
        yield self._counter(
            "psd_worker_awaited_seconds_total",
            "How long others have waited for the worker: in rounds, from the first gradient to its own, as the shard's first "
            "block sees it; without rounds, how long it was the one that the staleness bound held others back for.",
            *_by_worker(workers, lambda worker: worker.awaited_s, sum),
            labels=("worker",),
        )
        live = [worker for worker in workers if worker.state is WorkerState.LIVE]
        is_told = now.job is None or now.job.trained_count > 0
        yield self._gauge(
            "psd_worker_step",
            "Steps that a live worker has finished, as far as the shard knows; absent if it has no trained blocks, since it "
            "hears of steps by pushes.",
            *_by_worker(live if is_told else [], lambda worker: worker.clock, min),
            labels=("worker",),
        )
        yield self._gauge(
            "psd_worker_silent_seconds",
            "Seconds since a live worker was last heard from.",
            *_by_worker(live, lambda worker: max(0.0, self._shard.age_s(worker.last_seen)), max),
            labels=("worker",),
        )

    def _job(self, job: Job) -> Iterator[Metric]:
        yield self._seconds(
            "psd_round_seconds", "From the first gradient of a block's round to its update; per block.", ((), job.round_times)
        )
        yield self._gauge("psd_open_rounds", "Blocks with gradients of a round that has not closed.", ((), job.open_rounds))
        yield self._counter("psd_block_updates_total", "Updates, summed over the blocks.", ((), job.updates))
        if job.trained_count:
            yield self._gauge("psd_version_min", "Updates of the block that lags furthest behind.", ((), job.version_min))
            yield self._gauge("psd_version_max", "Updates of the block that is furthest ahead.", ((), job.version_max))
        ages = HistogramMetricFamily(
            "psd_gradient_age_updates",
            "Without rounds: updates of a block between a worker's reading it and its gradient; per block.",
            labels=("shard",),
        )
        ages.add_metric((self._index,), _cumulative(_AGE_BOUNDS, _ages(job.ages)), job.age_total)
        yield ages
        yield self._gauge("psd_parameter_bytes", "Size of the shard's parameters.", ((), job.parameter_bytes))
        yield self._gauge("psd_slot_bytes", "Size of the state of the shard's update rules.", ((), job.slot_bytes))
        arena = job.arena
        yield self._gauge("psd_arena_used_bytes", "Memory used by the arena.", ((), arena.used_bytes))
        yield self._gauge("psd_arena_spare_bytes", "Free pages in the arena.", ((), arena.spare_bytes))
        yield self._gauge(
            "psd_arena_pinned_bytes",
            "Old versions that readers hold, and pages being written, in the arena.",
            ((), arena.held_bytes),
        )

    def _tables(self, tables: Sequence[TableCounts]) -> Iterator[Metric]:
        label = ("table",)
        yield self._gauge("psd_table_rows", "Rows of a table.", *((t[:1], t.rows) for t in tables), labels=label)
        yield self._gauge(
            "psd_table_bytes",
            "Size of a table's rows, with slots and index.",
            *((t[:1], t.bytes) for t in tables),
            labels=label,
        )
        yield self._counter(
            "psd_table_reads_total",
            "Rows that were asked for; those that were there (hit), and others, whose initial values were computed (miss).",
            *(((t.name, "hit"), t.hits) for t in tables),
            *(((t.name, "miss"), t.reads - t.hits) for t in tables),
            labels=("table", "result"),
        )
        yield self._counter(
            "psd_table_rows_created_total", "Rows that were created.", *((t[:1], t.created) for t in tables), labels=label
        )
        yield self._counter(
            "psd_table_rows_removed_total",
            "Rows that were removed: evicted for others, expired, or on request.",
            *(((t.name, why), getattr(t, why)) for t in tables for why in ("evicted", "expired", "removed")),
            labels=("table", "reason"),
        )
        yield self._counter(
            "psd_table_gradients_dropped_total",
            "Gradients of ids without a row: refused at the limit, or of ids that were not seen often enough.",
            *(((t.name, why), getattr(t, why)) for t in tables for why in ("refused", "unadmitted")),
            labels=("table", "reason"),
        )

    def _vectors(self, vectors: VectorCounts) -> Iterator[Metric]:
        yield self._gauge("psd_vectors", "Server-side vectors.", ((), vectors.number))
        yield self._gauge("psd_vector_bytes", "Size of this shard's part of all vectors.", ((), vectors.bytes))
        yield self._counter(
            "psd_vector_batches_total",
            "Batches of operations on vectors: those that were run, and those that came again and were only answered.",
            (("run",), vectors.batches),
            (("repeated",), vectors.repeated),
            labels=("result",),
        )
        yield self._counter("psd_vector_operations_total", "Operations of the batches that were run.", ((), vectors.operations))

    def _checkpoints(self) -> Iterator[Metric]:
        progress = self._progress()
        if progress is None:
            return
        yield self._counter(
            "psd_checkpoints_total", "Checkpoints of which this shard has stored its part.", ((), progress.written)
        )
        yield self._counter("psd_checkpoint_failures_total", "Checkpoints that failed here.", ((), progress.failed))
        if not progress.last:
            return
        yield self._gauge(
            "psd_checkpoint_last_success_timestamp_seconds",
            "When the last part was stored, in seconds since 1970; absent before.",
            ((), progress.last_wall),
        )
        yield self._gauge("psd_checkpoint_last_size_bytes", "Size of the last part.", ((), progress.last_bytes))
        yield self._gauge(
            "psd_checkpoint_last_duration_seconds", "How long it took to store the last part.", ((), progress.last_took_s)
        )

    def _bulk(self) -> Iterator[Metric]:
        lanes = self._connections()
        yield self._gauge(
            "psd_bulk_connections",
            "Open connections of the bulk lane, including those that have not shown a ticket yet.",
            *(((name,), lane.open) for name, lane in lanes.items()),
            labels=("lane",),
        )
        yield self._counter(
            "psd_bulk_connections_refused_total",
            "Connections of the bulk lane that were closed before they had shown a ticket.",
            *(((name,), lane.refused) for name, lane in lanes.items()),
            labels=("lane",),
        )


_AGE_BOUNDS = (0.0, *(2.0**power for power in range(AGE_BUCKETS - 1)))


def _ages(counts: list[int]) -> list[int]:
    """The counts in AGE_BUCKETS buckets and one above."""
    return [*(counts + [0] * AGE_BUCKETS)[:AGE_BUCKETS], sum(counts[AGE_BUCKETS:])]


def _cumulative(bounds: Sequence[float], counts: list[int]) -> list[tuple[str, float]]:
    buckets, so_far = [], 0
    for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
        so_far += count
        buckets.append((bound, float(so_far)))
    return buckets


def by_table(tables: Sequence[TableCounts]) -> list[TableCounts]:
    """The numbers of each of the first TABLES_MAX tables, and of all others together."""
    others = tables[TABLES_MAX:]
    if not others:
        return [*tables]
    sums = [sum(numbers) for numbers in zip(*(each[1:] for each in others), strict=True)]
    return [*tables[:TABLES_MAX], TableCounts(OTHER, *sums)]


def _by_worker(
    workers: list[Worker], value: Callable[[Worker], float], together: Callable[[list[float]], float]
) -> Iterator[Sample]:
    """A sample for each of the first WORKERS_MAX ranks, and one for all others together."""
    others = [value(worker) for worker in workers if worker.rank >= WORKERS_MAX]
    for worker in workers:
        if worker.rank < WORKERS_MAX:
            yield (str(worker.rank),), value(worker)
    if others:
        yield (OTHER,), together(others)
