"""Curves from the JSON lines that workers write with --log-dir. Must not know how they are drawn.

A restarted worker continues its file, mostly from an earlier step: the points that it had logged from that step on are
replaced, as in the job. A last line that was cut off because the worker was killed is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from psd.contract.config import ConfigError
from psd.contract.scalars import LOG_SUFFIX, LoggedScalars


@dataclass(frozen=True)
class LoggedPoint:
    """A scalar that one worker has logged. at: seconds since 1970."""

    step: int
    value: float
    at: float


@dataclass(frozen=True)
class LoggedRun:
    """The curves of one run.

    Attributes:
        curves: points by name and rank, with ascending steps. begun_at: time of the first point, in seconds since 1970.
        skipped: number of lines that could not be read.
    """

    name: str
    curves: Mapping[str, Mapping[int, Sequence[LoggedPoint]]]
    begun_at: float
    skipped: int


def read_run(path: Path) -> LoggedRun:
    """Read the curves of a --log-dir, or of one file in it.

    Raises:
        ConfigError: there are no curves, or a file cannot be read.
    """
    files = sorted(path.glob(f"*{LOG_SUFFIX}")) if path.is_dir() else [path]
    curves: dict[str, dict[int, list[LoggedPoint]]] = {}
    skipped = 0
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            raise ConfigError(f"RUN: {file} cannot be read: {error.strerror or error}") from error
        for line in lines:
            try:
                _add(curves, LoggedScalars.read(line))
            except ValueError:
                skipped += 1
    if not curves:
        raise ConfigError(f"RUN: {path} has no scalars; it should be a --log-dir of psd-run whose program calls ps.log()")
    begun_at = min(point.at for ranks in curves.values() for points in ranks.values() for point in points)
    return LoggedRun(path.name or str(path.resolve()), curves, begun_at, skipped)


def _add(curves: dict[str, dict[int, list[LoggedPoint]]], logged: LoggedScalars) -> None:
    for name, value in logged.scalars.items():
        points = curves.setdefault(name, {}).setdefault(logged.rank, [])
        while points and points[-1].step >= logged.step:
            points.pop()
        points.append(LoggedPoint(logged.step, value, logged.time))


@dataclass(frozen=True)
class CurveSummary:
    """One step of a curve, over all workers that logged it: the mean, the smallest and the largest value.

    A value that is not finite makes the mean not finite, too; it is left out of the smallest and largest.
    """

    step: int
    at: float
    mean: float
    low: float
    high: float


def summarized(ranks: Mapping[int, Sequence[LoggedPoint]]) -> list[CurveSummary]:
    """Combine the workers' points of one curve, step by step."""
    by_step: dict[int, list[LoggedPoint]] = {}
    for points in ranks.values():
        for point in points:
            by_step.setdefault(point.step, []).append(point)
    found = []
    for step, points in sorted(by_step.items()):
        values = [point.value for point in points]
        finite = [value for value in values if math.isfinite(value)]
        mean = math.fsum(values) / len(values) if len(finite) == len(values) else sum(values)
        low, high = min(finite, default=math.nan), max(finite, default=math.nan)
        found.append(CurveSummary(step, max(point.at for point in points), mean, low, high))
    return found
