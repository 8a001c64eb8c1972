"""Local steps that can be told apart in a job's parameters: each has a place of its own, in every fragment and every block.

A step has a number. It moves a learner's parameters by `-RADIX ** digit` at `width` elements of every `cells` times `width` of
each fragment; so with SGD(lr=1) inside and outside, and reduce="sum", the parameters are, negated, integers whose digits say
how often each step has counted. They stay below 2 ** 24: float32 has all of them.

Where parameters come back with an error, there is one digit, and its count is rounded. Where differences are merged by their
directions, or with momentum, a step that counts is only not 0; merge_replay.py knows what it must come to. There all steps have
a little in common, at one place more, the anchor: so their differences are never opposed, and never orthogonal. `sign` has an
exact form of 256 equal numbers alone: these are a step's width. Knows nothing of learners and faults.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd_core import codecs

RADIX = 8
LIVES = 28
MERGES_BY_DIRECTION = ("rda", "heloco")
ANCHOR = 1 / 16
NEAR = 0.25
"""By how much a rounded count may be off."""

_ELEMENTS = {"small": 2 * 2048, "medium": 60 * 2048, "large": 200 * 2048}
"""Of a fragment, on each shard, or a whole period."""


def fragment_names(count: int) -> list[str]:
    """The tensors, of one fragment each."""
    return [f"f{index}" for index in range(count)]


@dataclass(frozen=True)
class LearnerCells:
    """Where steps are, and how their counts are read.

    Attributes:
        cells, digits, width: see above. is_near: counts are rounded. is_presence: a step counts, or does not; the last cell is
            the anchor.
    """

    cells: int
    digits: int
    width: int = 1
    is_near: bool = False
    is_presence: bool = False

    @classmethod
    def of(cls, codec: str, pull: str, merge: str) -> LearnerCells:
        """As the job's terms have them."""
        if merge in MERGES_BY_DIRECTION:
            return cls(16384, 1, is_near=True, is_presence=True)
        if pull:
            return cls(16384, 1, is_near=True)
        return cls(512, 8, codecs.BLOCK) if codec == "sign" else cls(2048, 8)

    @property
    def numbers(self) -> int:
        """How many steps a job can tell apart."""
        return self.cells * self.digits - self.is_presence

    @property
    def per_life(self) -> int:
        """How many of them each life of a learner has."""
        return self.numbers // LIVES

    def length(self, size: str, shards: int) -> int:
        """Elements of a fragment."""
        period = self.cells * self.width
        return max(1, _ELEMENTS[size] // period) * period * shards

    def write(self, target: NDArray[np.float32], number: int, times: float = 1) -> None:
        """Write a step into a fragment of zeros, and with times=0 zeros again. Neighbouring steps have neighbouring places, and
        the same size."""
        digit, cell = divmod(number, self.cells)
        rows = target.reshape(-1, self.cells, self.width)
        rows[:, cell] = times * float(RADIX**digit)
        if self.is_presence:
            rows[:, self.numbers] = times * ANCHOR

    def total(self, length: int, numbers: Iterable[int], times: int = 1) -> NDArray[np.float32]:
        """(length,) the sum of these steps, each so many times."""
        total, step = (np.zeros(length, np.float32) for _ in range(2))
        for number in numbers:
            self.write(step, number, times)
            total += step
            self.write(step, number, 0)
        return total

    def counts(self, values: NDArray[np.float32], numbers: Sequence[int]) -> tuple[NDArray[Any], NDArray[Any]]:
        """By step, how often it has counted in a fragment where it did least, and where it did most."""
        digits, cells = np.divmod(np.array(numbers, np.int64), self.cells)
        rows = -values.reshape(-1, self.cells, self.width)
        least, most = np.zeros(len(digits), np.int64), np.zeros(len(digits), np.int64)
        for begin in range(0, len(digits), 256):  # a part at a time: there may be many elements
            part = slice(begin, begin + 256)
            own = rows[:, cells[part]]
            if self.is_presence:
                counts = (own != 0).astype(np.int64)
            else:
                counts = np.rint(own).astype(np.int64) // RADIX ** digits[part][None, :, None] % RADIX
            least[part], most[part] = counts.min(axis=(0, 2)), counts.max(axis=(0, 2))
        return least, most

    def is_whole(self, values: NDArray[np.float32]) -> bool:
        """True if all elements are what steps can lead to."""
        if self.is_presence:
            return bool(np.all(np.isfinite(values) & (values <= 0)))
        return bool(np.all((values <= NEAR * self.is_near) & (abs(values - np.rint(values)) <= NEAR * self.is_near)))
