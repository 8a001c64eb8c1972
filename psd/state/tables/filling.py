"""Fills a shard's tables with rows from elsewhere: those of a checkpoint, or values alone, before anybody is served.

Must not know where rows come from, rounds or workers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import OutOfSpace
from psd.state.tables.block import Partition
from psd_core.arena import ArenaFull
from psd_core.table import TableStore

logger = logging.getLogger(__name__)

ROWS_AT_ONCE = 4096

WholeRows: TypeAlias = "tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.float32]]"
"""Ids, clocks of the last use, and rows: value and slots."""


def fill(
    partition: Partition,
    batches: Iterable[WholeRows],
    count: int,
    *,
    step: int = 0,
    history: NDArray[np.float64] | None = None,
) -> None:
    """Fill an empty table. Where there is no room for all rows, those stay that its policy says; the log has how many do not.

    Args:
        count: of the rows to come, about; so much of the index is made at once.
        step, history: of the table; see psd_core.table.TableStore.write.

    Raises:
        OutOfSpace: the machine has no room for them.
    """
    store, name = partition.store, partition.spec.name
    at_once = min(ROWS_AT_ONCE, store.spec.push_max)
    try:
        store.reserve(count)
        store.write(np.empty(0, np.uint64), np.empty((0, store.spec.layout.width), np.float32), step=step, history=history)
        written = 0
        for ids, used, rows in batches:
            written += len(ids)
            for first in range(0, len(ids), at_once):
                part = slice(first, first + at_once)
                store.write(ids[part], rows[part], clock=used[part])
    except ArenaFull as error:
        raise OutOfSpace(f"table {name!r}: no room for its rows: {error.strerror}") from error
    lost = written - store.counters()["rows"]
    if lost > 0:
        limits = "max_rows, --max-table-rows and --max-table-bytes"
        logger.warning("table %r: %d of %d rows have found no room on this shard; %s limit it", name, lost, written, limits)


def as_trained_by_nobody(store: TableStore, ids: NDArray[np.uint64], values: NDArray[np.float32], used: int) -> WholeRows:
    """Rows of these values, with slots as they begin. used: clock of their last use."""
    layout = store.spec.layout
    rows = np.zeros((len(ids), layout.width), np.float32)
    rows[:, : store.spec.dim] = values
    kept = [(at, start) for at, start in zip(layout.slots, layout.starts, strict=True) if at >= 0]
    ends = [*(at for at, _ in kept[1:]), layout.width - store.spec.catches_up]
    for (at, start), end in zip(kept, ends, strict=False):
        rows[:, at:end] = start
    return ids, np.full(len(ids), used, np.uint32), rows
