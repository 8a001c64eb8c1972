"""Rows of a layer outside of a job: its own, which it was given, or those of a running job that a reader fetches. No gradient
reaches them: that of the layer's handle is zero. Must not know a framework, nor where own rows come from.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import InvalidTensor
from psd.contract.tables import SparseTableSpec
from psd_client.keras.table_rows import DIRECTION
from psd_client.reader import ReadTable
from psd_client.row_places import RowPlaces
from psd_core.table import initial_rows


class _FixedRows:
    is_trained = False

    def collect(self, ids: NDArray[Any], gradients: NDArray[Any]) -> NDArray[np.float32]:
        """Zero, as the gradient of the handle."""
        del ids, gradients
        return np.zeros_like(DIRECTION)


class OwnedRows(_FixedRows):
    """Rows that a layer itself has. Those of other ids are what a job has for those that nobody has trained.

    Args:
        ids: (n,) int64 or uint64, each of them once. rows: (n, dim) floating. where: begins the errors' messages.

    Attributes:
        ids: as int64. rows: as float32.

    Raises:
        InvalidTensor: they are something else.
    """

    def __init__(self, spec: SparseTableSpec, ids: NDArray[Any], rows: NDArray[Any], where: str) -> None:
        if ids.dtype not in (np.int64, np.uint64) or ids.ndim != 1:
            raise InvalidTensor(f"{where}: ids: must be (n,) int64, got {ids.shape} {ids.dtype}")
        self.ids: NDArray[np.int64] = ids.view(np.int64)
        # The types of bfloat16 that frameworks add to NumPy are of no kind of its own.
        if rows.shape != (len(ids), spec.dim) or rows.dtype.kind in "biuc":
            raise InvalidTensor(f"{where}: rows: must be {(len(ids), spec.dim)} floating, got {rows.shape} {rows.dtype}")
        if len(np.unique(self.ids)) != len(ids):
            raise InvalidTensor(f"{where}: ids: an id comes twice")
        self.rows: NDArray[np.float32] = rows.astype(np.float32, copy=False)
        self._spec = spec
        self._places = RowPlaces(self.ids)

    def pull(self, ids: NDArray[np.int64], *, counts_no_use: bool) -> NDArray[np.float32]:
        """The rows (..., dim) of ids (...)."""
        del counts_no_use
        spec, flat = self._spec, np.ascontiguousarray(ids).reshape(-1)
        places, is_there = self._places.find(flat)
        found = np.empty((len(flat), spec.dim), np.float32)
        found[is_there] = self.rows[places]
        if not is_there.all():
            found[~is_there] = initial_rows(spec.name, spec.dim, spec.init, spec.seed, flat[~is_there])
        return found.reshape(*ids.shape, spec.dim)


class ReadRows(_FixedRows):
    """The rows of a running job's table, as they are at each lookup.

    Args:
        table: a reader's. lock: held while the reader is used, which takes one call at a time; frameworks make several.
    """

    def __init__(self, table: ReadTable, lock: threading.Lock) -> None:
        self._table = table
        self._lock = lock

    def pull(self, ids: NDArray[np.int64], *, counts_no_use: bool) -> NDArray[np.float32]:
        """The rows (..., dim) of ids (...). A reader marks none as used."""
        del counts_no_use
        with self._lock:
            return self._table.pull(ids)
