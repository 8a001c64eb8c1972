"""The places of rows by id, for models that have rows of a table themselves, outside of a job. Must not know frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class RowPlaces:
    """Finds rows by id. ids: (n,) int64, of the rows in their order, each of them once."""

    def __init__(self, ids: NDArray[np.int64]) -> None:
        self._order = np.argsort(ids)
        self._sorted = ids[self._order]

    def find(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """The places of those of ids (k,) that are there, in their order; and which these are, (k,)."""
        at = np.searchsorted(self._sorted, ids)
        is_there: NDArray[Any] = np.zeros(len(ids), np.bool_)
        inside = at < len(self._sorted)
        is_there[inside] = self._sorted[at[inside]] == ids[inside]
        return self._order[at[is_there]], is_there
