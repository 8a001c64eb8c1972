"""A shard's counts as Prometheus metrics, read at each scrape, so that counting costs nothing more; and what a relay's share.

The numbers and their names are those of the catalogue (psd/contract/facts.py); the other metrics are defined here. Names follow
Prometheus' conventions: base units at their end, `_total` for totals. Labels are bounded: transports, calls, states, classes of
errors, and at most WORKERS_MAX workers and TABLES_MAX tables. Must not know HTTP or sockets; prometheus_client is
imported only here, and for a relay's metrics.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import psd
from psd.contract import facts
from psd.contract.fact import Fact
from psd.rim.bulk_server import LaneConnections
from psd.rim.checkpointer import CheckpointProgress
from psd.rim.views import shard_numbers, table_numbers, worker_numbers
from psd.state.counts import SECONDS, Counters, Histogram
from psd.state.desks.status import ShardState, ShardStatus
from psd.state.job import Job
from psd.state.shard import Shard
from psd.state.tables.block import TableCounts
from psd.state.tickets import WaitKind
from psd.state.workers.membership import WorkerState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

WORKERS_MAX = 128
"""Most workers with their own series, by rank; the others share that of the worker "other"."""

TABLES_MAX = 128
"""Most tables with their own series, the job's first; the others share that of the table "other"."""

OTHER = "other"

AGE_BUCKETS = 18
"""Buckets of gradients' ages: 0, 1, 2, 4, and so on to 65536, and beyond."""

Sample = tuple[tuple[str, ...], float]


