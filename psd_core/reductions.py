"""Answers of reductions: exact sums and extremes over the shards' parts of a vector, and their bytes.

Since sums are exact, their order does not matter. Must not know vectors, batches or messages.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from psd_core import _vector

_UNIT = 1074  # totals are in units of 2**-1074, the smallest positive float64


@dataclass(frozen=True)
class ExactSum:
    """A sum of numbers, without any rounding.

    Attributes:
        total: the sum of the finite numbers, in units of 2**-1074.
        infinities: the sum of the others: 0.0, an infinity, or NaN.
    """

    total: int = 0
    infinities: float = 0.0

    def add(self, values: Iterable[float]) -> ExactSum:
        """The sum with `values` added: float64, or numbers that convert to it exactly, or integers."""
        total, infinities = self.total, self.infinities
        if isinstance(values, np.ndarray) and values.dtype.kind == "f":
            more, flags = _vector.exact_sum(np.ascontiguousarray(values, np.float64).reshape(-1))
            return ExactSum(total + more, infinities + _infinities(flags))
        if isinstance(values, np.ndarray):
            values = values.reshape(-1).tolist()
        for value in values:
            if math.isfinite(value):
                numerator, denominator = value.as_integer_ratio()
                total += numerator << (_UNIT + 1 - denominator.bit_length())
            else:
                infinities += value
        return ExactSum(total, infinities)

    def merge(self, other: ExactSum) -> ExactSum:
        """The sum of both."""
        return ExactSum(self.total + other.total, self.infinities + other.infinities)

    def round(self) -> float:
        """The sum as a float64, rounded once, to nearest even; infinite beyond its range."""
        if self.infinities:  # NaN is true, too
            return self.infinities
        try:
            return self.total / (1 << _UNIT)  # an integer's quotient is rounded once
        except OverflowError:
            return math.inf if self.total > 0 else -math.inf

    def whole(self) -> int:
        """The sum of int64 numbers, as an integer."""
        return self.total >> _UNIT

    def root(self) -> float:
        """The square root of the sum of squares."""
        return math.sqrt(self.round())


@dataclass(frozen=True)
class Extreme:
    """The least or the greatest element, and its index.

    Attributes:
        value: int for int64. NaN if there is one.
        index: the first element's index in the whole vector; -1: there are no elements here, and value is 0.
        greatest: True for the greatest, False for the least.
    """

    value: float
    index: int
    greatest: bool

    def merge(self, other: Extreme) -> Extreme:
        """The extreme of both parts."""
        first, second = (self, other) if self.index <= other.index else (other, self)
        if first.index < 0 or (second.value != second.value and first.value == first.value):
            return second
        is_beyond = second.value > first.value if self.greatest else second.value < first.value
        return second if is_beyond and first.value == first.value else first


def _infinities(flags: int) -> float:
    return math.nan if flags & 1 or flags & 6 == 6 else math.inf if flags & 2 else -math.inf if flags & 4 else 0.0


Answer: TypeAlias = ExactSum | Extreme

# kind, flags, first limb, number of limbs; see csrc/vector_sums.c
_HEAD = struct.Struct("<BBBB")
_FLOAT_EXTREME, _WHOLE_EXTREME = struct.Struct("<qd"), struct.Struct("<qq")
_SUM, _EXTREME = 0, 1


def unpack_answers(data: bytes) -> list[Answer]:
    """The answers of a batch, in order: one for each reduction; for Gram one for each pair.

    Raises:
        ValueError: the bytes are not those of answers.
    """
    answers: list[Answer] = []
    at = 0
    try:
        while at < len(data):
            kind, flags, first, count = _HEAD.unpack_from(data, at)
            at += _HEAD.size
            if kind == _SUM and at + 4 * count <= len(data):
                total = int.from_bytes(data[at : at + 4 * count], "little", signed=True) << (32 * first)
                answers.append(ExactSum(total, _infinities(flags)))
                at += 4 * count
            elif kind == _EXTREME:
                index, value = (_WHOLE_EXTREME if flags & 2 else _FLOAT_EXTREME).unpack_from(data, at)
                answers.append(Extreme(value, index, bool(flags & 1)))
                at += 16
            else:
                raise ValueError(f"answers: a kind {kind} at byte {at - _HEAD.size}")
    except struct.error:
        raise ValueError(f"answers: {len(data)} bytes end in the middle of one") from None
    return answers
