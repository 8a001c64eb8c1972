"""The same for a tensor that travels compressed, so that what a push carries of its worker's residual can be told, too.

Every `PERIOD` elements there is a place for each gradient, which has a 1 there, and some for each life of a worker, to which
each of its gradients adds the same fractions: what the codec leaves out of these goes with a later one. Where a codec has
scales, each block of 256 elements has an anchor, so that a level is a whole number, or a power of two. So all sums are exact in
float32. `sign` has patterns in the place of numbers (sign_cells.py). Knows nothing of workers and faults.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import sign_cells
from numpy.typing import NDArray

from psd_core import codecs

LOSSY = "d"
"""The tensor."""

PERIOD = 25 * codecs.BLOCK
PERIOD_OF_SIGN = (24 + 28) * codecs.BLOCK


class Form(NamedTuple):
    """What gradients are made of. anchor: of each 256 elements; 0: none. fractions: of each life, for its residual."""

    anchor: float
    fractions: tuple[float, ...]


FRACTIONS = 7

FORMS = {
    "int8": Form(127.0, (0.25, 0.3125, 0.375, 0.4375, 0.1875, 0.125, 0.0625)),
    "int4": Form(7.0, (0.25, 0.3125, 0.375, 0.4375, 0.1875, 0.125, 0.0625)),
    "int4log": Form(1.0, (0.75, 0.625, 0.375, 0.875, 0.6875, 0.3125, 0.4375)),
    "bf16": Form(0.0, tuple(1 + 2.0**-10 * part for part in range(1, 8))),
    "fp16": Form(0.0, tuple(1 + 2.0**-13 * part for part in range(1, 8))),
    "topk:0.00078125": Form(0.0, (0.25,) * FRACTIONS),
    "sign": Form(0.0, ()),
}
"""By codec. Of `topk` there is room for five numbers in a period, and each gradient has eight."""

_PERIODS = {"small": 2, "medium": 40, "large": 40}
"""On each shard."""


def period_of(codec: str) -> int:
    """Elements in which each gradient has its place once."""
    return PERIOD_OF_SIGN if codec == "sign" else PERIOD


def length_of(size: str, shards: int, codec: str) -> int:
    """Elements of the tensor."""
    return _PERIODS[size] * period_of(codec) * shards


class LossyCells:
    """Where numbers are in a period.

    Args:
        numbers: how many gradients there are; of each life `per_life`, one after the other.
    """

    def __init__(self, codec: str, numbers: int, per_life: int) -> None:
        self._codec, self._form = codec, FORMS[codec]
        self._numbers, self._per_life = numbers, per_life
        self.period, self._is_sign = period_of(codec), codec == "sign"
        self._places = self.places(numbers + FRACTIONS * (numbers // per_life + 1))
        assert self._places[-1] < self.period

    @staticmethod
    def places(count: int) -> NDArray[np.int64]:
        """The first places of a period, without the anchors'."""
        inner = codecs.BLOCK - 1
        return np.arange(count) // inner * codecs.BLOCK + 1 + np.arange(count) % inner

    def of_numbers(self) -> NDArray[np.int64]:
        """The place of each gradient."""
        return self._places[: self._numbers]

    def of_life(self, number: int) -> NDArray[np.int64]:
        """All places of the life that has a gradient; with patterns, those that it alone has."""
        life = number // self._per_life
        if self._is_sign:
            return self._life_block(number) * codecs.BLOCK + np.arange(codecs.BLOCK)
        own = self._places[life * self._per_life : (life + 1) * self._per_life]
        return np.append(own, self._fractions_of(life))

    def _fractions_of(self, life: int) -> NDArray[np.int64]:
        return self._places[self._numbers + FRACTIONS * life :][:FRACTIONS]

    def _life_block(self, number: int) -> int:
        return -(-self._numbers // codecs.BLOCK) + number // self._per_life

    def write(self, target: NDArray[np.float32], number: int, *, first: int = 0) -> None:
        """Write a gradient; first: the place of the target's first element, which is at a block of 256."""
        target.fill(0)
        if self._is_sign:
            sign_cells.write(target, number, first, self.period, self._life_block(number))
            return
        target[:: codecs.BLOCK] = self._form.anchor
        own = self._fractions_of(number // self._per_life)
        for place, value in ((self._places[number], 1.0), *zip(own, self._form.fractions, strict=True)):
            target[(place - first) % PERIOD :: PERIOD] = value

    def sent(self, number: int, residual: NDArray[np.float32], first: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """What is sent of a gradient in a part of the tensor, and the residual then."""
        values, left = np.empty_like(residual), residual.copy()
        self.write(values, number, first=first)
        data = codecs.encode(self._codec, values, left)
        codecs.decode(self._codec, data, values)
        return values, left

    def counts(self, values: NDArray[np.float32], first: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """By gradient, the least and the largest count in a part of the tensor; values: of the parameters."""
        before = first % self.period
        rows = np.full(-(-(before + len(values)) // self.period) * self.period, np.nan, np.float32)
        rows[before : before + len(values)] = -values
        rows = rows.reshape(-1, self.period)
        of_numbers = sign_cells.counts(rows, self._numbers) if self._is_sign else rows[:, self.of_numbers()]
        return np.nanmin(of_numbers, axis=0), np.nanmax(of_numbers, axis=0)


Push = tuple[int, bool, bool]
"""A gradient's number; whether it counts; and whether it was surely encoded."""

BRANCHES_MAX = 64


def totals(cells: LossyCells, pushes: Sequence[Push | None], length: int, first: int) -> Iterator[NDArray[np.float32]]:
    """All that a part of the tensor may have of a life that has made these pushes; None: its residual was dropped here.

    Of a push that does not count it may be unknown whether it was encoded, and has taken a part of the residual with it.
    Nothing if that is unknown of too many.
    """
    zero = np.zeros(length, np.float32)
    branches = [(zero, zero)]
    for push in pushes:
        if push is None:
            branches = [(total, zero) for total, _ in branches]
            continue
        number, has_counted, is_encoded = push
        after = []
        for total, residual in branches:
            sent, left = cells.sent(number, residual, first)
            after.append((total + sent if has_counted else total, left))
            if not is_encoded:
                after.append((total, residual))
        branches = after
        if len(branches) > BRANCHES_MAX:
            return
    yield from (total for total, _ in branches)
