"""Gradients for the codec `sign`, which has no exact form of a lone number: patterns of one magnitude take the numbers' place.

A period has blocks of 256 elements, each for 256 gradients: a gradient adds its row of a Hadamard matrix, plus or minus 1
everywhere, which the codec has exactly, and of a sum of such rows each row's share can be told. Behind them each life of a
worker has a block of unequal fractions, of which its gradients leave residuals. Knows nothing of workers and faults.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from psd_core.codecs import BLOCK

FRACTIONS = np.arange(BLOCK, dtype=np.float32) % 7 / 8 + np.float32(0.125)


@functools.cache
def _patterns() -> NDArray[np.float32]:
    """(BLOCK, BLOCK) of plus and minus 1, whose rows are orthogonal."""
    found = np.ones((1, 1), np.float32)
    while len(found) < BLOCK:
        found = np.block([[found, found], [found, -found]])
    return found


def write(target: NDArray[np.float32], number: int, first: int, period: int, life_block: int) -> None:
    """Write a gradient into a target of zeros; first: the place of its first element; life_block: of the life's fractions."""
    for block, values in ((number // BLOCK, _patterns()[number % BLOCK]), (life_block, FRACTIONS)):
        for begin in range((block * BLOCK - first) % period, len(target), period):
            target[begin : begin + BLOCK] = values


def counts(rows: NDArray[np.float32], numbers: int) -> NDArray[np.float64]:
    """By period and gradient, how often it is in the sums (periods, elements); NaN where its block is not there."""
    blocks = -(-numbers // BLOCK)
    sums = rows[:, : blocks * BLOCK].reshape(len(rows), blocks, BLOCK).astype(np.float64)
    return (sums @ _patterns().T.astype(np.float64) / BLOCK).reshape(len(rows), -1)[:, :numbers]
