"""Local steps that can be told apart in a job's parameters: each has a digit of its own, in every fragment and every block.

A step has a number. It moves a learner's parameters by `-RADIX ** digit` at every CELLS-th element of each fragment; so with
SGD(lr=1) inside and outside, and reduce="sum", the parameters are, negated, integers whose digits say how often each step has
counted. They stay below 2 ** 24: float32 has all of them. Knows nothing of learners and faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

CELLS = 2048
RADIX = 8
DIGITS = 8
NUMBERS = CELLS * DIGITS
"""How many steps a job can tell apart."""

STEPS_PER_LIFE = NUMBERS // 28

_ROUNDS = {"small": 2, "medium": 60, "large": 200}
"""How often a fragment has each cell, on each shard."""


def fragment_names(count: int) -> list[str]:
    """The tensors, of one fragment each."""
    return [f"f{index}" for index in range(count)]


def length_of(size: str, shards: int) -> int:
    """Elements of a fragment."""
    return _ROUNDS[size] * CELLS * shards


def place_and_size(number: int) -> tuple[int, float]:
    """Where a step moves a fragment first, and by how much. Neighbouring steps have neighbouring places, and the same size."""
    digit, cell = divmod(number, CELLS)
    return cell, float(RADIX**digit)


def counts_of(values: NDArray[np.float32], numbers: Sequence[int]) -> tuple[NDArray[Any], NDArray[Any]]:
    """By step, how often it has counted in a fragment where it did least, and where it did most."""
    digits, cells = np.divmod(np.array(numbers, np.int64), CELLS)
    rows = -values.reshape(-1, CELLS)[:, cells].astype(np.int64)
    counts = rows // RADIX**digits % RADIX
    return counts.min(axis=0), counts.max(axis=0)
