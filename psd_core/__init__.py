"""Arithmetic of a parameter server on memory that the caller owns.

This package owns the loops over numbers: sums of gradients, update rules, the finite check, the widening of half precision.
Each is a C kernel that runs without the GIL, allocates nothing and keeps nothing. ``rules.py`` is the table of the rules. Must
not know shards, sessions, rounds or messages: it imports NumPy, but nothing of psd, and no gRPC. NumPy and the kernels are
loaded when the first of the names below is used: what only starts processes, as psd-run does, needs rules.py, but no arrays.

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

from typing import TYPE_CHECKING, Any

from psd_core import _checkout  # noqa: F401 - first of all: it says what to do where nothing was built

if TYPE_CHECKING:
    from psd_core._arrays import (
        RULES,
        RUN,
        InvalidArray,
        accumulate,
        aligned_empty,
        aligned_zeros,
        first_nonfinite,
        narrowed,
        scaled_copy,
        square_root,
        square_sum,
        square_sum_of_rows,
        step_block,
        total_squares,
        trust_ratio,
        weigh_segments,
        widened,
    )

__all__ = [
    "InvalidArray",
    "RULES",
    "RUN",
    "accumulate",
    "aligned_empty",
    "aligned_zeros",
    "first_nonfinite",
    "narrowed",
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

if not TYPE_CHECKING:  # a checker of types would take any name for one of this module's

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from psd_core import _arrays

        globals().update({each: getattr(_arrays, each) for each in __all__})
        return globals()[name]