class Metrics:
    """Renders metrics, those of the process included."""

    def __init__(self, families: Families) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(families)
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """Render the metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class Families(Collector):
    """The metrics of one process; a subclass has `collect`.

    Args:
        of: the label `shard` of all of them.
    """

    def __init__(self, of: str) -> None:
        self._of = of

    def describe(self) -> list[Metric]:
        """Return nothing: the metrics depend on the job."""
        return []

    def catalogue(
        self, rows: Sequence[Fact], counted: Sequence[tuple[tuple[str, ...], Mapping[str, float]]]
    ) -> Iterator[Metric]:
        """The metrics of these rows. counted: for each series, the values of its varying labels, and its numbers by name."""
        families: dict[str, list[Fact]] = {}
        for fact in rows:
            if fact.metric.startswith("psd_"):
                families.setdefault(fact.metric_name, []).append(fact)
        for name, members in families.items():
            samples = [
                ((*key, *filter(None, fact.labels.values())), numbers[fact.name])
                for fact in members
                for key, numbers in counted
                if fact.name in numbers
            ]
            if samples:
                make = self.counter if members[0].kind == "total" else self.gauge
                yield make(name, _help(members), *samples, labels=tuple(members[0].labels))

    def gauge(self, name: str, help_: str, *samples: Sample, labels: tuple[str, ...] = ()) -> Metric:
        """A metric that may shrink."""
        return self._filled(GaugeMetricFamily(name, help_, labels=("shard", *labels)), samples)

    def counter(self, name: str, help_: str, *samples: Sample, labels: tuple[str, ...] = ()) -> Metric:
        """A metric that only grows."""
        return self._filled(CounterMetricFamily(name, help_, labels=("shard", *labels)), samples)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, samples: Sequence[Sample]) -> Metric:
        for values, number in samples:
            family.add_metric((self._of, *values), number)
        return family

    def build(self) -> Metric:
        """The versions of the programs."""
        build = GaugeMetricFamily("psd_build_info", "1; the version of psd and of Python.", labels=("version", "python"))
        build.add_metric((psd.__version__, platform.python_version()), 1)
        return build

    def errors(self, counters: Counters) -> Metric:
        """The errors with which calls have ended."""
        errors = sorted(counters.errors.items())
        return self.counter(
            "psd_request_errors_total", "Requests that ended in an error, by kind.", *errors, labels=("reason", "code")
        )


class ShardFamilies(Families):
    """The metrics of a shard.

    Args:
        progress: returns that of its checkpoints, None if it takes none. connections: returns the bulk connections by lane.
    """

    def __init__(
        self,
        shard: Shard,
        progress: Callable[[], CheckpointProgress | None],
        connections: Callable[[], Mapping[str, LaneConnections]],
    ) -> None:
        super().__init__(str(shard.config.shard_index))
        self._shard = shard
        self._progress = progress
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        """All metrics, now: first the catalogue's numbers, then names, states, histograms and errors."""
        now, progress = self._shard.status(), self._progress()
        own, by_transport = split(facts.SHARD)
        yield from self.catalogue(own, [((), shard_numbers(self._shard, now, progress))])
        lanes = now.counters.lanes.items()
        counted = [((lane,), {fact.name: getattr(counts, fact.name) for fact in by_transport}) for lane, counts in lanes]
        yield from self.catalogue(by_transport, counted)
        yield from self.catalogue(facts.WORKER, self._by_worker(now))
        if now.job is not None and now.job.tables is not None:
            tables = by_table(now.job.tables.counts)
            yield from self.catalogue(facts.TABLE, [((table.name,), table_numbers(table)) for table in tables])
        yield from self._identity(now)
        yield from self._calls(now)
        if now.job is not None:
            yield from self._job(now.job)
        yield from self._bulk()

    def _seconds(
        self, name: str, help_: str, *samples: tuple[tuple[str, ...], Histogram], labels: tuple[str, ...] = ()
    ) -> Metric:
        family = HistogramMetricFamily(name, help_, labels=("shard", *labels))
        for values, histogram in samples:
            buckets = _cumulative(SECONDS, histogram.counts)
            family.add_metric((self._of, *values), buckets, histogram.total)
        return family

    # -- groups of metrics -----------------------------------------------------------------------------------------------

    def _identity(self, now: ShardStatus) -> Iterator[Metric]:
        yield self.build()
        yield self.gauge(
            "psd_shard_info",
            "1; the number of shards, and the shard's incarnation, another one after each restart.",
            ((str(self._shard.config.shard_count), f"{now.incarnation:x}"), 1),
            labels=("shards", "incarnation"),
        )
        yield self.gauge(
            "psd_shard_state",
            "1 for the state that the shard is in, 0 for the others; it can be trained while it is serving.",
            *(((each.name.lower(),), float(each is now.state)) for each in ShardState),
            labels=("state",),
        )
        states = [worker.state for worker in now.workers]
        yield self.gauge(
            "psd_workers",
            "Workers of the job, by state.",
            *(((state.name.lower(),), states.count(state)) for state in WorkerState),
            labels=("state",),
        )

    def _calls(self, now: ShardStatus) -> Iterator[Metric]:
        counters = now.counters
        lanes = counters.lanes
        yield self.errors(counters)
        yield self._seconds(
            "psd_call_seconds",
            "Seconds from the start of a call to its end, including waits for other workers; failed calls are not counted.",
            *(((name, call), histogram) for name, lane in lanes.items() for call, histogram in lane.calls.items()),
            labels=("transport", "call"),
        )
        yield self._seconds(
            "psd_barrier_seconds", "From a worker's arrival at a barrier to its opening.", ((), counters.barriers)
        )
        kinds = [ticket.kind for ticket in now.waits]
        yield self.gauge(
            "psd_waits",
            "Calls that wait for other workers, by what they wait for.",
            *(((kind.name.lower(),), kinds.count(kind)) for kind in WaitKind),
            labels=("kind",),
        )

    def _by_worker(self, now: ShardStatus) -> list[tuple[tuple[str, ...], dict[str, float]]]:
        """The numbers of each of the first WORKERS_MAX ranks, and those of all others together.

        A worker that does not live has only its totals; a clock is there only if pushes tell the shard of steps.
        """
        has_clocks = now.job is None or now.job.trained_count > 0
        found: dict[str, list[dict[str, float]]] = {}
        for worker in now.workers:
            numbers = worker_numbers(self._shard, worker)
            kept = {
                fact.name: max(0.0, numbers[fact.name])
                for fact in facts.WORKER
                if fact.name in numbers
                and (fact.kind == "total" or worker.state is WorkerState.LIVE)
                and (fact.name != "clock" or has_clocks)
            }
            found.setdefault(str(worker.rank) if worker.rank < WORKERS_MAX else OTHER, []).append(kept)
        return [((rank,), _together(numbers)) for rank, numbers in found.items()]

    def _job(self, job: Job) -> Iterator[Metric]:
        yield self._seconds(
            "psd_round_seconds", "From the first gradient of a block's round to its update; per block.", ((), job.round_times)
        )
        ages = HistogramMetricFamily(
            "psd_gradient_age_updates",
            "Without rounds: updates of a block between a worker's reading it and its gradient; per block.",
            labels=("shard",),
        )
        ages.add_metric((self._of,), _cumulative(_AGE_BOUNDS, _ages(job.ages)), job.age_total)
        yield ages

    def _bulk(self) -> Iterator[Metric]:
        lanes = self._connections()
        yield self.gauge(
            "psd_bulk_connections",
            "Open connections of the bulk lane, including those that have not shown a ticket yet.",
            *(((name,), lane.open) for name, lane in lanes.items()),
            labels=("transport",),
        )
        yield self.counter(
            "psd_bulk_connections_refused_total",
            "Connections of the bulk lane that were closed before they had shown a ticket.",
            *(((name,), lane.refused) for name, lane in lanes.items()),
            labels=("transport",),
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


def _together(many: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The numbers of several workers as one: the sum of totals, the lowest clock, the longest silence."""
    found = {}
    for fact in facts.WORKER:
        values = [numbers[fact.name] for numbers in many if fact.name in numbers]
        if values:
            found[fact.name] = sum(values) if fact.kind == "total" else min(values) if fact.name == "clock" else max(values)
    return found


def split(rows: Sequence[Fact]) -> tuple[list[Fact], list[Fact]]:
    """Rows with one series, and rows with one for each transport."""
    by_transport = [fact for fact in rows if "transport" in fact.labels]
    return [fact for fact in rows if fact not in by_transport], by_transport


def _help(members: Sequence[Fact]) -> str:
    """The help of a metric; if several rows are its series, the help of each, by its label's value."""
    if len(members) == 1:
        return members[0].help
    return " ".join(f"{[*fact.labels.values()][-1]}: {fact.help}" for fact in members)
