"""Ordinary memory to sum rounds in; it dies with the process.

It is reused, since fresh memory costs several times the sum itself.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from psd_core import aligned_empty
from psd_core._arena_format import BlockShape


class Accumulators:
    """A pool that keeps at most one array per block."""

    def __init__(self, shapes: Sequence[BlockShape]) -> None:
        self._kept_max = Counter((shape.dtype, shape.length) for shape in shapes)
        self._free: dict[tuple[str, int], list[NDArray[Any]]] = {key: [] for key in self._kept_max}
        self._lock = threading.Lock()

    def lend(self, shape: BlockShape) -> NDArray[Any]:
        """An (n,) array with undefined contents."""
        with self._lock:
            free = self._free[shape.dtype, shape.length]
            if free:
                return free.pop()
        return aligned_empty(shape.length, shape.dtype)

    def give_back(self, array: NDArray[Any]) -> None:
        """Take a lent array back; the caller must not use it any more."""
        key = (array.dtype.name, array.size)
        with self._lock:
            free = self._free[key]
            if len(free) < self._kept_max[key]:
                free.append(array)
