"""What the benchmarks share in showing their figures: a table for people, JSON for programs, and a reference for memory."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def parser(description: str | None) -> argparse.ArgumentParser:
    """A command line that has --json."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="for programs")
    return made


def show(result: Any, text: Callable[[], str], *, as_json: bool) -> None:
    """Print a result, in the form that was asked for."""
    print(json.dumps(result, indent=2) if as_json else text())


def table(headings: Sequence[str], rows: Sequence[Sequence[object]], *, words: int = 1) -> str:
    """Aligned columns; the first `words` of them are words, the others numbers."""
    cells = [[str(cell) for cell in row] for row in [headings, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index < words else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def seconds_of(work: Callable[[], object], *, rounds: int) -> float:
    """The median time of `work`, after one call that is not counted."""
    work()
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def in_turns(works: dict[str, Callable[[], object]], *, rounds: int) -> dict[str, float]:
    """Median times of several works that are run in turns, so that what else the machine does meets all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(rounds):
        for name, work in works.items():
            begun = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - begun)
    return {name: statistics.median(found) for name, found in times.items()}


def copier(nbytes: int) -> Callable[[], None]:
    """A copy of as many bytes from one array to another: it moves twice of them."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    return lambda: np.copyto(target, source)
