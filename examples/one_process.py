"""Jobs of sparse tables in one process, in NumPy alone: what the examples' `--plain` trains, to compare psd with.

Has as much of a ParameterServer as these examples call. A table is an array with a place for every id, which must therefore be
known beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import psd_client

Array = NDArray[Any]


class PlainTable:
    """Rows by id, updated by Adagrad or FTRL."""

    def __init__(self, table: psd_client.Table, ids: Array) -> None:
        self._ids = np.unique(ids)
        self._rule = table.optimizer
        shape = len(self._ids), table.dim
        rng = np.random.default_rng(table.seed)
        std = getattr(table.init, "std", 0.0)  # Normal, or Zeros
        self._values = rng.normal(scale=std, size=shape).astype(np.float32)
        self._sums = np.full(shape, table.optimizer.initial_accumulator_value, np.float32)
        self._linear = np.zeros(shape, np.float32)

    def pull(self, ids: Array) -> Array:
        """Rows, of shape `ids.shape + (dim,)`."""
        return self._values[np.searchsorted(self._ids, ids)]

    def prefetch(self, ids: Array) -> None:
        """Do nothing: all rows are here."""

    def update(self, ids: Array, grads: Array) -> None:
        """Sum the gradients of each id and apply the rule."""
        distinct, place = np.unique(ids, return_inverse=True)
        grad = np.zeros((len(distinct), self._values.shape[1]), np.float32)
        np.add.at(grad, place.reshape(-1), grads.reshape(-1, grad.shape[1]))
        at, rule = np.searchsorted(self._ids, distinct), self._rule
        before = self._sums[at]
        self._sums[at] = after = before + grad**2
        if isinstance(rule, psd_client.FTRL):
            self._linear[at] += grad - (np.sqrt(after) - np.sqrt(before)) / rule.lr * self._values[at]
            linear = self._linear[at]
            shrunk = np.sign(linear) * np.maximum(np.abs(linear) - rule.l1, 0)
            self._values[at] = -shrunk / ((rule.beta + np.sqrt(after)) / rule.lr + rule.l2)
        else:
            self._values[at] -= rule.lr * grad / (np.sqrt(after) + rule.eps)


class OneProcess:
    """A job of this process alone.

    Args:
        ids: all of each table, by its name.

    Attributes:
        tables: by name.
    """

    rank = 0
    world_size = 1

    def __init__(self, ids: Mapping[str, Array]) -> None:
        self._ids = ids
        self.tables: dict[str, PlainTable] = {}

    def declare(self, params: Mapping[str, Array], optimizer: Any, tables: Sequence[psd_client.Table]) -> None:
        """Make the tables; there are no dense parameters."""
        assert not params
        assert optimizer is None
        self.tables = {table.name: PlainTable(table, self._ids[table.name]) for table in tables}

    def push_pull(self, grads: Mapping[str, Array], tables: Mapping[str, tuple[Array, Array]]) -> None:
        """Update rows."""
        assert not grads
        for name, (ids, of_rows) in tables.items():
            self.tables[name].update(ids, of_rows)

    def barrier(self, name: str) -> None:
        """Return at once: there is nobody to wait for."""

    def stats(self) -> dict[str, int]:
        """Counts that psd has, too: nothing is sent."""
        return {"sent_bytes": 0, "received_bytes": 0}

    def __enter__(self) -> OneProcess:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""
