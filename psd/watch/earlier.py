"""Earlier runs of a log directory, from the files of its workers' scalars, to be drawn behind the present one.

The next run with the same directory continues its files, so a file may have several runs; each line names its own. Files are
looked through once, and later what has been added to them. The curves of a run are read when somebody wants to see them, and
then kept. A curve is the mean of the run's workers, in a bounded number of points. Must not know browsers or shards.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from psd.contract.printable import printable
from psd.contract.scalars import LOG_SUFFIX, LoggedScalars

FILES_MAX = 1024
RUNS_MAX = 64
"""Largest number of runs that are named, the latest."""
CURVES_MAX = 256
POINTS_MAX = 1000
"""Largest number of points of a curve; if there are more, means of neighbours take their place."""
READ_BYTES_MAX = 1 << 28
"""Largest number of bytes that are looked through in one file, the last ones, and that are read for the curves of one run."""
LINE_BYTES_MAX = 1 << 16
"""A longer line is none of a worker's."""
KEPT_MAX = 8
"""Largest number of runs whose curves are kept."""

_NAME = re.compile(rb'"run": ?("(?:[^"\\]|\\.)*")')
_TIME = re.compile(rb'"time": ?([0-9.e+]+)')


@dataclass
class EarlierRun:
    """A run of which there are scalars.

    Attributes:
        name: what it is called: its name, behind that of a folder in the log directory. run: its name alone.
        begun_at: time of its first line, in seconds since 1970.
        parts: by file, where its lines begin and end.
    """

    name: str
    run: str
    begun_at: float
    parts: dict[Path, tuple[int, int]]


class Bins:
    """A curve as means over ranges of steps, all of one width, which doubles when there are too many."""

    def __init__(self) -> None:
        self.width = 1
        self._sums: dict[int, tuple[float, int]] = {}
        self._last = -1

    def add(self, step: int, value: float) -> None:
        """Add a value. If the worker has gone back, because the step is not beyond the last one, drop what it had logged from
        there on."""
        if step <= self._last:
            self._sums = {place: found for place, found in self._sums.items() if place < step // self.width}
        self._last = step
        self._put(step // self.width, value)

    def add_curve(self, other: Bins) -> None:
        """Add the curve of one worker to a sum over workers. The other one may change."""
        while self.width < other.width:
            self._widen()
        while other.width < self.width:
            other._widen()
        for place, (total, count) in other._sums.items():
            self._put(place * other.width // self.width, total / count)

    def points(self) -> list[tuple[float, float]]:
        """The middle of each range of steps, and the mean over it; in the order of steps."""
        middle = (self.width - 1) / 2
        return [(place * self.width + middle, total / count) for place, (total, count) in sorted(self._sums.items())]

    def _put(self, place: int, value: float) -> None:
        if not math.isfinite(value):
            return
        total, count = self._sums.get(place, (0.0, 0))
        self._sums[place] = total + value, count + 1
        while len(self._sums) > POINTS_MAX:
            self._widen()

    def _widen(self) -> None:
        sums, self._sums = self._sums, {}
        self.width *= 2
        for place, (total, count) in sums.items():
            before, number = self._sums.get(place // 2, (0.0, 0))
            self._sums[place // 2] = before + total, number + count


class EarlierRuns:
    """The runs of a log directory. Not thread-safe.

    Args:
        directory: the log directory; it need not exist yet. Runs in its folders are found, too.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen: dict[Path, int] = {}  # by file: up to where it was looked through
        self._runs: dict[str, EarlierRun] = {}
        self._kept: dict[str, tuple[int, str]] = {}  # by name: where its lines ended, and its curves

    def runs(self, present: str) -> list[EarlierRun]:
        """The runs but the present one, the latest first. present: its name."""
        files = [*self._directory.glob(f"*{LOG_SUFFIX}"), *self._directory.glob(f"*/*{LOG_SUFFIX}")]
        for file in sorted(files)[:FILES_MAX]:
            try:
                self._look_through(file)
            except OSError:
                continue
        latest = sorted(self._runs.values(), key=lambda run: -run.begun_at)
        self._runs = {run.name: run for run in latest[: RUNS_MAX + 1]}
        return [run for run in self._runs.values() if run.run != present][:RUNS_MAX]

    def curves(self, name: str, present: str) -> str | None:
        """The curves of a run as JSON: under "curves", by name a list of [step, mean]. None if there is no such run, or it is
        the present one."""
        run = self._runs.get(name)
        if run is None or run.run == present:
            return None
        end = sum(end for _, end in run.parts.values())
        known, text = self._kept.pop(name, (-1, ""))
        self._kept[name] = (end, text if known == end else _read(run))
        while len(self._kept) > KEPT_MAX:
            del self._kept[next(iter(self._kept))]
        return self._kept[name][1]

    def _look_through(self, file: Path) -> None:
        size = file.stat().st_size
        begin = self._seen.get(file, max(0, size - READ_BYTES_MAX))
        if size < begin:  # it was made anew
            begin = 0
        if size == begin:
            return
        folder = "" if file.parent == self._directory else f"{file.parent.name}/"
        for at, line in _lines(file, begin, size):
            self._seen[file] = at + len(line)
            said, time = _NAME.search(line), _TIME.search(line)
            try:
                run = str(json.loads(said[1])) if said is not None else ""
                begun_at = float(time[1]) if time is not None else math.nan
            except ValueError:
                continue
            if not math.isfinite(begun_at):
                continue
            name = printable(f"{folder}{run or 'unnamed'}"[:256])
            found = self._runs.setdefault(name, EarlierRun(name, run, begun_at, {}))
            found.begun_at = min(found.begun_at, begun_at)
            found.parts[file] = found.parts.get(file, (at, 0))[0], at + len(line)


def _lines(file: Path, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """The whole lines of a part of a file, with their places. A line that is still being written is left for the next time."""
    with file.open("rb") as lines:
        lines.seek(begin)
        at = begin
        while at < end and (line := lines.readline(LINE_BYTES_MAX)):
            if not line.endswith(b"\n") and len(line) < LINE_BYTES_MAX:
                return
            yield at, line
            at += len(line)


def _read(run: EarlierRun) -> str:
    """The curves of a run as JSON, to be sent as it is."""
    sums: dict[str, Bins] = {}
    left = READ_BYTES_MAX
    for file, (begin, end) in sorted(run.parts.items()):
        end = min(end, begin + left)
        left -= end - begin
        try:
            own = _curves_of(file, begin, end, run.run)
        except OSError:
            continue
        for name, curve in own.items():
            if name in sums or len(sums) < CURVES_MAX:
                sums.setdefault(name, Bins()).add_curve(curve)
    return json.dumps({"curves": {name: curve.points() for name, curve in sums.items()}}, separators=(",", ":"))


def _curves_of(file: Path, begin: int, end: int, run: str) -> dict[str, Bins]:
    """The curves of one worker."""
    found: dict[str, Bins] = {}
    for _, line in _lines(file, begin, end):
        try:
            logged = LoggedScalars.read(line)
        except ValueError:
            continue
        if logged.run != run:
            continue
        for name, value in logged.scalars.items():
            known = printable(name[:256])
            if known in found or len(found) < CURVES_MAX:
                found.setdefault(known, Bins()).add(logged.step, value)
    return found
