"""Shards, workers and tables as rows of words. The catalogue (psd/contract/facts.py) defines the columns of numbers; this
module the orders for sorting, and which columns are left out if space is short.

Pure functions on snapshots. Must not know terminals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from psd.contract import facts
from psd.contract.fact import Fact
from psd.watch.snapshot import Numbers, ReaderSnapshot, ShardSnapshot, TableTotals, WorkerSnapshot
from psd.watch.words import GAP, aligned, duration, rate, size

T = TypeVar("T")


@dataclass(frozen=True)
class Column(Generic[T]):
    """One column.

    Attributes:
        text: returns the text of a cell.
        weight: columns with the least weight are left out first.
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
    """Rows for the items, with as many columns as fit into `width`; the first column is always there."""
    cells = {column.title: [column.text(item) for item in items] for column in columns}
    widths = {title: max([len(title), *map(len, texts)]) for title, texts in cells.items()}
    kept = list(columns)
    while len(kept) > 1 and sum(widths[column.title] + GAP for column in kept) - GAP > width:
        kept.remove(min(kept[1:], key=lambda column: column.weight))
    rows = tuple(zip(*(cells[column.title] for column in kept), strict=True))
    return Grid(tuple(c.title for c in kept), tuple(c.is_left for c in kept), rows)


def seconds(value: float) -> str:
    """A short time, in suitable units."""
    if value == 0:
        return "-"
    return f"{value * 1e3:.1f} ms" if value < 0.1 else f"{value * 1e3:.0f} ms" if value < 1 else duration(value)


_BY_UNIT: dict[str, Callable[[float], str]] = {
    "count": "{:.0f}".format,
    "bytes": size,
    "s": seconds,
    "share": "{:.0%}".format,
    "per_s": rate,
    "bytes_per_s": size,
}

_BY_NAME: dict[str, Callable[[Any], str]] = {
    "last_seen_s": lambda worker: "never" if worker.last_seen_s < 0 else f"{duration(worker.last_seen_s)} ago",
    "version_max": lambda shard: "..".join(f"{version}" for version in sorted({shard.version_min, shard.version_max})),
}
"""Numbers that are shown differently from others of their unit."""


def of_fact(fact: Fact) -> Column[Any]:
    """The column of a number; "-" where it is not known."""

    def text(item: Numbers) -> str:
        value = item.numbers.get(fact.name)
        if value is None:
            return "-"
        return _BY_NAME[fact.name](item) if fact.name in _BY_NAME else _BY_UNIT[fact.unit](value)

    return Column(fact.title.upper(), text, fact.weight)


def _live_columns(rows: Sequence[Fact]) -> list[Column[Any]]:
    """The columns of psdctl top, those with the greatest weight first."""
    return [of_fact(fact) for fact in sorted(rows, key=lambda fact: -fact.weight) if fact.weight]


_SHARD: Column[ShardSnapshot] = Column("SHARD", lambda shard: f"{shard.index}", 100)
_STATE: Column[ShardSnapshot] = Column(
    "STATE", lambda shard: ", ".join(filter(None, (shard.state, shard.detail))), 95, is_left=True
)
_ADDRESS: Column[ShardSnapshot] = Column("ADDRESS", lambda shard: shard.address, 45, is_left=True)
_CHECKPOINTS: tuple[Column[ShardSnapshot], ...] = (
    Column("CHECKPOINTS IN", lambda shard: shard.checkpoint_dir, 100, is_left=True),
    Column("LAST", lambda shard: shard.checkpoint_last or "none yet", 100, is_left=True),
)

SHARD_COLUMNS: tuple[Column[ShardSnapshot], ...] = (_SHARD, _STATE, *_live_columns(facts.SHARD), _ADDRESS)

_RANK: Column[WorkerSnapshot] = Column("RANK", lambda worker: f"{worker.rank}", 100)
_WORKER_STATE: Column[WorkerSnapshot] = Column("STATE", lambda worker: worker.state, 95, is_left=True)
_PROCESS: Column[WorkerSnapshot] = Column(
    "PROCESS", lambda worker: f"{worker.host}:{worker.pid}" if worker.pid else "-", 60, is_left=True
)

