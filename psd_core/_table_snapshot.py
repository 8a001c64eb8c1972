"""A snapshot of a table's partition: the rows of one moment, while training goes on, and what went since the one before.

Must not know of files or checkpoints: who writes these takes batches from here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psd_core import _table

HEAD = np.dtype([("id", "u8"), ("used", "u8"), ("changed", "u8"), ("check", "u8")])
"""Heads of rows: id, clock of the last use, version of the table that the row came with, checksum of the row in the file."""

BATCH_ROWS = 4096


class Rows(NamedTuple):
    """Rows as they are stored. `heads`: (n,) HEAD; `rows`: (n, width) float32, value and slots."""

    heads: NDArray[Any]
    rows: NDArray[np.float32]


class Mark(NamedTuple):
    """A moment in the life of a partition: its version, how many rows had been removed, and the clock of its last push."""

    version: int
    removals: int
    clock: int


class TableSnapshot:
    """The rows of one moment. An iterator of batches, once; a context manager, which ends it.

    Rows that are replaced before they were copied are saved in ordinary memory meanwhile.

    Attributes:
        mark: the moment, for the `since` of a later snapshot. step, clock: of the table then. notes: the caller's, then.
        history: where rows catch up, (m, 1 + scalars) float64: steps from which others held, and these scalars; for `write`.
        since: as it was given. count: of all rows that there were then. width: numbers of a row.
        removed: ids of rows that were removed since `since`; those that have come back are among the rows, too. Empty if full.
        is_full: it has all rows, not only those that came, or were used, after `since`.
    """

    def __init__(
        self, partition: _table.Partition, writing: threading.Lock, width: int, notes: int, scalars: int, since: Mark | None
    ) -> None:
        """Begin; not for callers. `writing` is held by the caller."""
        first, removals = partition.removals()
        self.is_full = since is None or since.removals < first
        self.removed = np.empty(0 if self.is_full or since is None else removals - since.removals, np.uint64)
        if len(self.removed):
            partition.removed(removals - len(self.removed), self.removed)
        self.notes = np.empty(notes, np.uint64)
        partition.notes(self.notes)
        self.history = np.empty((partition.logged, 1 + scalars), np.float64)
        partition.history(self.history)
        self.step = partition.step
        self.since = since
        counters = partition.counters()
        self.count, self.clock = counters["rows"], counters["clock"]
        version = partition.begin_snapshot(self.is_full, since.version if since else 0, since.clock if since else 0)
        self.mark = Mark(version, removals, self.clock)
        self._partition: _table.Partition | None = partition
        self._writing = writing
        self.width = width

    def __iter__(self) -> Iterator[Rows]:
        more = True
        while more and self._partition is not None:
            heads, rows = np.empty(BATCH_ROWS, HEAD), np.empty((BATCH_ROWS, self.width), np.float32)
            count, more = self._partition.next_of_snapshot(heads, rows)
            if count:
                yield Rows(heads[:count], rows[:count])

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._partition is None

    def close(self) -> None:
        """End the snapshot. Idempotent."""
        with self._writing:
            if self._partition is not None:
                self._partition.end_snapshot()
                self._partition = None

    def __enter__(self) -> TableSnapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
