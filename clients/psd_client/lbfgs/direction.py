"""Direction of L-BFGS, from the dot products of its history alone. Must not know vectors or workers.

The two-loop recursion (Nocedal and Wright, algorithm 7.4) only takes dot products of vectors and adds multiples of them. If all
dot products are known, it needs no vectors, and its result is one factor for each vector: Chen, Wang and Zhou, Large-scale
L-BFGS using MapReduce, NIPS 2014.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

GRADIENT = "gradient"


def step_name(slot: int) -> str:
    """Name of the vector s of a pair, the difference of two points."""
    return f"s.{slot}"


def change_name(slot: int) -> str:
    """Name of the vector y of a pair, the difference of two gradients."""
    return f"y.{slot}"


class Products:
    """Dot products of vectors, by the names of both, in either order."""

    def __init__(self) -> None:
        self._values: dict[frozenset[str], float] = {}

    def __getitem__(self, names: tuple[str, str]) -> float:
        return self._values[frozenset(names)]

    def enter(self, rows: Sequence[str], columns: Sequence[str], values: NDArray[np.float64]) -> None:
        """Store dot products, an array (rows, columns); they replace older ones."""
        for row, of_row in zip(rows, values.tolist(), strict=True):
            self._values.update({frozenset((row, column)): value for column, value in zip(columns, of_row, strict=True)})


def direction(slots: Sequence[int], products: Products) -> dict[str, float]:
    """The direction, as a factor for the gradient and for each vector of the pairs.

    Args:
        slots: slots of the pairs, oldest first.
        products: dot products of every y with every y and every s, and of each of these with the gradient.

    Sums are rounded only once, so that they are the same in every version of Python.
    """
    count = range(len(slots))
    s, y = [step_name(slot) for slot in slots], [change_name(slot) for slot in slots]
    alpha = [0.0] * len(slots)
    for i in reversed(count):
        left = math.fsum([products[s[i], GRADIENT], *(-alpha[j] * products[s[i], y[j]] for j in range(i + 1, len(slots)))])
        alpha[i] = left / products[s[i], y[i]]
    scale = products[s[-1], y[-1]] / products[y[-1], y[-1]] if slots else 1.0
    difference = [0.0] * len(slots)  # alpha - beta
    for i in count:
        left = math.fsum([products[y[i], GRADIENT], *(-alpha[j] * products[y[i], y[j]] for j in count)])
        gained = math.fsum([scale * left, *(difference[j] * products[s[j], y[i]] for j in range(i))])
        difference[i] = alpha[i] - gained / products[s[i], y[i]]
    return {GRADIENT: -scale} | {y[j]: scale * alpha[j] for j in count} | {s[j]: -difference[j] for j in count}
