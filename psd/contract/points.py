"""Points of curves that workers log for those who look on, and how a long curve is thinned.

Shards keep them by it, readers likewise. Must not know who has measured what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

CURVES_MAX = 64
"""Curves of one job."""

CURVE_BYTES_MAX = 64
"""Bytes of a curve's name."""

POINTS_MAX = 4096
"""Points that are kept of one curve, of all workers together."""

REQUEST_POINTS_MAX = 1000


class Ranked(Protocol):
    """A point of a worker."""

    @property
    def rank(self) -> int:
        """The worker's."""
        ...


PointT = TypeVar("PointT", bound=Ranked)


def thinned(points: Sequence[PointT], points_max: int = POINTS_MAX) -> list[PointT]:
    """The same points if they are few; else without every second point of each worker in the older half.

    So a curve is as fine as it was measured at its end, and the coarser the further back, but goes back to its beginning.
    """
    if len(points) <= points_max:
        return list(points)
    half = len(points) // 2
    kept, is_next_kept = [], dict[int, bool]()
    for point in points[:half]:
        is_kept = is_next_kept.get(point.rank, True)
        is_next_kept[point.rank] = not is_kept
        if is_kept:
            kept.append(point)
    return [*kept, *points[half:]]