WORKER_COLUMNS: tuple[Column[WorkerSnapshot], ...] = (
    _RANK,
    _WORKER_STATE,
    *_live_columns([fact for fact in facts.WORKER if fact.table != "learners"]),
    _PROCESS,
    Column("TRANSPORT", lambda worker: worker.transport.partition(" ")[0].rstrip(",:;") or "-", 50, is_left=True),
)

TABLE_COLUMNS: tuple[Column[TableTotals], ...] = (
    Column("TABLE", lambda table: table.name, 100, is_left=True),
    *map(of_fact, facts.TABLE),
)


READER_COLUMNS: tuple[Column[ReaderSnapshot], ...] = (
    Column("READER", lambda reader: reader.name, 100, is_left=True),
    Column("STATE", lambda reader: reader.state, 95, is_left=True),
    *_live_columns(facts.READER),
    Column("TRANSPORT", lambda reader: reader.transport or "-", 50, is_left=True),
)


def status_worker_columns(workers: Sequence[WorkerSnapshot]) -> list[Column[WorkerSnapshot]]:
    """The columns of psdctl status for these workers; how far transfers are only if one of them makes a long one."""
    is_long = any(worker.numbers.get("transfer_left_bytes") for worker in workers)
    shown = [fact for fact in facts.WORKER if fact.table == "workers" and (is_long or not fact.name.startswith("transfer_"))]
    transport: Column[WorkerSnapshot] = Column("TRANSPORT", lambda worker: worker.transport or "-", 50, is_left=True)
    return [_RANK, _WORKER_STATE, *map(of_fact, shown), _PROCESS, transport]


_LEARNER_FACTS = [fact for fact in facts.WORKER if fact.table == "learners"]

LEARNER_COLUMNS: tuple[Column[WorkerSnapshot], ...] = (_RANK, _WORKER_STATE, *map(of_fact, _LEARNER_FACTS))


def learners_of(workers: Sequence[WorkerSnapshot]) -> list[WorkerSnapshot]:
    """Those of the workers that are learners."""
    return [worker for worker in workers if "local_steps" in worker.numbers]


def worker_columns(workers: Sequence[WorkerSnapshot]) -> Sequence[Column[WorkerSnapshot]]:
    """The columns of psdctl top for these workers: with those of learners, if some are."""
    return (*WORKER_COLUMNS, *_live_columns(_LEARNER_FACTS)) if learners_of(workers) else WORKER_COLUMNS


def status_columns(table: str) -> tuple[Column[ShardSnapshot], ...]:
    """The columns of a table of psdctl status, which has a row for each shard."""
    words = {"shards": (_STATE, _ADDRESS), "checkpoints": _CHECKPOINTS}.get(table, ())
    return (_SHARD, *words, *(of_fact(fact) for fact in facts.SHARD if fact.table == table))


_WORST_FIRST = ("failed", "expired", "absent", "live", "finished")

SORTS: dict[str, Callable[[WorkerSnapshot], Any]] = {
    "rank": lambda worker: worker.rank,
    "state": lambda worker: _WORST_FIRST.index(worker.state) if worker.state in _WORST_FIRST else len(_WORST_FIRST),
    "clock": lambda worker: worker.clock,
    "steps/s": lambda worker: worker.steps_per_s,
    "awaited": lambda worker: -worker.awaited_share,
    "last-seen": lambda worker: -worker.last_seen_s,
}
"""Orders of the workers, in each of which those that need attention come first."""


def sorted_workers(workers: Sequence[WorkerSnapshot], by: str, *, is_reversed: bool = False) -> list[WorkerSnapshot]:
    """The workers in this order; equal ones by rank."""
    return sorted(workers, key=lambda worker: (SORTS[by](worker), worker.rank), reverse=is_reversed)
