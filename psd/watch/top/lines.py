"""Lines above and below the tables of psdctl top: the headline, sparklines, who waits for whom, events; and everything as text.

Pure functions on snapshots and the history. Must not know terminals.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from statistics import fmean
from textwrap import wrap

from psd.watch.diagnosis import SLOW_SHARE, lag_order
from psd.watch.history import History, Moment
from psd.watch.snapshot import WAIT_S, CurvePoint, Event, JobSnapshot
from psd.watch.top.columns import READER_COLUMNS, SHARD_COLUMNS, WORKER_COLUMNS, grid, seconds, sorted_workers
from psd.watch.words import count_text, progress_text, rate, size

SPARKS = "▁▂▃▄▅▆▇█"
CURVES_MAX = 3
WAITS_MAX = 3
EVENTS_MAX = 6
SPARK_MIN = 8
READERS_MAX = 8


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as bars, scaled from the smallest to the largest of them. One that is not finite is a blank."""
    shown = values[-width:]
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    top = len(SPARKS) - 1
    return "".join(
        " " if not math.isfinite(value) else SPARKS[round((value - low) / (high - low) * top) if high > low else 0]
        for value in shown
    )


def bar(share: float, width: int) -> str:
    """A bar of `width` places, of which this share is full."""
    full = int(min(1.0, share) * width)
    return "━" * full + "─" * (width - full)


def head_lines(now: JobSnapshot, width: int) -> list[str]:
    """Headline: whether the job trains, how fast, and what limits it."""
    kind = " ".join(word for word in (now.consistency, now.reduction, now.aggregation, now.compression) if word)
    what = f"{count_text(len(now.shards), 'shard')}, {count_text(now.world_size, 'worker')}"
    speed = f"{rate(now.steps_per_s)} steps/s"
    samples = f"{rate(now.samples_per_s)} samples/s" if now.samples_per_s else ""
    lines = [" · ".join(word for word in (now.headline, speed, samples, now.run_id or "-", kind, what) if word)]
    if now.total_steps:
        text = progress_text(now.clock, now.total_steps, now.numbers.get("time_left_s"))
        lines.append(f"{bar(now.clock / now.total_steps, max(4, min(40, width - len(text) - 1)))} {text}")
    if now.limit:
        lines.append(f"limit: {now.limit}")
    lines += [f"order: {order}" for order in now.orders]
    problems = [wrap(f"problem: {problem}", max(20, width), subsequent_indent="  ") for problem in now.problems]
    return [*(_cut(line, width) for line in lines), *itertools.chain(*problems)]  # of a problem the end says what to do


def spark_lines(moments: Sequence[Moment], width: int) -> list[str]:
    """Throughput and latency over the last snapshots, with their current values."""
    if not moments:  # the first look has no rates yet
        return _in_two_columns([(name, "-", []) for name in ("steps/s", "latency", "received", "sent")], width)
    last = moments[-1]
    latencies = [max(moment.shard_latency_s, default=0.0) for moment in moments]
    entries = [
        ("steps/s", rate(last.steps_per_s), [moment.steps_per_s for moment in moments]),
        ("latency", seconds(latencies[-1]), latencies),
        ("received", f"{size(last.received_bytes_per_s)}/s", [moment.received_bytes_per_s for moment in moments]),
        ("sent", f"{size(last.sent_bytes_per_s)}/s", [moment.sent_bytes_per_s for moment in moments]),
    ]
    return _in_two_columns(entries, width)


def curve_lines(curves: dict[str, Sequence[CurvePoint]], width: int) -> list[str]:
    """The scalars that workers log, losses first: the mean of the workers' last values, from which to which they go, and the
    course of the mean."""
    names = sorted(curves, key=lambda name: "loss" not in name.lower())
    return _in_two_columns([_curve(name, curves[name]) for name in names[:CURVES_MAX]], width)


def _curve(name: str, points: Sequence[CurvePoint]) -> tuple[str, str, Sequence[float]]:
    last = {point.rank: point.value for point in points}.values()
    low, high = min(last), max(last)
    text = f"{fmean(last):.4g}" if low == high or len(last) == 1 else f"{fmean(last):.4g} ({low:.3g} to {high:.3g})"
    steps: dict[int, list[float]] = {}
    for point in points:
        steps.setdefault(point.step, []).append(point.value)
    return name, text, [fmean(steps[step]) for step in sorted(steps)]


def _in_two_columns(entries: Sequence[tuple[str, str, Sequence[float]]], width: int) -> list[str]:
    half = max(20, (width - 2) // 2)
    cells = []
    for name, value, values in entries:
        label = _cut(name, max(4, half - len(value) - SPARK_MIN - 2))
        cells.append(f"{label} {value} {sparkline(values, max(4, half - len(label) - len(value) - 2))}"[:half])
    rows = [cells[index : index + 2] for index in range(0, len(cells), 2)]
    return [_cut("  ".join([row[0].ljust(half), *row[1:]]).rstrip(), width) for row in rows]


def wait_lines(now: JobSnapshot, width: int) -> list[str]:
    """Sentences that say who waits for whom; if there are too many, the number of the others."""
    lines = [_cut(wait, width) for wait in now.waiting[:WAITS_MAX]]
    if len(now.waiting) > WAITS_MAX:
        lines.append(f"and {len(now.waiting) - WAITS_MAX} more waits")
    if lines:
        return lines
    awaited = max(now.workers, key=lambda worker: worker.awaited_share, default=None)
    if awaited is None or awaited.awaited_share <= SLOW_SHARE:
        return ["nobody waits for long"]
    text = f"others wait for worker {awaited.rank} {awaited.awaited_share:.0%} of the time, at present nobody for {WAIT_S:g} s"
    return [_cut(text, width)]


def reader_lines(now: JobSnapshot, width: int, count: int = READERS_MAX) -> list[str]:
    """A table of the readers, if there are some, those that lag most first; then the number of the others, and what is wrong
    with those that need attention."""
    order = sorted(now.readers, key=lag_order)
    more = [f"and {len(order) - count} more readers"] if len(order) > count else []
    lagging = [_cut(text, width) for text in now.lagging[:WAITS_MAX]]
    if len(now.lagging) > WAITS_MAX:
        lagging.append(f"and {len(now.lagging) - WAITS_MAX} more that lag")
    return [*grid(READER_COLUMNS, order[:count], width).lines(), *more, *lagging] if order else []


def event_line(event: Event) -> str:
    """Time of an event, and what has happened."""
    return f"{time.strftime('%H:%M:%S', time.localtime(event.at))}  {event.text}"


def event_lines(events: Sequence[Event], width: int, count: int = EVENTS_MAX) -> list[str]:
    """The last events, the latest first."""
    return [_cut(event_line(event), width) for event in itertools.islice(reversed(events), count)]


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: max(0, width - 1)] + "…"


def as_text(now: JobSnapshot, history: History, sort: str, width: int) -> str:
    """Everything, once, for a file or a pipe."""
    parts = [
        [*head_lines(now, width), *spark_lines(history.moments, width), *curve_lines(history.curves, width)],
        grid(SHARD_COLUMNS, now.shards, width).lines(),
        grid(WORKER_COLUMNS, sorted_workers(now.workers, sort), width).lines() if now.workers else [],
        reader_lines(now, width),
        wait_lines(now, width),
        event_lines([*history.events], width),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)
