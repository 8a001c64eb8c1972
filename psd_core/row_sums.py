"""Sums of a round's sparse gradients, in ordinary memory that ends with the process, like the sums of dense rounds.

Workers keep a round's gradients until the round has closed, and send them again to a shard that has lost them; so nothing of an
open round need be in a file. Must not know rounds, workers or stores.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd_core import _table
from psd_core._table_arguments import as_ids, as_values


class RowSums:
    """Sums of the gradients that a round's workers have sent for a table's rows, by id.

    Sums are in float32, in the order of `add`: adding in the order of ranks gives the same bits for any order of arrival. One
    thread at a time.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._sums = _table.Sums(dim)
        self._prepared: tuple[NDArray[np.uint64], NDArray[np.float32]] | None = None  # references, not copies

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, ids: NDArray[Any], grads: NDArray[Any], weight: float = 1.0) -> None:
        """Add ``weight * gradient`` to the sum of each id: two roundings an element, as in `psd_core.accumulate`.

        Args:
            ids: (n,) int64|uint64. Gradients of one id are first added to each other, in their order.
            grads: (n, dim) float32|float16|uint16 (bfloat16).
            weight: rounded to float32.

        Raises:
            InvalidArray: naming the argument; nothing has changed.
            MemoryError: nothing has changed.
        """
        self.prepare(ids, grads)
        self.add_prepared(weight)

    def prepare(self, ids: NDArray[Any], grads: NDArray[Any]) -> None:
        """Do all of `add` that may fail; no sum changes. Do not change the gradients until `add_prepared`.

        If gradients for several tables belong together, all are prepared before the first one is added.
        """
        self._prepared = as_ids(ids), as_values("grads", grads, len(ids), self.dim)
        self._sums.prepare(*self._prepared)

    def add_prepared(self, weight: float = 1.0) -> None:
        """Add what was prepared last; see `add`."""
        self._sums.add(weight)
        self._prepared = None

    def clear(self) -> None:
        """Drop all sums, and keep the memory for the next round, unless the last 256 have needed far less."""
        self._sums.clear()

    @property
    def is_touched(self) -> bool:
        """True if something was added, perhaps of no row."""
        return self._sums.is_touched

    @property
    def ids(self) -> NDArray[np.uint64]:
        """Distinct ids, in the order of their first gradients: a view, valid until the next change."""
        return np.asarray(self._sums.ids()) if len(self) else np.empty(0, np.uint64)

    @property
    def values(self) -> NDArray[np.float32]:
        """Sums (n, dim) of these ids: a view, valid until the next change; pushed with `distinct` and a scale."""
        return np.asarray(self._sums.values()) if len(self) else np.empty((0, self.dim), np.float32)
