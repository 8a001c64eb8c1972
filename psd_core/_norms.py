"""Norms over arrays that are cut into pieces; the cuts do not change a bit of the result."""

from __future__ import annotations

import math
from collections.abc import Iterable

from psd_core import _kernels
from psd_core._step_block import GradientArray, RealArray

RUN = 16
"""Number of elements that `square_sum` adds in floating point; an array must be cut between such runs."""


def square_sum(x: GradientArray, offset: int = 0) -> int | None:
    """Return the sum of the squares in ``x``. The sums of an array's parts add up exactly to the sum of the whole.

    Squares are rounded to float64 and added within runs of 16 elements in one fixed order; the runs' sums are added without
    rounding. So an array may be cut between runs, and the parts' results added in any order.

    Args:
        x: (n,) float32|float64|float16|uint16; a half-precision array has the sum of the widened one.
        offset: position of ``x`` within a run, 0 to 15: its position in the whole array modulo 16.

    Returns:
        An integer in units of 2**-1074, for ``square_root``; None if ``x`` holds NaN or infinity, or a square overflows.

    Raises:
        InvalidArray: type, shape, layout or alignment.
        ValueError: ``offset`` is out of range.

    Cost: O(n), no allocation but the result's, GIL released.
    """
    if not 0 <= offset < RUN:
        raise ValueError(f"offset: expected 0 to {RUN - 1}, got {offset}")
    return _kernels.square_sum(x, offset)


def square_sum_of_rows(rows: GradientArray) -> int | None:
    """Return the sum of ``square_sum`` of each row of ``rows`` (n, dim); the order of rows does not matter."""
    return _kernels.square_sum(rows.reshape(-1), 0, rows.shape[1])


def product_sum(x: RealArray, y: RealArray, offset: int = 0) -> int | None:
    """Return the inner product of ``x`` and ``y``; those of two arrays' parts add up exactly to that of the whole.

    Products are added as squares are in ``square_sum``.

    Args:
        x, y: (n,) float32|float64, of one type. offset: as in ``square_sum``.

    Returns:
        An integer, perhaps negative, in units of 2**-1074, for ``real``; None if a product is not finite.

    Raises:
        InvalidArray: type, shape, layout or alignment.
        ValueError: ``offset`` is out of range.

    Cost: O(n), no allocation but the result's, GIL released.
    """
    if not 0 <= offset < RUN:
        raise ValueError(f"offset: expected 0 to {RUN - 1}, got {offset}")
    return _kernels.product_sum(x, y, offset)


def real(total: int) -> float:
    """Return a sum of results of ``square_sum`` or ``product_sum`` as a number; infinite beyond the range of float64."""
    try:
        return total / (1 << 1074)  # an integer's quotient is rounded once
    except OverflowError:
        return math.inf if total > 0 else -math.inf


def total_squares(sums: Iterable[int | None]) -> int | None:
    """Return the total of results of ``square_sum``; None if one of them is None."""
    total = 0
    for each in sums:
        if each is None:
            return None
        total += each
    return total


def square_root(total: int) -> float:
    """Return the root of a sum of squares, the Euclidean norm; infinity beyond the range of float64.

    Args:
        total: a sum of results of ``square_sum``, >= 0.
    """
    return math.sqrt(real(total))


def trust_ratio(parameter_squares: int, direction_squares: int) -> float:
    """Return LAMB's factor of an update: the tensor's norm over its direction's; 1 if either is 0, or the ratio overflows.

    Args:
        parameter_squares, direction_squares: sums of results of ``square_sum``.
    """
    parameter_norm, direction_norm = square_root(parameter_squares), square_root(direction_squares)
    if parameter_norm == 0 or direction_norm == 0:
        return 1.0
    ratio = parameter_norm / direction_norm
    return ratio if math.isfinite(ratio) else 1.0
