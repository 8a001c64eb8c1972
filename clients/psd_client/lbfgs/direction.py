"""Direction of L-BFGS, from the dot products of its history alone. Must not know vectors or workers.

The two-loop recursion (Nocedal and Wright, algorithm 7.4) adds multiples of vectors that it has dot products of. So it can be
carried out on these products, and its result is one number for each vector: Chen, Wang and Zhou, Large-scale L-BFGS using
MapReduce, NIPS 2014.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Product = tuple[str, str]
"""Names of two vectors."""

GRADIENT = "gradient"


def step_name(slot: int) -> str:
    """Name of a pair's difference of points."""
    return f"s.{slot}"


def change_name(slot: int) -> str:
    """Name of a pair's difference of gradients."""
    return f"y.{slot}"


def products_of(slots: Sequence[int]) -> list[Product]:
    """Products that `direction` needs for the pairs in these slots, oldest first; those with the gradient come last."""
    changes = [change_name(slot) for slot in slots]
    among = [(step_name(slot), change) for slot in slots for change in changes]
    among += [(changes[i], changes[j]) for i in range(len(slots)) for j in range(i + 1)]
    return [*among, *((name(slot), GRADIENT) for slot in slots for name in (step_name, change_name))]


def direction(slots: Sequence[int], products: Mapping[Product, float]) -> dict[str, float]:
    """Multiples of the gradient and of the pairs' vectors whose sum is the direction.

    Sums are rounded once, so that they are the same in every version of Python.
    """
    count = range(len(slots))
    s, y = [step_name(slot) for slot in slots], [change_name(slot) for slot in slots]

    def of_changes(i: int, j: int) -> float:
        return products[y[max(i, j)], y[min(i, j)]]

    alpha = [0.0] * len(slots)
    for i in reversed(count):
        left = math.fsum([products[s[i], GRADIENT], *(-alpha[j] * products[s[i], y[j]] for j in range(i + 1, len(slots)))])
        alpha[i] = left / products[s[i], y[i]]
    scale = products[s[-1], y[-1]] / of_changes(-1 % len(slots), -1 % len(slots)) if slots else 1.0
    difference = [0.0] * len(slots)  # alpha - beta
    for i in count:
        left = math.fsum([products[y[i], GRADIENT], *(-alpha[j] * of_changes(i, j) for j in count)])
        gained = math.fsum([scale * left, *(difference[j] * products[s[j], y[i]] for j in range(i))])
        difference[i] = alpha[i] - gained / products[s[i], y[i]]
    return {GRADIENT: -scale} | {y[j]: scale * alpha[j] for j in count} | {s[j]: -difference[j] for j in count}
