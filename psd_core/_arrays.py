"""All that psd_core itself offers, which it loads when it is used; here what makes arrays.

Must not know rules, or what the numbers mean. psd_core/__init__.py says what all of its functions promise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from psd_core import _kernels
from psd_core._half import narrowed as narrowed
from psd_core._kernels import InvalidArray as InvalidArray
from psd_core._kernels import accumulate as accumulate
from psd_core._kernels import first_nonfinite as first_nonfinite
from psd_core._kernels import scaled_copy as scaled_copy
from psd_core._kernels import weigh_segments as weigh_segments
from psd_core._norms import RUN as RUN
from psd_core._norms import product_sum as product_sum
from psd_core._norms import real as real
from psd_core._norms import square_root as square_root
from psd_core._norms import square_sum as square_sum
from psd_core._norms import square_sum_of_rows as square_sum_of_rows
from psd_core._norms import total_squares as total_squares
from psd_core._norms import trust_ratio as trust_ratio
from psd_core._step_block import GradientArray, RealArray
from psd_core._step_block import step_block as step_block
from psd_core.rules import RULES as RULES

_CACHE_LINE_BYTES = 64


def widened(x: GradientArray) -> RealArray:
    """Return the elements of an array in half precision as float32, which represents them exactly.

    Args:
        x: (n,) float32|float64|float16|uint16.

    Returns:
        A new array, aligned like those of ``aligned_empty``; ``x`` itself, not a copy, if it is float32 or float64.

    Raises:
        InvalidArray: type, shape, layout or alignment.

    Cost: O(n), one allocation, GIL released.
    """
    if not _kernels.is_half(x):
        return cast(RealArray, x)
    wide: npt.NDArray[np.float32] = aligned_empty(len(x), np.float32)
    _kernels.widen(wide, x)
    return wide


def aligned_empty(n: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an uninitialised 1-D array whose memory begins on a cache line (64 bytes).

    Args:
        n: length, >= 0.
        dtype: anything that numpy.dtype takes.

    Raises:
        ValueError: ``n`` is negative.
    """
    return _aligned(np.empty, n, dtype)


def aligned_zeros(n: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an array of zeros, aligned as by `aligned_empty`; unused pages of a large one cost nothing."""
    return _aligned(np.zeros, n, dtype)


def _aligned(make: Callable[..., npt.NDArray[Any]], n: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    itemsize = np.dtype(dtype).itemsize
    if n < 0:
        raise ValueError(f"n: expected a length >= 0, got {n}")
    memory = make(n * itemsize + _CACHE_LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE_BYTES
    return memory[start : start + n * itemsize].view(dtype)
