"""Iterations of L-BFGS, made by the leader: it runs batches on the shards' vectors, and decides by the numbers that come back.

All vectors have the size of x: two points with their gradients (x.0, x.1, g.0, g.1), the direction, and the history's pairs
(s.i, y.i); with L1 also the pseudo-gradient, the orthant, and a scratch vector. Their elements never come here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from psd_client.lbfgs.direction import GRADIENT, Products, change_name, direction, step_name
from psd_client.lbfgs.evaluation import Open, Shares
from psd_client.lbfgs.line_search import NoStep, Search, backtracking, strong_wolfe
from psd_client.lbfgs.state import CONTROL, SIZE, State

CURVATURE_MIN = 2.0**-52
"""A pair enters the history if s.y is more than this share of y.y, as in SciPy's L-BFGS-B."""


class Iterations:
    """Makes the iterations that follow a state.

    Args:
        new_batch: makes a batch. open_vector: opens a vector. state: the state to begin with; each iteration changes it.
        size, world_size: number of elements of x, number of workers.
        evaluate: has all workers evaluate the loss at the point `state.at`; returns their losses.
    """

    def __init__(
        self,
        new_batch: Callable[[], Any],
        open_vector: Open,
        state: State,
        size: int,
        world_size: int,
        evaluate: Callable[[], Shares],
    ) -> None:
        self.state = state
        self._new_batch = new_batch
        self._open = open_vector
        self._size = size
        self._evaluate = evaluate
        self._parts = [self._vector(f"part.{rank}") for rank in range(world_size)]
        self._products = Products()

    def _vector(self, name: str) -> Any:
        if name == GRADIENT:
            name = "pseudo_gradient" if self.state.l1 else f"g.{self.state.point}"
        return self._open(name, self._size)

    def start(self) -> None:
        """Evaluate the first point, if that is not done yet, and prepare the first direction.

        Raises:
            NoStep: the loss is infinite at the first point.
        """
        state = self.state
        if not state.recent:
            state.at = state.point
            self._ask(self._new_batch())
            fun, _ = self._value(state.point)
            if fun == math.inf:
                raise NoStep
            state.recent = [fun]
        self._prepare(self._new_batch(), [], state.slots)

    def iterate(self) -> None:
        """Make one iteration.

        Raises:
            NoStep: no step was found that makes the objective smaller; the point is as before.
        """
        try:
            self._step()
        except NoStep:
            if not self.state.slots:
                raise
            self.state.slots = []  # without a history the direction is the gradient's, as at the beginning
            self._step()

    def _step(self) -> None:
        state = self.state
        trial, pair = 1 - state.point, state.free_slot()
        slope, first = self._direct()
        search: Search = backtracking(state.fun, first) if state.l1 else strong_wolfe(state.fun, slope, first)
        step = next(search)
        while True:
            promised = self._try(step, trial, pair)
            fun, slope = self._value(trial)
            try:
                step = search.send((fun, promised if state.l1 else slope))
            except StopIteration as found:
                state.step = found.value
                break
        state.advance(fun)
        self._accept(pair)

    def _direct(self) -> tuple[float, float]:
        """Compute the direction; return the slope along it, which is negative, and the step to try first."""
        state = self.state
        while True:
            multiples = direction(state.slots, self._products)
            d = self._vector("direction")
            sign = -1.0 if state.l1 else 1.0
            with self._new_batch() as b:
                b.combine(d, [sign * multiple for multiple in multiples.values()], [self._vector(name) for name in multiples])
                if state.l1:
                    b.zip(d, "project", self._vector(GRADIENT))  # keep only elements of the opposite sign
                    b.scale(d, -1.0)
                slope, square = b.dot(d, self._vector(GRADIENT)), b.dot(self._vector(GRADIENT), self._vector(GRADIENT))
            if float(slope) < 0 and math.isfinite(float(slope)):
                return float(slope), 1.0 if state.slots else 1 / math.sqrt(float(square))
            if not state.slots:
                raise NoStep
            state.slots = []

    def _try(self, step: float, trial: int, pair: int) -> float:
        """Ask for an evaluation after this step; return the change of the objective that the (pseudo-)gradient predicts."""
        state = self.state
        x, tried, moved = self._vector(f"x.{state.point}"), self._vector(f"x.{trial}"), self._vector(step_name(pair))
        b = self._new_batch()
        b.combine(tried, [1.0, step], [x, self._vector("direction")])
        if state.l1:
            b.zip(tried, "project", self._vector("orthant"))
        b.combine(moved, [1.0, -1.0], [tried, x])
        promised = b.dot(moved, self._vector(GRADIENT))
        state.at = trial
        self._ask(b)
        return float(promised)

    def _ask(self, b: Any) -> None:
        """Add the state to a batch, and run it; a stored state with a new number asks the workers for an evaluation."""
        self.state.nfev += 1
        b.put(self._open(CONTROL, SIZE), self.state.pack())
        b.run()

    def _value(self, at: int) -> tuple[float, float]:
        """Compute the gradient at a point; return the objective there, and the slope along the direction."""
        state = self.state
        losses = self._evaluate().losses
        x, g = self._vector(f"x.{at}"), self._vector(f"g.{at}")
        terms = []
        with self._new_batch() as b:
            b.copy(g, self._parts[0])
            for part in self._parts[1:]:
                b.axpy(g, 1.0, part)
            if state.l2:
                b.axpy(g, state.l2, x)
                terms.append((state.l2 / 2, b.dot(x, x)))
            if state.l1:
                b.map(self._vector("scratch"), "abs", of=x)
                terms.append((state.l1, b.sum(self._vector("scratch"))))
            along = b.dot(g, self._vector("direction"))
        return _total([*losses, *(factor * float(value) for factor, value in terms)]), float(along)

    def _accept(self, pair: int) -> None:
        """Add the accepted step's (s, y) to the history if its curvature is large enough; prepare the next direction."""
        state = self.state
        s, y = step_name(pair), change_name(pair)
        b = self._new_batch()
        b.combine(self._vector(y), [1.0, -1.0], [self._vector(f"g.{at}") for at in (state.point, 1 - state.point)])
        slots = [*state.slots, pair][-state.history :]
        self._prepare(b, slots[:-1], slots[-1:])
        state.slots = slots if self._products[s, y] > CURVATURE_MIN * self._products[y, y] else slots[:-1]

    def _prepare(self, b: Any, known: list[int], fresh: list[int]) -> None:
        """Run a batch, and add to it what the next direction needs: the gradient's norm and dot products of the pairs.

        known: slots of the pairs whose products with each other are known. fresh: slots of the other pairs, which are newer.
        """
        state = self.state
        gradient = self._vector(GRADIENT)
        if state.l1:
            x = self._vector(f"x.{state.point}")
            b.zip(gradient, "pseudo_gradient", self._vector(f"g.{state.point}"), state.l1, of=x)
            b.zip(self._vector("orthant"), "orthant", gradient, of=x)
        low, high = b.min(gradient), b.max(gradient)
        pairs = [*map(step_name, known + fresh), *map(change_name, known + fresh)]
        tables = [([GRADIENT, *map(change_name, fresh)], pairs), ([*map(step_name, fresh)], [*map(change_name, known)])]
        found = [
            (rows, columns, b.gram([self._vector(name) for name in rows], [self._vector(name) for name in columns]))
            for rows, columns in tables
            if rows and columns
        ]
        b.run()
        for rows, columns, answer in found:
            self._products.enter(rows, columns, answer.value)
        state.gradient_norm = max(-float(low), float(high))


def _total(terms: list[float]) -> float:
    """The sum, rounded once; infinite if it exceeds the range of float64, as after a step that is too long."""
    try:
        return math.fsum(terms)
    except OverflowError:
        return math.inf
