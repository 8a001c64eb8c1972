"""The rows of one embedding layer: pulled as NumPy arrays, and their gradients until the step. Must not know a framework."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd_client.worker.flat_calls import FlatCalls
from psd_core.distinct import distinct

Gradients = tuple[NDArray[np.uint64], NDArray[np.float32]]


class LayerRows:
    """The rows of one layer.

    Args:
        table: index in the job. dim: numbers of a row.
    """

    def __init__(self, worker: FlatCalls, table: int, dim: int) -> None:
        self.table = table
        self.dim = dim
        self._worker = worker
        self._parts: list[Gradients] = []
        self._norm = 0.0

    def pull(self, ids: NDArray[np.int64], *, is_learning: bool) -> NDArray[np.float32]:
        """The rows (..., dim) of ids (...)."""
        return self._worker.pull_rows({self.table: ids}, counts_no_use=not is_learning)[self.table]

    def collect(self, ids: NDArray[Any], gradients: NDArray[Any]) -> np.float32:
        """Keep the gradients of one lookup until the step; return their norm."""
        found = distinct(np.ascontiguousarray(ids).reshape(-1))
        sums = found.sum(np.array(gradients, np.float32).reshape(-1, self.dim))
        norm: np.float32 = np.float32(np.linalg.norm(sums))
        self._parts.append((found.ids, sums))
        self._norm += float(norm)
        return norm

    def take(self, norm: float) -> Gradients | None:
        """Gradients collected so far, once, multiplied by what has made of their norm the given one; None if there are none."""
        parts, before = self._parts, self._norm
        self._parts, self._norm = [], 0.0
        if not parts:
            return None
        ids, gradients = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        is_scaled = before and norm != before and math.isfinite(before) and math.isfinite(norm)
        return ids, gradients * np.float32(norm / before) if is_scaled else gradients
