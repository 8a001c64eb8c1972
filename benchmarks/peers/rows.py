"""The work that psd and every reference do on a sparse table: ids by Zipf's law, gradients, and what comes out.

A step pulls the rows of its ids and pushes a gradient for each; the rule is Adagrad, and rows begin as zeros. An id's gradient
is a small whole number, the same whenever the id is drawn, so that sums are exact. psd gets the ids as they were drawn, with
repetitions, and sorts them out; references get each distinct id once, with the sum of its gradients.

NumPy alone: peers import it under interpreters that know nothing of psd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LR = 0.05
EPS = 1e-10
BATCHES = 8
"""Batches of a worker; it goes through them over and over."""

Array = NDArray[Any]


class Batch(NamedTuple):
    """One table's part of a step: ids as drawn; and distinct, in the order of their first appearance, with their counts."""

    drawn: Array
    ids: Array
    counts: Array


class Shape(NamedTuple):
    """Sizes of a job.

    Attributes:
        tables: that are alike. rows: of each. dim: numbers of a row. ids: drawn for a table and step. exponent: of Zipf's law.
    """

    tables: int
    rows: int
    dim: int
    ids: int
    exponent: float


def draw(rows: int, ids: int, steps: int, exponent: float, seed: int = 1) -> list[Batch]:
    """Batches. Whether a row is hot does not depend on its id."""
    weights = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
    names = np.random.default_rng(1).permutation(rows)
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(steps):
        drawn = names[np.searchsorted(weights, rng.uniform(0, weights[-1], ids))]
        distinct, first, counts = np.unique(drawn, return_index=True, return_counts=True)
        order = np.argsort(first)
        found.append(Batch(drawn, distinct[order], counts[order]))
    return found


def batches(shape: Shape, rank: int) -> list[list[Batch]]:
    """A worker's batches, with one part for each table."""
    by_table = [
        draw(shape.rows, shape.ids, BATCHES, shape.exponent, seed=2 + 1000 * table + rank) for table in range(shape.tables)
    ]
    return [list(parts) for parts in zip(*by_table, strict=True)]


def gradients(ids: Array, counts: Array | int, dim: int) -> Array:
    """Gradients (n, dim) of ids that were drawn so often."""
    return np.repeat(((1 + ids % 3) * counts).astype(np.float32)[:, None], dim, axis=1)


class Check:
    """Rows of the first table that this worker alone touches, so that no other's pace matters, and what they must hold."""

    def __init__(self, shape: Shape, rank: int, workers: int, sample: int = 500) -> None:
        of_rank = [[parts[0] for parts in batches(shape, other)] for other in range(workers)]
        others = [batch.ids for other, of_other in enumerate(of_rank) if other != rank for batch in of_other]
        mine = np.unique(np.concatenate([batch.ids for batch in of_rank[rank]]))
        self.ids = (np.setdiff1d(mine, np.concatenate(others)) if others else mine)[:sample].astype(np.int64)
        self._grads = np.zeros((BATCHES, len(self.ids)), np.float32)
        for number, batch in enumerate(of_rank[rank]):
            _, at, where = np.intersect1d(self.ids, batch.ids, return_indices=True)
            self._grads[number, at] = gradients(batch.ids[where], batch.counts[where], 1)[:, 0]

    def difference(self, values: Array, steps: int) -> str:
        """The fault of the rows (n, dim) of `ids` after so many steps; empty: nothing."""
        due, total = np.zeros(len(self.ids), np.float32), np.zeros(len(self.ids), np.float32)
        for step in range(steps):
            grad = self._grads[step % BATCHES]
            total += grad * grad
            due -= np.float32(LR) * grad / (np.sqrt(total) + np.float32(EPS))
        wrong = np.flatnonzero(~np.isclose(values, due[:, None], rtol=1e-4, atol=1e-6).all(axis=1))
        if wrong.size == 0:
            return ""
        return (
            f"{wrong.size} of {len(due)} rows are wrong; id {self.ids[wrong[0]]} has {values[wrong[0], 0]}, not {due[wrong[0]]}"
        )


class Turn:
    """Goes through a worker's batches, with gradients made beforehand."""

    def __init__(self, told: dict[str, Any], *, as_drawn: bool = False, in_one: bool = False) -> None:
        shape = Shape(*told["shape"])
        self.shape = shape
        self.parts: list[list[tuple[Array, Array]]] = [
            [
                (part.drawn, gradients(part.drawn, 1, shape.dim))
                if as_drawn
                else (part.ids, gradients(part.ids, part.counts, shape.dim))
                for part in parts
            ]
            for parts in batches(shape, told["rank"])
        ]
        self.check = Check(shape, told["rank"], told["workers"])
        if in_one:  # the first table's ids stay what they are
            self.parts = [
                [
                    (
                        np.concatenate([ids + table * shape.rows for table, (ids, _) in enumerate(parts)]),
                        np.concatenate([grads for _, grads in parts]),
                    )
                ]
                for parts in self.parts
            ]
            self.shape = shape._replace(tables=1, rows=shape.rows * shape.tables)
        self._step = 0

    def following(self) -> Sequence[tuple[Array, Array]]:
        """Ids and gradients that `next` will return."""
        return self.parts[self._step % BATCHES]

    def next(self) -> Sequence[tuple[Array, Array]]:
        """Ids and gradients of the next step, a pair for each table."""
        parts = self.following()
        self._step += 1
        return parts
