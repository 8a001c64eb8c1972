"""Shards and workers as rows of words: which columns there are, what one sorts by, and what is left out where it is narrow.

Pure functions on snapshots. Must not know terminals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from psd.watch.snapshot import ShardSnapshot, WorkerSnapshot
from psd.watch.words import GAP, aligned, duration, size

T = TypeVar("T")


@dataclass(frozen=True)
class Column(Generic[T]):
    """One column.

    Attributes:
        text: of a cell.
        weight: columns of the least weight are left out first.
    """

    title: str
    text: Callable[[T], str]
    weight: int
    is_left: bool = False


@dataclass(frozen=True)
class Grid:
    """The columns that fit, and the rows in them."""

    titles: tuple[str, ...]
    is_left: tuple[bool, ...]
    rows: tuple[tuple[str, ...], ...]

    def lines(self) -> list[str]:
        """The grid as aligned lines, headings first."""
        return aligned([self.titles, *self.rows], self.is_left)


def grid(columns: Sequence[Column[T]], items: Sequence[T], width: int) -> Grid:
    """Rows for the items, with as many columns as fit into `width`, but always the first."""
    cells = {column.title: [column.text(item) for item in items] for column in columns}
    widths = {title: max([len(title), *map(len, texts)]) for title, texts in cells.items()}
    kept = list(columns)
    while len(kept) > 1 and sum(widths[column.title] + GAP for column in kept) - GAP > width:
        kept.remove(min(kept[1:], key=lambda column: column.weight))
    rows = tuple(zip(*(cells[column.title] for column in kept), strict=True))
    return Grid(tuple(c.title for c in kept), tuple(c.is_left for c in kept), rows)


def rate(per_s: float) -> str:
    """A number a second, with as many digits as tell something."""
    return "-" if per_s == 0 else f"{per_s:.0f}" if per_s >= 100 else f"{per_s:.1f}" if per_s >= 1 else f"{per_s:.2g}"


def seconds(value: float) -> str:
    """A short time."""
    if value == 0:
        return "-"
    return f"{value * 1e3:.1f} ms" if value < 0.1 else f"{value * 1e3:.0f} ms" if value < 1 else duration(value)


SHARD_COLUMNS: tuple[Column[ShardSnapshot], ...] = (
    Column("SHARD", lambda shard: f"{shard.index}", 100),
    Column("STATE", lambda shard: f"{shard.state}, {shard.detail}" if shard.detail else shard.state, 95, is_left=True),
    Column("ROUNDS/S", lambda shard: rate(shard.rounds_per_s), 90),
    Column("LATENCY", lambda shard: seconds(shard.latency_s), 85),
    Column("CPU", lambda shard: f"{shard.cpu_share:.0%}", 80),
    Column("MEMORY", lambda shard: size(shard.memory_bytes), 75),
    Column("IN/S", lambda shard: size(shard.received_per_s), 70),
    Column("OUT/S", lambda shard: size(shard.sent_per_s), 65),
    Column("PARAMETERS", lambda shard: size(shard.parameter_bytes), 60),
    Column("SLOTS", lambda shard: size(shard.slot_bytes), 35),
    Column("TENSORS", lambda shard: f"{shard.tensors}", 30),
    Column("TABLES", lambda shard: f"{shard.tables}", 25),
    Column("ROUND", lambda shard: f"{shard.rounds}", 50),
    Column("REFUSED", lambda shard: f"{shard.requests_refused}", 20),
    Column("UP", lambda shard: duration(shard.uptime_s), 40),
    Column("ADDRESS", lambda shard: shard.address, 45, is_left=True),
)

WORKER_COLUMNS: tuple[Column[WorkerSnapshot], ...] = (
    Column("RANK", lambda worker: f"{worker.rank}", 100),
    Column("STATE", lambda worker: worker.state, 95, is_left=True),
    Column("STEP", lambda worker: f"{worker.clock}", 90),
    Column("STEPS/S", lambda worker: rate(worker.steps_per_s), 85),
    Column("AGE", lambda worker: f"{worker.behind}", 70),
    Column("WAITED FOR", lambda worker: f"{worker.awaited_share:.0%}", 80),
    Column("SEEN", lambda worker: "never" if worker.last_seen_s < 0 else duration(worker.last_seen_s), 75),
    Column("HOST", lambda worker: f"{worker.host}:{worker.pid}" if worker.pid else "-", 60, is_left=True),
    Column("LANE", lambda worker: worker.lane.partition(" ")[0].rstrip(",:;") or "-", 50, is_left=True),
)

_WORST_FIRST = ("failed", "expired", "absent", "live", "finished")

SORTS: dict[str, Callable[[WorkerSnapshot], Any]] = {
    "rank": lambda worker: worker.rank,
    "state": lambda worker: _WORST_FIRST.index(worker.state) if worker.state in _WORST_FIRST else len(_WORST_FIRST),
    "step": lambda worker: worker.clock,
    "steps/s": lambda worker: worker.steps_per_s,
    "waited-for": lambda worker: -worker.awaited_share,
    "seen": lambda worker: -worker.last_seen_s,
}
"""Orders of the workers: those that need attention come first."""


def sorted_workers(workers: Sequence[WorkerSnapshot], by: str, *, is_reversed: bool = False) -> list[WorkerSnapshot]:
    """The workers in that order; alike ones by their ranks."""
    return sorted(workers, key=lambda worker: (SORTS[by](worker), worker.rank), reverse=is_reversed)
