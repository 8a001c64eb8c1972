"""What the benchmarks share in showing their figures: a table for people, JSON for programs, and how times are taken."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any


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


def in_turns(works: dict[str, Callable[[], object]], *, rounds: int) -> dict[str, float]:
    """The shortest times of several works, of this thread on a processor, in turns: so that ratios hold on a busy machine."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(rounds):
        for name, work in works.items():
            begun = time.thread_time()
            work()
            times[name].append(time.thread_time() - begun)
    return {name: min(found) for name, found in times.items()}
