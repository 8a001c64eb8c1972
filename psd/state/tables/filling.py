"""Fills a shard's tables before it serves anybody: with the rows of a checkpoint, or with values alone.

Must not know where rows come from, rounds or workers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import OutOfSpace
from psd.state.tables.partition import PartitionState
from psd.state.tables.slots import WholeRows
from psd_core.arena import StoreFull

logger = logging.getLogger(__name__)

ROWS_AT_ONCE = 4096


def fill(
    partition: PartitionState,
    batches: Iterable[WholeRows],
    count: int,
    *,
    step: int = 0,
    clock: int,
    history: NDArray[np.float64] | None = None,
) -> None:
    """Fill an empty table. If not all rows find room, the table's policy says which ones stay; the number lost is logged.

    Args:
        count: approximate number of rows to come; the index is made for that many at once.
        step, clock, history: the table's; see psd_core.table.TableStore.write. Rows that were used after `clock`, because they
            were pulled while their checkpoint was stored, count as used at `clock`, so that it is the same on all shards.

    Raises:
        OutOfSpace: the machine has no room for them.
    """
    store, name = partition.store, partition.spec.name
    at_once = min(ROWS_AT_ONCE, store.spec.push_max)
    try:
        store.reserve(count)
        none = np.empty(0, np.uint64), np.empty((0, store.spec.layout.width), np.float32)
        store.write(*none, clock=clock, step=step, history=history)
        written = 0
        for ids, used, rows in batches:
            written += len(ids)
            for first in range(0, len(ids), at_once):
                part = slice(first, first + at_once)
                marks = used[part] if partition.time is not None else np.minimum(used[part], np.uint64(clock))
                store.write(ids[part], rows[part], clock=marks)
    except StoreFull as error:
        raise OutOfSpace(f"table {name!r}: no room for its rows: {error.strerror}") from error
    lost = written - store.counters()["rows"]
    if lost > 0:
        limits = "max_rows, --max-table-rows and --max-table-bytes"
        logger.warning("table %r: %d of %d rows have found no room on this shard; %s limit it", name, lost, written, limits)
