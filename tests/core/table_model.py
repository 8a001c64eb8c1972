"""A table as a dict of NumPy rows, each stepped as a dense tensor of its own: the reference of the table's store."""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers_rules import Case

from psd_core.initial import Initial, Uniform
from psd_core.table import TableSpec, TableStore

SGD = Case("sgd", (0.5, 0.0, 0.0, 0.0), ())
DIM = 5
INIT = Uniform(-1, 1)


def spec_of(case: Case, *, dim: int = DIM, init: Initial = INIT, **options: Any) -> TableSpec:
    """The declaration of a table whose rule is that of a case."""
    return TableSpec("t", dim, case.rule, case.flags, init=init, **options)


class TableModel:
    """The rows that there should be: id -> [value, *slots], and the step."""

    def __init__(self, store: TableStore, case: Case) -> None:
        self.case = case
        self.step = 0
        self.rows: dict[int, list[Any]] = {}
        self._store = store

    def row(self, key: int) -> list[Any]:
        """A row, as it is or as it begins."""
        if key in self.rows:
            return self.rows[key]
        value = self._store.read(np.array([key], np.uint64))[0]
        starts = [
            start for start, at in zip(self._store.spec.layout.starts, self._store.spec.layout.slots, strict=True) if at >= 0
        ]
        return [value, *(np.full(len(value), start, np.float32) for start in starts)]

    def push(self, ids: Any, grads: Any) -> None:
        """One step: repeated ids are summed in order, in float32."""
        sums: dict[int, Any] = {}
        for key, grad in zip(ids.tolist(), grads, strict=True):
            sums[key] = sums[key] + grad if key in sums else grad.copy()
        begins = {key: self.row(key) for key in sums}
        self.step += 1
        for key, total in sums.items():
            value, *slots = (array.copy() for array in begins[key])
            self.case.update(value, total, slots, self.step)
            self.rows[key] = [value, *slots]

    def flat(self) -> dict[int, bytes]:
        """Rows as bytes, to compare."""
        return {key: b"".join(array.tobytes() for array in row) for key, row in self.rows.items()}


def rows_of(store: TableStore) -> dict[int, bytes]:
    """All rows of a store, as bytes; none comes twice."""
    found: dict[int, bytes] = {}
    count = 0
    for batch in store.walk():
        data, row_bytes = batch.rows.tobytes(), 4 * batch.rows.shape[1]
        ids = batch.heads["id"].tolist()
        found.update(zip(ids, (data[at : at + row_bytes] for at in range(0, len(data), row_bytes)), strict=True))
        count += len(ids)
    assert len(found) == count
    return found


def check_places(store: TableStore) -> None:
    """Assert that every place is either a row's or spare, once."""
    counters = store.counters()
    places = store._partition.places()
    rows, spares = places["rows"], places["spares"]
    assert sorted(rows + spares) == list(range(len(rows) + len(spares)))
    assert (len(rows), len(spares)) == (counters["rows"], counters["spares"])
