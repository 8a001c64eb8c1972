"""Slots of rows as they begin: of rows that come as values alone, and of all rows of a shard's table anew.

The latter takes many transactions, each of which may be made again: who asked for it asks again if it fails. Must not know who.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import OutOfSpace
from psd_core.arena import StoreFull
from psd_core.table import TableStore

WholeRows: TypeAlias = "tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.float32]]"
"""Ids, clocks of the last use, and rows: value and slots."""


def as_trained_by_nobody(store: TableStore, ids: NDArray[np.uint64], values: NDArray[np.float32], used: int) -> WholeRows:
    """Rows of these values, with slots as they begin. used: clock of their last use."""
    layout = store.spec.layout
    rows = np.zeros((len(ids), layout.width), np.float32)
    rows[:, : store.spec.dim] = values
    kept = [(at, start) for at, start in zip(layout.slots, layout.starts, strict=True) if at >= 0]
    ends = [*(at for at, _ in kept[1:]), layout.width - 2 * store.spec.catches_up]
    for (at, start), end in zip(kept, ends, strict=False):
        rows[:, at:end] = start
    return ids, np.full(len(ids), used, np.uint64), rows


def reset_slots(name: str, store: TableStore) -> None:
    """Let them begin anew. Values stay, as they are when they have caught up. Nobody may push meanwhile.

    Raises:
        OutOfSpace: some rows have begun anew; it is to be called again.
    """
    try:
        _begin_rows(store)
        rows = np.empty((0, store.spec.layout.width), np.float32)
        no_history = np.empty((0, 1 + len(store.spec.facts.scalars)), np.float64)
        store.write(np.empty(0, np.uint64), rows, step=0, history=no_history)
        if store.spec.catches_up:  # the rows still say that they are at the step of before
            _begin_rows(store)
    except StoreFull as error:
        raise OutOfSpace(f"table {name!r}: no room for its rows while slots begin anew: {error.strerror}") from error


def _begin_rows(store: TableStore) -> None:
    """Write all rows anew, as they are at the table's step, with slots as they begin."""
    step = np.array([store.counters()["step"]], np.uint64).view(np.float32)
    portion = store.spec.push_max
    for found in store.walk():
        for begin in range(0, len(found.heads), portion):
            heads = found.heads[begin : begin + portion]
            ids, used = np.ascontiguousarray(heads["id"]), np.ascontiguousarray(heads["used"])
            rows, is_there = store.read_rows(ids)
            ids, _, begun = as_trained_by_nobody(store, ids, rows[:, : store.spec.dim], 0)
            if store.spec.catches_up:
                begun[:, -2:] = step
            store.write(ids[is_there], begun[is_there], clock=used[is_there])
