"""Memory for the values of rows that are sent or received. Shards on the same machine see it: they read gradients and write
rows there.

It is a part of a segment. If it is in use, or too small, the caller gets ordinary memory, and the rows are sent in messages.
Must not know tables, sockets or shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd_client.lanes.segment import Segment

ROWS_BYTES = 32 << 20
"""Bytes for one direction, sending or receiving. Unused pages take no memory."""

ALIGN_BYTES = 64


class RowsMemory:
    """Memory for one direction, sending or receiving.

    Args:
        segment: has ROWS_BYTES left; None: all memory is ordinary.
    """

    def __init__(self, segment: Segment | None) -> None:
        self._segment = segment
        self._start = segment.reserve(ROWS_BYTES) if segment is not None else 0
        self._lent: weakref.ref[NDArray[Any]] | None = None

    def arrays(self, shapes: Sequence[tuple[int, int]], dtypes: Sequence[np.dtype[Any]]) -> list[NDArray[Any]]:
        """Arrays with undefined contents. The memory is in use until all of them, and all their views, have been dropped."""
        starts, end = [], 0
        for (rows, dim), dtype in zip(shapes, dtypes, strict=True):
            starts.append(end)
            end += -(-rows * dim * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES
        segment, is_lent = self._segment, self._lent is not None and self._lent() is not None
        if segment is None or segment.is_given_up or is_lent or end > ROWS_BYTES:
            return [np.empty(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        whole = segment.array(self._start, end, np.dtype(np.uint8))  # all views of it refer to it
        self._lent = weakref.ref(whole)
        return [np.ndarray(shape, dtype, whole, start) for shape, dtype, start in zip(shapes, dtypes, starts, strict=True)]
