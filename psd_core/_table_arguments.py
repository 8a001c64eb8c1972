"""Checks of the arrays that tables are given: ids, and a row of numbers for each."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import psd_core
from psd_core import _table

_ID_DTYPES = (np.dtype(np.uint64), np.dtype(np.int64))
_FLOAT32 = np.dtype(np.float32)
STEP_MAX = 1 << 53
"""Largest step of a table, the last up to which float64, in which a history has them, tells all from each other."""
CLOCK_MAX = (1 << 63) - 1
"""Largest clock of a table, by which rows are marked as used."""
_VALUE_DTYPES = (_FLOAT32, np.dtype(np.float16), np.dtype(np.uint16))


def as_ids(ids: NDArray[Any]) -> NDArray[np.uint64]:
    """Return ids as uint64, contiguous. Raises InvalidArray."""
    if not isinstance(ids, np.ndarray) or ids.dtype not in _ID_DTYPES or ids.ndim != 1:
        got = f"{ids.ndim}-D {ids.dtype}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise psd_core.InvalidArray(f"ids: expected a 1-D array of int64 or uint64, got {got}")
    if not ids.flags.c_contiguous:
        ids = np.ascontiguousarray(ids)
    return ids if ids.dtype == _ID_DTYPES[0] else ids.view(_ID_DTYPES[0])


def as_values(name: str, values: NDArray[Any], n: int, width: int | None = None) -> NDArray[np.float32]:
    """Return (n, width) float32 numbers, widened if they have 16 bits; any width by default. Raises InvalidArray."""
    if not isinstance(values, np.ndarray) or values.dtype not in _VALUE_DTYPES:
        got = values.dtype if isinstance(values, np.ndarray) else type(values).__name__
        raise psd_core.InvalidArray(f"{name}: expected float32, float16 or uint16 (bfloat16), got {got}")
    shape = (n, width if width is not None or values.ndim != 2 else values.shape[1])
    if values.shape != shape or not (values.flags.c_contiguous and values.flags.aligned):
        wanted = f"({n}, {'dim' if width is None else width})"
        raise psd_core.InvalidArray(f"{name}: expected a C-contiguous aligned {wanted} array, got {values.shape}")
    if values.dtype == _FLOAT32:
        return values
    return psd_core.widened(values.reshape(-1)).reshape(values.shape)  # type: ignore[return-value]


def as_out(out: NDArray[np.float32] | None, n: int, width: int) -> NDArray[np.float32]:
    """Return the (n, width) float32 array to be written, a new one if there is none. Raises InvalidArray."""
    if out is None:
        return np.empty((n, width), _FLOAT32)
    if (
        out.dtype != _FLOAT32
        or out.shape != (n, width)
        or not (out.flags.c_contiguous and out.flags.aligned and out.flags.writeable)
    ):
        raise psd_core.InvalidArray(
            f"out: expected a writable C-contiguous aligned ({n}, {width}) float32 array, got {out.shape} of {out.dtype}"
        )
    return out


def as_history(history: NDArray[Any], scalars: int | None) -> NDArray[np.float64]:
    """Return steps that rise, and the scalars from each on; `scalars`: how many, None: none are kept. Raises InvalidArray."""
    shape = (len(history), 1 + scalars) if scalars is not None else (0, 0)
    if scalars is None or history.dtype != np.float64 or history.shape != shape or len(history) > _table.LOG_MAX:
        expected = "none" if scalars is None else f"at most {_table.LOG_MAX} rows of {shape[1]} float64"
        raise psd_core.InvalidArray(f"history: expected {expected}, got {history.shape} of {history.dtype}")
    if not (np.diff(history[:, 0], prepend=0) > 0).all() or not (history[:, 0] <= STEP_MAX).all():
        raise psd_core.InvalidArray(f"history: expected steps from 1 on that rise, up to {STEP_MAX}")
    return np.ascontiguousarray(history)
