"""Arithmetic of a parameter server on memory that the caller owns.

This package owns the loops over numbers: sums of gradients, update rules, the finite check, the widening of half precision.
Each is a C kernel that runs without the GIL, allocates nothing and keeps nothing. ``rules.py`` is the table of the rules. Must
not know shards, sessions, rounds or messages: it imports NumPy, but nothing of psd, and no gRPC.

Invariants:
  * An argument that does not fit is refused with InvalidArray, which names it, before anything is written.
  * Results are the same bits on every instruction set: IEEE operations element by element in the array's type, no fused
    multiply-add, no order that depends on threads or vector width. (Only the bits of a NaN may differ.)
  * An input is never modified. An output may be its own input; otherwise it must overlap no other array.

Arrays are one-dimensional, C-contiguous, aligned, float32 or float64, all of one type. But a gradient beside float32 may have
half precision, as float16, or as uint16 with the bits of bfloat16: the kernel widens it while reading, with the same result as
widening it first. Any object with the buffer protocol will do; an input may be read-only. Two threads must not write to one
array at the same time.

>>> import numpy as np
>>> import psd_core
>>> acc = psd_core.aligned_empty(3, np.float32)
>>> psd_core.scaled_copy(acc, np.array([1, 2, 3], np.float32))
>>> psd_core.accumulate(acc, np.array([3, 2, 1], np.float32), weight=0.5)
>>> acc
array([2.5, 3. , 3.5], dtype=float32)
>>> psd_core.first_nonfinite(acc)
-1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from psd_core import (
    _checkout,  # noqa: F401 - first of all: it says what to do where nothing was built
    _kernels,
)
from psd_core._half import narrowed
from psd_core._kernels import InvalidArray
from psd_core._norms import (
    RUN,
    product_sum,
    real,
    square_root,
    square_sum,
    square_sum_of_rows,
    total_squares,
    trust_ratio,
)
from psd_core._step_block import GradientArray, RealArray, step_block
from psd_core.rules import RULES

__all__ = [
    "InvalidArray",
    "RULES",
    "RUN",
    "accumulate",
    "aligned_empty",
    "aligned_zeros",
    "first_nonfinite",
    "narrowed",
    "product_sum",
    "real",
    "scaled_copy",
    "square_root",
    "square_sum",
    "square_sum_of_rows",
    "step_block",
    "total_squares",
    "trust_ratio",
    "weigh_segments",
    "widened",
]

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
