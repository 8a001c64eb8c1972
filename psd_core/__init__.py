"""Arithmetic of a parameter server on memory that the caller owns.

This package owns the loops over numbers: sums of gradients, update rules, the finite check. Each is a C kernel that runs
without the GIL, allocates nothing and keeps nothing. It must not know of shards, sessions, rounds or messages: it imports
NumPy and nothing of psd, and no gRPC.

Invariants:
  * An argument that does not fit is refused with InvalidTensor, naming it, before anything is written.
  * Results are the same bits on every instruction set: IEEE operations element by element in the array's type, no fused
    multiply-add, no order that depends on threads or vector width. (Only which NaN a NaN is may differ.)
  * An input is never modified; an output may be its own input, and else overlaps nothing.

Arrays are one-dimensional, C-contiguous, aligned, float32 or float64, all of one type. Any object with the buffer protocol
will do, a read-only one too where it is an input. Two threads must not write to one array at the same time.

>>> import numpy as np
>>> import psd_core
>>> acc, param = psd_core.aligned_empty(3, np.float32), np.ones(3, np.float32)
>>> psd_core.scaled_copy(acc, np.array([1, 2, 3], np.float32))
>>> psd_core.accumulate(acc, np.array([3, 2, 1], np.float32), weight=0.5)
>>> acc
array([2.5, 3. , 3.5], dtype=float32)
>>> psd_core.sgd(param, acc, lr=0.5)
>>> param
array([-0.25, -0.5 , -0.75], dtype=float32)
>>> psd_core.first_nonfinite(param)
-1
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from psd_core import _kernels
from psd_core._kernels import InvalidTensor

__all__ = ["InvalidTensor", "accumulate", "aligned_empty", "first_nonfinite", "scaled_copy", "sgd", "sgd_block"]

RealArray = npt.NDArray[np.float32] | npt.NDArray[np.float64]

_CACHE_LINE_BYTES = 64
_SGD_SLOTS = ("momentum",)
_NESTEROV, _MAXIMIZE = 1, 2  # flags of csrc/rule_sgd.h


def accumulate(acc: RealArray, grad: RealArray, weight: float = 1.0) -> None:
    """Add ``weight * grad`` to ``acc`` in place.

    Args:
        acc: (n,) float32|float64, writable. Updated.
        grad: (n,) same type. May be ``acc`` itself, and else must not overlap it.
        weight: rounded to the arrays' type; a weight of 1 adds the gradient exactly as it is.

    Raises:
        InvalidTensor: type, shape, layout, alignment, length or overlap; ``acc`` is untouched.

    Cost: O(n), no allocation, GIL released. Two roundings per element (product, sum).
    """
    _kernels.accumulate(acc, grad, weight)


def scaled_copy(out: RealArray, grad: RealArray, weight: float = 1.0) -> None:
    """Set ``out`` to ``weight * grad``: the first contribution of a round, for which nothing need be zeroed.

    Args:
        out: (n,) float32|float64, writable. Overwritten.
        grad: (n,) same type. May be ``out`` itself, and else must not overlap it.
        weight: rounded to the arrays' type.

    Raises:
        InvalidTensor: type, shape, layout, alignment, length or overlap; ``out`` is untouched.

    Cost: O(n), no allocation, GIL released.
    """
    _kernels.scaled_copy(out, grad, weight)


def first_nonfinite(x: RealArray) -> int:
    """Return the index of the first NaN or infinity in ``x``, or -1 if all numbers are finite.

    Args:
        x: (n,) float32|float64.

    Raises:
        InvalidTensor: type, shape, layout or alignment.

    Cost: O(index of the answer), no allocation, GIL released; tests the exponent bits, 1 KiB at a time.
    """
    return _kernels.first_nonfinite(x)


def sgd(
    param: RealArray,
    grad: RealArray,
    momentum_buffer: RealArray | None = None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    step: int = 1,
) -> None:
    """Apply one update of stochastic gradient descent in place.

    Args:
        param: (n,) float32|float64, writable. Updated.
        grad: (n,) same type. Never modified; must not overlap the others.
        momentum_buffer: (n,) same type, writable; needed if ``momentum`` is not 0. Updated; at step 1 its contents are not
            read, and if ``momentum`` is 0 it is left alone.
        lr, momentum, dampening, weight_decay: rounded to the arrays' type (``1 - dampening`` after subtracting).
        nesterov: look ahead along the buffer.
        maximize: ascend.
        step: updates including this one, >= 1. At step 1 the buffer becomes the gradient, undampened.

    Raises:
        InvalidTensor: type, shape, layout, alignment, length or overlap; nothing is written.
        ValueError: ``step`` is less than 1.

    Cost: O(n), no allocation, GIL released.
    Source: torch.optim.SGD, operation by operation in the arrays' type; torch itself may fuse a multiply and an add on CPUs,
        and so differ by rounding. ``tests/core/test_core_sgd.py`` compares.
    """
    if step < 1:
        raise ValueError(f"step: expected an integer >= 1, got {step}")
    if momentum_buffer is None and momentum != 0:
        raise InvalidTensor(f"momentum_buffer: expected an array, since momentum is {momentum}, got None")
    scalars = (lr, momentum, dampening, weight_decay)
    flags = (_NESTEROV if nesterov else 0) | (_MAXIMIZE if maximize else 0)
    _kernels.step(_kernels.SGD, param, grad, ("momentum_buffer",), (momentum_buffer,), scalars, flags, step)


def sgd_block(
    param_in: RealArray,
    param_out: RealArray,
    momentum_in: RealArray | None,
    momentum_out: RealArray | None,
    acc: RealArray | None,
    grad: RealArray | None,
    *,
    weight: float,
    scale: float,
    segment_ends: npt.NDArray[np.uint32],
    touched: npt.NDArray[np.uint8],
    steps_in: npt.NDArray[np.uint64],
    steps_out: npt.NDArray[np.uint64],
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
) -> None:
    """Reduce the last contribution of a round and apply one SGD update, from one copy of a block to another.

    A block is a run of the flat parameter space made of segments, pieces of tensors that lie end to end. A touched segment i is
    updated as ``sgd`` does with ``step = steps_in[i] + 1`` and ``grad = scale * (acc + weight * grad)``, where an absent
    term is left out; an untouched one is copied through unchanged. A lone contribution with weight and scale of 1 is
    used exactly as it is.

    Args:
        param_in: (n,) float32|float64.
        param_out: (n,) same type, writable. Overwritten; ``param_in`` itself, or memory of its own.
        momentum_in, momentum_out: (n,) same type, like the above; both None if the block has no such slot.
        acc: (n,) same type: the sum of the round's earlier contributions; or None.
        grad: (n,) same type: the last contribution; None if ``acc`` has them all.
        weight: of ``grad``. scale: of the sum, such as 1 over the sum of weights. Rounded to the arrays' type.
        segment_ends: (k,) uint32, never falling, the last one n: segment i is [segment_ends[i - 1], segment_ends[i]).
        touched: (k,) uint8, not 0 where the round has a gradient for the segment.
        steps_in: (k,) uint64, updates applied to each segment so far.
        steps_out: (k,) uint64, writable. ``steps_in``, plus 1 where touched; ``steps_in`` itself, or memory of its own.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in ``sgd``.

    Raises:
        InvalidTensor: type, shape, layout, alignment, length, overlap or ends, or a missing array; nothing is written.

    Cost: O(n + k), no allocation, GIL released. Neighbours that are at the same step as far as the rule can tell are one
        run, and runs are worked off in tiles of 1 KiB, so that nothing is read from or written to memory twice.
    Source: as for ``sgd``.
    """
    if momentum_in is None and momentum != 0:
        raise InvalidTensor(f"momentum_in: expected an array, since momentum is {momentum}, got None")
    _kernels.step_block(
        _kernels.SGD,
        param_in,
        param_out,
        _SGD_SLOTS,
        (momentum_in,),
        (momentum_out,),
        acc,
        grad,
        weight,
        scale,
        segment_ends,
        touched,
        steps_in,
        steps_out,
        (lr, momentum, dampening, weight_decay),
        (_NESTEROV if nesterov else 0) | (_MAXIMIZE if maximize else 0),
    )


def aligned_empty(n: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an uninitialised 1-D array whose memory begins on a cache line (64 bytes).

    Args:
        n: length, >= 0.
        dtype: anything that numpy.dtype takes.

    Raises:
        ValueError: ``n`` is negative.
    """
    itemsize = np.dtype(dtype).itemsize
    if n < 0:
        raise ValueError(f"n: expected a length >= 0, got {n}")
    memory = np.empty(n * itemsize + _CACHE_LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE_BYTES
    return memory[start : start + n * itemsize].view(dtype)
