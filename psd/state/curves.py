"""Scalars that workers report, such as their losses: the last points of each series, in memory, for psdctl and the dashboard.

Shard 0 keeps them. They are no part of the job: a shard that is killed forgets them. A worker numbers its points for as long as
its connection lives, so that points that are sent again are not kept twice. Has a lock of its own, which no push or pull takes.
Must not know messages.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from psd.contract.errors import InvalidRequest
from psd.contract.integers import INTEGER_MAX
from psd.contract.scalars import BATCH_POINTS_MAX, SERIES_MAX, check_name
from psd.state import locks

POINTS_MAX = 4096
"""Most points that are kept of one series."""
POINTS_MIN = 16
"""Points that are kept of one series at least, even if all series together then have more than ALL_POINTS_MAX."""
ALL_POINTS_MAX = 2 << 20
"""Most points that are kept of all series together, but for POINTS_MIN. They take 64 MiB."""

READ_POINTS_MAX = 8192
"""Most points in one answer."""


class PointBatch(NamedTuple):
    """Points of one worker's series, as columns, like LogRequest."""

    first: int
    names: Sequence[str]
    series: Sequence[int]
    steps: Sequence[int]
    values: Sequence[float]
    ago_s: Sequence[float]
    total: int = 0


class CurvePart(NamedTuple):
    """Points of one series, as columns, like Curve."""

    rank: int
    name: str
    steps: Sequence[int]
    values: Sequence[float]
    ago_s: Sequence[float]


@dataclass(slots=True)
class _Points:
    """The points of one series. numbers: each point's number in the shard's count of all points."""

    numbers: array[int] = field(default_factory=lambda: array("Q"))
    steps: array[int] = field(default_factory=lambda: array("Q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    times: array[float] = field(default_factory=lambda: array("d"))

    def keep_last(self, count: int) -> None:
        for column in (self.numbers, self.steps, self.values, self.times):
            del column[: len(column) - count]


class Curves:
    """The points of all workers' series. Thread-safe.

    Args:
        now: returns monotonic seconds.
        name_bytes_max: the most bytes of a series' name.
    """

    def __init__(self, now: Callable[[], float], name_bytes_max: int) -> None:
        self._now = now
        self._name_bytes_max = name_bytes_max
        self._lock = locks.new(locks.Level.LEAF)
        self._series: dict[int, dict[str, _Points]] = {}  # by rank
        self._next: dict[int, tuple[int, int]] = {}  # by rank: the connection, and the number of its next point
        self._totals: dict[int, int] = {}  # by rank: the clock at which the job ends, as the worker has last said
        self._count = 0
        self._trimmed_at = 0  # number of series when all of them were last trimmed

    def add(self, rank: int, connection: int, batch: PointBatch) -> None:
        """Keep a worker's points, except those that this connection has sent before.

        Raises:
            InvalidRequest: too many points or series, an invalid name or step, or columns of different lengths; nothing was
                kept.
        """
        lengths = {len(batch.series), len(batch.steps), len(batch.values), len(batch.ago_s)}
        if len(lengths) > 1:
            raise InvalidRequest("series, steps, values, ago_s: are columns of one length")
        (length,) = lengths
        if length > BATCH_POINTS_MAX:
            raise InvalidRequest(f"series: has {length} points, the limit is {BATCH_POINTS_MAX}")
        if length and max(batch.series) >= len(batch.names):
            raise InvalidRequest(f"series: {max(batch.series)} is not below the number of names, {len(batch.names)}")
        if len(batch.names) > SERIES_MAX:
            raise InvalidRequest(f"names: has {len(batch.names)}, the limit is {SERIES_MAX}")
        if length and max(batch.steps) > INTEGER_MAX:
            raise InvalidRequest(f"steps: {max(batch.steps)} is above the limit of {INTEGER_MAX}")
        if batch.total > INTEGER_MAX:
            raise InvalidRequest(f"total: {batch.total} is above the limit of {INTEGER_MAX}")
        for name in batch.names:
            check_name(name, self._name_bytes_max)
        now = self._now()
        with self._lock:
            own = self._series.get(rank, {})
            if len(own.keys() | set(batch.names)) > SERIES_MAX:
                raise InvalidRequest(f"names: worker {rank} would have more than {SERIES_MAX} series")
            if batch.total:
                self._totals[rank] = batch.total
            known, following = self._next.get(rank, (0, 0))
            if not connection or connection != known:
                following = 0
            self._next[rank] = connection, max(following, batch.first + length)
            skipped = max(0, following - batch.first)
            own = self._series.setdefault(rank, own)
            found = [own.setdefault(name, _Points()) for name in batch.names]
            for index in range(skipped, length):
                points = found[batch.series[index]]
                self._count += 1
                points.numbers.append(self._count)
                points.steps.append(batch.steps[index])
                points.values.append(batch.values[index])
                ago_s = batch.ago_s[index]
                points.times.append(now - ago_s if 0 <= ago_s < math.inf else now)
            self._trim(found)

    @property
    def total(self) -> int:
        """The clock at which the job ends: the largest one that the workers have last said; 0 if none has said any."""
        with self._lock:
            return max(self._totals.values(), default=0)

    def _trim(self, changed: Sequence[_Points]) -> None:
        """Drop the oldest points of series that have a quarter too many: dropping moves all others, so it is done rarely."""
        series_count = max(1, sum(map(len, self._series.values())))
        limit = max(POINTS_MIN, min(POINTS_MAX, ALL_POINTS_MAX // series_count))
        if series_count > self._trimmed_at + self._trimmed_at // 8:  # the limit has shrunk, also for series that get no points
            self._trimmed_at = series_count
            changed = [points for own in self._series.values() for points in own.values()]
        for points in changed:
            if len(points.numbers) > limit + limit // 4:
                points.keep_last(limit)

    def read(self, after: int) -> tuple[int, bool, list[CurvePart]]:
        """The number of the last point read, whether there are later ones, and the points after number `after`."""
        now = self._now()
        with self._lock:
            rest = [
                (rank, name, points, begin)
                for rank, own in self._series.items()
                for name, points in own.items()
                if (begin := bisect_right(points.numbers, after)) < len(points.numbers)
            ]
            if not rest:
                return self._count, False, []
            last = min(points.numbers[begin] for _, _, points, begin in rest) + READ_POINTS_MAX - 1
            parts = []
            for rank, name, points, begin in rest:
                end = bisect_right(points.numbers, last)
                if begin < end:
                    times = points.times[begin:end]
                    ago_s = [max(0.0, now - time) for time in times]
                    parts.append(CurvePart(rank, name, points.steps[begin:end], points.values[begin:end], ago_s))
            return min(last, self._count), last < self._count, sorted(parts)
