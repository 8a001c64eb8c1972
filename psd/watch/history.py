"""A bounded history: a row of numbers for each snapshot, fewer the older they are; curves; events. Must not know shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

from psd.watch.snapshot import CurvePoint, Event, JobSnapshot

MOMENTS_MAX = 1200
EVENTS_MAX = 500
CURVES_MAX = 256
POINTS_MAX = 8192
"""Largest number of points kept for one curve, over all workers."""
POINTS_MIN = 512
"""Number of points of a curve that are kept in any case, however many curves there are."""
ALL_POINTS_MAX = 1 << 17
"""Limit for the points of all curves together: a browser gets all of them when it connects, about 40 bytes each."""


class Placed(Protocol):
    """A point of a worker, at a place on the horizontal axis."""

    @property
    def rank(self) -> int:
        """The worker's rank."""
        ...

    @property
    def place(self) -> float:
        """The step or the time."""
        ...


PointT = TypeVar("PointT", bound=Placed)


def thinned(points: Sequence[PointT], points_max: int) -> list[PointT]:
    """The same points if they are few; else with fewer points of each worker in the older half, evenly spaced.

    So the end of a curve is as fine as it was measured, and the rest, back to the beginning, is evenly coarse.
    """
    if len(points) <= points_max:
        return list(points)
    half = len(points) // 2
    # At this distance at least a quarter of the points go; if they are evenly spaced, every second one.
    places: dict[int, list[float]] = {}
    for point in points[:half]:
        places.setdefault(point.rank, []).append(point.place)
    pitches = {rank: 4 / 3 * (max(found) - min(found)) / len(found) for rank, found in places.items()}
    kept, last = [], dict[int, float]()
    for point in points[:half]:
        if point.rank not in last or abs(point.place - last[point.rank]) >= pitches[point.rank]:
            last[point.rank] = point.place
            kept.append(point)
    return [*kept, *points[half:]]


@dataclass(frozen=True)
class Moment:
    """The numbers of one snapshot that are drawn over time.

    Attributes:
        worker_...: a number for each worker. shard_...: a number for each shard. The rest of the name is one of the catalogue.
    """

    at: float
    clock: float
    steps_per_s: float
    received_bytes_per_s: float
    sent_bytes_per_s: float
    worker_awaited_share: tuple[float, ...]
    worker_behind: tuple[float, ...]
    worker_steps_per_s: tuple[float, ...]
    shard_cpu_share: tuple[float, ...]
    shard_memory_bytes: tuple[float, ...]
    shard_updates_per_s: tuple[float, ...]
    shard_latency_s: tuple[float, ...]

    @property
    def rank(self) -> int:
        """The same rank for all, since all moments are thinned together."""
        return 0

    @property
    def place(self) -> float:
        """The time."""
        return self.at


def moment_of(snapshot: JobSnapshot) -> Moment:
    """The numbers of a snapshot that are kept."""
    found: dict[str, Any] = {}
    for name in (field.name for field in fields(Moment)):
        of, _, number = name.partition("_")
        many = {"worker": snapshot.workers, "shard": snapshot.shards}.get(of)
        found[name] = getattr(snapshot, name) if many is None else tuple(getattr(each, number) for each in many)
    return Moment(**found)


class History:
    """Everything that has been seen so far, within limits.

    Attributes:
        moments: numbers of past snapshots, the oldest first. events: the last events, the oldest first.
    """

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self.events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self._curves: dict[str, dict[tuple[int, int], CurvePoint]] = {}
        self._left: dict[tuple[str, int], int] = {}  # by curve and rank: the last step that was logged before the job went back

    def add(self, snapshot: JobSnapshot | None, events: Iterable[Event]) -> None:
        """Add a snapshot, and the events since the one before. None: a first snapshot, which has no rates."""
        if snapshot is not None:
            self.moments = thinned([*self.moments, moment_of(snapshot)], MOMENTS_MAX)
        self.events.extend(events)

    def go_back(self) -> None:
        """Note that the job repeats steps, because it has gone back, or is another job.

        Which steps are logged is up to the program. So, when a worker next logs an earlier step, its points from there on are
        dropped.
        """
        self._left = {(name, rank): step for name, points in self._curves.items() for rank, step in points}

    def add_point(self, curve: str, point: CurvePoint) -> bool:
        """Add a point; it replaces a point of the same worker and step.

        Returns:
            True if the worker's points from this step on were dropped first, because the job has gone back.
        """
        if curve not in self._curves and len(self._curves) >= CURVES_MAX:
            return False
        points = self._curves.setdefault(curve, {})
        key = (point.rank, point.step)
        left = self._left.get((curve, point.rank))
        has_gone_back = left is not None and point.step <= left
        if has_gone_back:
            del self._left[curve, point.rank]
            points = {(rank, step): p for (rank, step), p in points.items() if rank != point.rank or step < point.step}
            self._curves[curve] = points
        points.pop(key, None)
        points[key] = point
        limit = max(POINTS_MIN, min(POINTS_MAX, ALL_POINTS_MAX // len(self._curves)))
        if len(points) > limit:
            self._curves[curve] = {(p.rank, p.step): p for p in thinned([*points.values()], limit)}
        return has_gone_back

    @property
    def curves(self) -> dict[str, Sequence[CurvePoint]]:
        """The points of each curve, by its name, in the order in which they came."""
        return {name: [*points.values()] for name, points in self._curves.items()}
