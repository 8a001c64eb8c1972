"""Output and timing of benchmarks: tables, criteria as ratios with limits, the machine, and the same as JSON."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Before anything loads gRPC, which reads it then: some benchmarks start processes while they have channels, and gRPC would
# close its descriptors in a forked child that is about to execute another program.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"


@dataclass(frozen=True)
class Criterion:
    """A ratio within one run, and its limit.

    Attributes:
        number: of the criterion among the project's. what: is compared with what.
        value: None if it could not be measured here. at_least: the limit is a lower one.
    """

    number: int
    what: str
    value: float | None
    limit: float
    at_least: bool = False

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        if self.value is None:
            return "not measured"
        return "met" if (self.value >= self.limit if self.at_least else self.value <= self.limit) else "not met"


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """The ratio of two figures, None if one was not measured."""
    return numerator / denominator if numerator is not None and denominator else None


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def median(values: Sequence[float]) -> float | None:
    """The median, None of no values."""
    return statistics.median(values) if values else None


def number(value: float | None, digits: int = 2) -> str:
    """A number for a cell; "-" for what was not measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, words: int = 1) -> str:
    """A table with columns of equal width, the first `words` to the left, the others to the right."""
    texts = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = []
    for row in (texts[0], ["-" * width for width in widths], *texts[1:]):
        sized = zip(row, widths, strict=True)
        cells = [cell.ljust(width) if i < words else cell.rjust(width) for i, (cell, width) in enumerate(sized)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def criteria_table(criteria: Sequence[Criterion]) -> str:
    """A table of ratios, limits and verdicts."""
    rows = [
        [f"{c.number}. {c.what}", number(c.value), f"{'>=' if c.at_least else '<='} {c.limit:g}", c.verdict] for c in criteria
    ]
    return table(["criterion", "ratio", "limit", ""], rows)


def machine() -> dict[str, Any]:
    """Facts about the machine on which the figures depend."""
    found = re.search(r"model name\s*:\s*(.+)", _text("/proc/cpuinfo"))
    memory = re.search(r"MemTotal:\s+(\d+) kB", _text("/proc/meminfo"))
    return {
        "cpu": found[1] if found else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(memory[1]) << 10 if memory else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("numpy", "grpcio", "protobuf", "torch")},
        "load_before": os.getloadavg()[0],
    }


def machine_line(facts: dict[str, Any]) -> str:
    """The facts about the machine on one line."""
    line = "{cpu}, {cores} cores, Linux {kernel}, Python {python}, grpcio {grpcio}".format(**facts)
    if facts["load_before"] > 0.5:
        line += f"\nThe load was {facts['load_before']:.1f} before the start: trust the ratios rather than the times."
    return line


def write_json(path: Path | None, results: dict[str, Any], criteria: Sequence[Criterion]) -> None:
    """Write results if a path is given; "-" is standard output."""
    if path is None:
        return
    text = json.dumps({**results, "criteria": [{**asdict(c), "verdict": c.verdict} for c in criteria]}, indent=2)
    if str(path) == "-":
        print(text)
    else:
        path.write_text(text + "\n")


def progress(text: str) -> None:
    """Print progress to standard error, for those who wait."""
    print(f"    {text}", file=sys.stderr, flush=True)


def words(text: str) -> list[str]:
    """Convert an argument of the type "a,b,c"."""
    return [word for word in text.split(",") if word]


def some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """The type of an argument "a,b,c" that names some of those that there are."""

    def named(text: str) -> list[str]:
        for word in (found := words(text)):
            if word not in known:
                raise argparse.ArgumentTypeError(f"there is no {word!r}; there are {', '.join(known)}")
        return found

    return named


def whole_numbers(text: str) -> list[int]:
    """Convert an argument of the type "1,2,4"."""
    try:
        numbers = [int(word) for word in words(text)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected whole numbers from 1, separated by commas, such as 1,2,4, got {text!r}")
    return numbers


# Options that several benchmarks have: type and meaning.
_SHARED: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "transports": (words, "of psd"),
    "transport": (str, "of psd"),
    "workers": (int, "of the job"),
    "shards": (int, "of the job"),
    "megabytes": (int, "of parameters"),
    "rows": (int, "of the table"),
    "dim": (int, "numbers of a row"),
    "ids": (int, "drawn for a step"),
    "minutes": (float, "in all"),
    "rounds": (int, "turns of each"),
    "seconds": (float, "of a turn, about"),
    "steps": (int, "timed ones of each in a turn"),
    "grown_mb": (float, "by which a process may grow"),
}


def parser(description: str | None, *, interpreters: bool = False, **defaults: object) -> argparse.ArgumentParser:
    """A parser whose help is the benchmark's first lines, with --json.

    Args:
        interpreters: whether references run in interpreters that can be named.
        defaults: shared options that the benchmark has. A text for a number means several numbers, such as "1,2".
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        type_, meaning = _SHARED[name]
        if type_ is int and isinstance(default, str):
            type_ = whole_numbers
        option = f"--{name.replace('_', '-')}"
        made.add_argument(option, type=type_, default=default, help=f"{meaning} (default: %(default)s)")
    if interpreters:
        made.add_argument("--ray-python", metavar="PATH", help="interpreter that has Ray")
        made.add_argument("--tensorflow-python", metavar="PATH", help="interpreter that has TensorFlow")
    made.add_argument("--json", type=Path, metavar="FILE", help='all figures, for programs; "-" for standard output')
    return made


def conclude(
    path: Path | None,
    figures: Mapping[str, Any],
    checked: Sequence[Criterion],
    left_out: Mapping[str, str],
    *,
    is_failed: bool,
) -> int:
    """Print the verdicts and what was left out, write the figures as JSON, and return the exit status."""
    if checked:
        print("\n" + criteria_table(checked))
    for name, why in left_out.items():
        print(f"\n{name} is left out: {why}")
    write_json(path, {**figures, "left_out": left_out}, checked)
    return 1 if is_failed else 0


def in_turns(works: dict[str, Callable[[], object]], *, rounds: int) -> dict[str, float]:
    """The shortest times of several functions, by processor time of this thread, in turns, so that ratios hold on a busy
    machine."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(rounds):
        for name, work in works.items():
            begun = time.thread_time()
            work()
            times[name].append(time.thread_time() - begun)
    return {name: min(found) for name, found in times.items()}


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
