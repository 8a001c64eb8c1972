"""Checks of the arrays that tables are given: ids, and a row of numbers for each."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import psd_core


def as_ids(ids: NDArray[Any]) -> NDArray[np.uint64]:
    """Return ids as uint64, contiguous. Raises InvalidArray."""
    if not isinstance(ids, np.ndarray) or ids.dtype not in (np.int64, np.uint64) or ids.ndim != 1:
        got = f"{ids.ndim}-D {ids.dtype}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise psd_core.InvalidArray(f"ids: expected a 1-D array of int64 or uint64, got {got}")
    return np.ascontiguousarray(ids).view(np.uint64)


def as_values(name: str, values: NDArray[Any], n: int, width: int) -> NDArray[np.float32]:
    """Return (n, width) float32 numbers, widened if they have 16 bits. Raises InvalidArray, naming the argument."""
    shape = (n, width)
    if not isinstance(values, np.ndarray) or values.dtype not in (np.float32, np.float16, np.uint16):
        got = values.dtype if isinstance(values, np.ndarray) else type(values).__name__
        raise psd_core.InvalidArray(f"{name}: expected float32, float16 or uint16 (bfloat16), got {got}")
    if values.shape != shape or not (values.flags.c_contiguous and values.flags.aligned):
        raise psd_core.InvalidArray(f"{name}: expected a C-contiguous aligned {shape} array, got {values.shape}")
    if values.dtype == np.float32:
        return values
    return psd_core.widened(values.reshape(-1)).reshape(shape)  # type: ignore[return-value]
