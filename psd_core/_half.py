"""Rounding to half precision, for what is sent or exported in 16 bits. Widening is a kernel: `psd_core.widened`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def narrowed(x: npt.NDArray[np.float32], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return float32 numbers in half precision, rounded to nearest, ties to even. What is too large becomes infinity.

    Args:
        x: float32 of any shape.
        dtype: float16, or uint16 for the bits of bfloat16.

    Returns:
        A new array of the same shape. A NaN is a quiet one.
    """
    if np.dtype(dtype) == np.float16:
        with np.errstate(over="ignore"):
            return x.astype(dtype)
    bits = x.view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(dtype)  # else rounding could make infinity of a NaN
