"""Curves that workers log, at shard 0: a few thousand points of each, in memory. Must not know how they come and go.

Nothing of it is in the arena: after a restart curves begin anew, while those who look on keep what they have seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from psd.contract.errors import InvalidRequest
from psd.contract.points import CURVE_BYTES_MAX, CURVES_MAX, REQUEST_POINTS_MAX, thinned
from psd.contract.printable import is_printable
from psd.state import locks
from psd.v1 import control_pb2


@dataclass(frozen=True, slots=True)
class LoggedPoint:
    """One point; `number` counts those of all curves, from 1."""

    number: int
    rank: int
    step: int
    value: float
    at: float


class Curves:
    """All curves of a job. Thread-safe."""

    def __init__(self) -> None:
        self._last = 0
        self._curves: dict[str, list[LoggedPoint]] = {}
        self._lock = locks.new(locks.Level.LEAF)

    def add(self, rank: int, points: Sequence[control_pb2.Point]) -> None:
        """Take a worker's points.

        Raises:
            InvalidRequest: too many, or one has a wrong name; then none is taken.
        """
        if len(points) > REQUEST_POINTS_MAX:
            raise InvalidRequest(f"points: at most {REQUEST_POINTS_MAX} in one request, got {len(points)}")
        for point in points:
            _check(point)
        with self._lock:
            names = self._curves.keys() | {point.curve for point in points}
            if len(names) > CURVES_MAX:
                raise InvalidRequest(f"points: curve: a job has at most {CURVES_MAX} curves, these would make {len(names)}")
            for point in points:
                self._last += 1
                curve = self._curves.setdefault(point.curve, [])
                curve.append(LoggedPoint(self._last, rank, point.step, point.value, point.at))
            for name in {point.curve for point in points}:
                self._curves[name] = thinned(self._curves[name])

    def after(self, number: int) -> tuple[list[control_pb2.Point], int]:
        """The points with larger numbers, curve by curve, and the number of the last one."""
        with self._lock:
            last, found = self._last, {name: _after(points, number) for name, points in self._curves.items()}
        points = [
            control_pb2.Point(curve=name, rank=point.rank, step=point.step, value=point.value, at=point.at)
            for name, points in found.items()
            for point in points
        ]
        return points, last


def _after(points: list[LoggedPoint], number: int) -> list[LoggedPoint]:
    count = 0
    for point in reversed(points):
        if point.number <= number:
            break
        count += 1
    return points[len(points) - count :]


def _check(point: control_pb2.Point) -> None:
    size = len(point.curve.encode())
    if not 1 <= size <= CURVE_BYTES_MAX:
        raise InvalidRequest(f"points: curve: expected 1 to {CURVE_BYTES_MAX} bytes, got {size}")
    if not is_printable(point.curve):
        raise InvalidRequest(f"points: curve: {point.curve!r} has characters that cannot be printed")
    if not math.isfinite(point.at):
        raise InvalidRequest(f"points: at: expected seconds since 1970, got {point.at}")
