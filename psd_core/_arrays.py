"""All that psd_core itself offers, which it loads when it is used; here the functions on whole arrays, those of a rule and of
norms apart.

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
from psd_core._norms import RUN as RUN
from psd_core._norms import square_root as square_root
from psd_core._norms import square_sum as square_sum
from psd_core._norms import square_sum_of_rows as square_sum_of_rows
from psd_core._norms import total_squares as total_squares
from psd_core._norms import trust_ratio as trust_ratio
from psd_core._step_block import GradientArray, RealArray
from psd_core._step_block import step_block as step_block
from psd_core.rules import RULES as RULES

_CACHE_LINE_BYTES = 64


def accumulate(acc: RealArray, grad: GradientArray, weight: float = 1.0) -> None:
    """Add ``weight * grad`` to ``acc`` in place.

    Args:
        acc: (n,) float32|float64, writable. Updated.
        grad: (n,) same type, or float16|uint16 beside float32. May be ``acc`` itself; otherwise must not overlap it.
        weight: rounded to the arrays' type; with weight 1 the gradient itself is added.

    Raises:
        InvalidArray: type, shape, layout, alignment, length or overlap; ``acc`` is untouched.

    Cost: O(n), no allocation, GIL released. Two roundings per element (product, sum).
    """
    _kernels.accumulate(acc, grad, weight)


def scaled_copy(out: RealArray, grad: GradientArray, weight: float = 1.0) -> None:
    """Set ``out`` to ``weight * grad``: the first contribution of a round, so ``out`` need not be zeroed first.

    Args:
        out: (n,) float32|float64, writable. Overwritten.
        grad: (n,) same type, or float16|uint16 beside float32. May be ``out`` itself; otherwise must not overlap it.
        weight: rounded to the arrays' type.

    Raises:
        InvalidArray: type, shape, layout, alignment, length or overlap; ``out`` is untouched.

    Cost: O(n), no allocation, GIL released.
    """
    _kernels.scaled_copy(out, grad, weight)


def weigh_segments(
    out: RealArray,
    grad: GradientArray,
    segment_ends: npt.NDArray[np.uint32],
    weights: npt.NDArray[np.float64],
    *,
    add: bool,
) -> None:
    """Set ``out`` to ``grad``, or add it to ``out``, each segment multiplied by a weight of its own.

    Args:
        out: (n,) float32|float64, writable.
        grad: (n,) same type, or float16|uint16 beside float32. May be ``out`` itself; otherwise must not overlap it.
        segment_ends: (k,) uint32, never falling, where each segment ends; the last is n.
        weights: (k,) float64, rounded to the arrays' type.
        add: True: as ``accumulate`` of each segment. False: as ``scaled_copy``.

    Raises:
        InvalidArray: type, shape, layout, alignment, length, overlap or segment ends; ``out`` is untouched.

    Cost: O(n + k), no allocation, GIL released.
    """
    _kernels.weigh_segments(out, grad, segment_ends, weights, add)


def first_nonfinite(x: GradientArray) -> int:
    """Return the index of the first NaN or infinity in ``x``, or -1 if all numbers are finite.

    Args:
        x: (n,) float32|float64|float16|uint16.

    Raises:
        InvalidArray: type, shape, layout or alignment.

    Cost: O(index of the answer), no allocation, GIL released; tests the exponent bits, 1 KiB at a time.
    """
    return _kernels.first_nonfinite(x)


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
