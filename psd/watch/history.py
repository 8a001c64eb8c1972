"""A bounded past: rows of numbers, one a look, thinner the older they are; curves; events. Must not know shards."""

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
"""Points that are kept of one curve, of all workers together,"""
POINTS_MIN = 512
"""and how many at least, when there are so many curves that all together"""
ALL_POINTS_MAX = 1 << 17
"""would be more than this: a browser is sent all of them when it comes, some 40 bytes each."""


class Placed(Protocol):
    """A point of a worker, at a place along the axis."""

    @property
    def rank(self) -> int:
        """The worker's."""
        ...

    @property
    def place(self) -> float:
        """Step or time."""
        ...


PointT = TypeVar("PointT", bound=Placed)


def thinned(points: Sequence[PointT], points_max: int) -> list[PointT]:
    """The same points if they are few; else fewer of each worker in the older half, evenly spaced.

    So the end of a curve is as fine as it was measured, and all before is equally coarse, back to the beginning.
    """
    if len(points) <= points_max:
        return list(points)
    half = len(points) // 2
    # So far apart that at least a quarter of them goes: evenly spaced ones were closer than that, and every second goes.
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
    """The numbers of one look that are drawn over time.

    Attributes:
        worker_...: for each worker. shard_...: for each shard. The words after them are names of the catalogue.
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
        """One and the same, since all moments are thinned together."""
        return 0

    @property
    def place(self) -> float:
        """The time."""
        return self.at


def moment_of(snapshot: JobSnapshot) -> Moment:
    """The numbers of a look that are kept."""
    found: dict[str, Any] = {}
    for name in (field.name for field in fields(Moment)):
        of, _, number = name.partition("_")
        many = {"worker": snapshot.workers, "shard": snapshot.shards}.get(of)
        found[name] = getattr(snapshot, name) if many is None else tuple(getattr(each, number) for each in many)
    return Moment(**found)


class History:
    """Everything that has been seen so far.

    Attributes:
        moments: the oldest first. events: the last ones, the oldest first.
    """

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self.events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self._curves: dict[str, dict[tuple[int, int], CurvePoint]] = {}
        self._left: dict[tuple[str, int], int] = {}  # by curve and rank: the last step that was logged before the job went back

    def add(self, snapshot: JobSnapshot | None, events: Iterable[Event]) -> None:
        """Note a look, and what has happened since the one before. None: a first look, which knows no rates."""
        if snapshot is not None:
            self.moments = thinned([*self.moments, moment_of(snapshot)], MOMENTS_MAX)
        self.events.extend(events)

    def go_back(self) -> None:
        """Note that the job trains anew what it has trained already, from an earlier step on or as another job.

        What steps are is the program's own: each worker leaves its points from the next earlier step on that it logs.
        """
        self._left = {(name, rank): step for name, points in self._curves.items() for rank, step in points}

    def add_point(self, curve: str, point: CurvePoint) -> bool:
        """Note a point; another one of the same worker and step takes its place.

        Returns:
            Whether the worker's points from there on were dropped, as the job has gone back.
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
        """Points by the names of the curves, in the order in which they came."""
        return {name: [*points.values()] for name, points in self._curves.items()}
