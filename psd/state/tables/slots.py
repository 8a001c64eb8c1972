"""Initial slots of rows: for rows that come as values alone, and for all rows of a shard's table when slots begin anew.

The latter takes many transactions, each of which may be repeated: if one fails, the caller calls again. Must not know callers.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import OutOfSpace
from psd_core.arena import StoreFull
from psd_core.table import TableStore

WholeRows: TypeAlias = "tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.float32]]"
"""Ids, clocks of the last use, and rows, each with its values and its slots."""


def as_trained_by_nobody(store: TableStore, ids: NDArray[np.uint64], values: NDArray[np.float32], used: int) -> WholeRows:
    """Rows with these values and initial slots. used: clock of their last use."""
    layout = store.spec.layout
    rows = np.zeros((len(ids), layout.width), np.float32)
    rows[:, : store.spec.dim] = values
    kept = [(at, start) for at, start in zip(layout.slots, layout.starts, strict=True) if at >= 0]
    ends = [*(at for at, _ in kept[1:]), layout.width - 2 * store.spec.catches_up]
    for (at, start), end in zip(kept, ends, strict=False):
        rows[:, at:end] = start
    return ids, np.full(len(ids), used, np.uint64), rows


def reset_slots(name: str, store: TableStore) -> None:
    """Let the slots of all rows begin anew. Values stay, except that rows which lag catch up first. Nobody may push meanwhile.

    Raises:
        OutOfSpace: the slots of some rows have begun anew; call again.
    """
    try:
        _begin_rows(store)
        rows = np.empty((0, store.spec.layout.width), np.float32)
        no_history = np.empty((0, 1 + len(store.spec.facts.scalars)), np.float64)
        store.write(np.empty(0, np.uint64), rows, step=0, history=no_history)
        if store.spec.catches_up:  # the rows are still marked with the step that the table had before
            _begin_rows(store)
    except StoreFull as error:
        raise OutOfSpace(f"table {name!r}: no room for its rows while slots begin anew: {error.strerror}") from error


def _begin_rows(store: TableStore) -> None:
    """Write all rows anew, with their values at the table's step and with initial slots."""
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
