"""State of a minimization, stored on the shards in one small vector: how far it is, and what the workers do next.

A vector of one stripe lies on one shard, so that a new state replaces the old one atomically. The vectors that a state names (a
point, the history's pairs) are complete on all shards before the state is written, and do not change until another state has
replaced it. So the minimization can continue from there, whatever process is killed. Must not know batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from psd.contract.errors import InvalidRequest

_FORMAT = 1
CONTROL = "control"
"""Name of the vector that holds the state."""
SIZE = 64
"""Size of that vector."""

HISTORY_MAX = 20
LOOK_BACK = 5
"""Iterations over which the decrease of the objective is judged: a single one may be small by chance."""


class Order(IntEnum):
    """Request of the leader to the workers."""

    EVALUATE = 1  # the loss and its gradient, at the point `at`
    FINISH = 2
    FAIL = 3


class Status(IntEnum):
    """Reason for the end; the numbers are SciPy's where it has the same reason."""

    CONVERGED_GRADIENT = 0
    MAX_ITERATIONS = 1
    NO_STEP = 2
    CONVERGED_DECREASE = 3
    RUNNING = 4
    STOPPED = 99


@dataclass
class State:
    """State of a minimization.

    Attributes:
        l1, l2, history: the problem's parameters; they never change.
        point: number of the current point, 0 or 1; the other one is the trial point.
        slots: slots of the pairs in the history, oldest first.
        recent: objectives after the last iterations; the last one is the current objective.
        order, at: what the workers do, and the number of the point to evaluate.
        failed_rank, trouble: rank of the worker that has failed, and its trouble, see evaluation.py.
        nit, nfev: number of iterations; number of evaluations, including the one that `order` asks for.
        step: length of the last step.
    """

    l1: float
    l2: float
    history: int
    point: int = 0
    slots: list[int] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)
    order: Order = Order.EVALUATE
    at: int = 0
    failed_rank: int = 0
    trouble: int = 0
    nit: int = 0
    nfev: int = 0
    gradient_norm: float = math.nan
    step: float = 0.0
    status: Status = Status.RUNNING

    @property
    def fun(self) -> float:
        """The objective at the current point; NaN before it is known."""
        return self.recent[-1] if self.recent else math.nan

    def free_slot(self) -> int:
        """A slot for the next pair. One is always free: there is one slot more than pairs in the history."""
        return next(slot for slot in range(self.history + 1) if slot not in self.slots)

    def pack(self) -> list[float]:
        """The state as the numbers of the vector."""
        numbers = [_FORMAT, self.l1, self.l2, self.history, self.point, self.order, self.at, self.failed_rank, self.trouble]
        numbers += [self.nit, self.nfev, self.gradient_norm, self.step, self.status]
        numbers += [len(self.slots), *self.slots, len(self.recent), *self.recent]
        return [*numbers, *[0.0] * (SIZE - len(numbers))]

    @classmethod
    def unpack(cls, numbers: Sequence[float]) -> State | None:
        """The state that the vector's numbers hold; None if none has been stored yet."""
        form, l1, l2, history, point, order, at, failed_rank, trouble, nit, nfev, gradient_norm, step, status, *lists = numbers
        if not form:
            return None
        count = int(lists[0])
        slots, lists = [int(slot) for slot in lists[1 : 1 + count]], lists[1 + count :]
        return cls(
            l1, l2, int(history), int(point), slots, list(lists[1 : 1 + int(lists[0])]), Order(int(order)), int(at),
            int(failed_rank), int(trouble), int(nit), int(nfev), gradient_norm, step, Status(int(status)),
        )  # fmt: skip

    def check_same(self, name: str, problem: State) -> None:
        """Raise InvalidRequest if this state belongs to a problem with other parameters."""
        for of in ("l1", "l2", "history"):
            here, there = getattr(problem, of), getattr(self, of)
            if here != there:
                raise InvalidRequest(
                    f"{of}: is {here:g}, but the minimization {name!r} on the shards has {there:g}; give this one another name"
                )

    def why_stop(self, max_iterations: int, tolerance: float) -> Status:
        """Reason to end here, or RUNNING."""
        if self.gradient_norm <= tolerance:
            return Status.CONVERGED_GRADIENT
        before, now = self.recent[0], self.recent[-1]
        if len(self.recent) > LOOK_BACK and before - now <= tolerance * max(abs(before), abs(now), 1.0):
            return Status.CONVERGED_DECREASE
        return Status.MAX_ITERATIONS if self.nit >= max_iterations else Status.RUNNING

    def advance(self, fun: float) -> None:
        """Make the trial point the current one. fun: the objective there."""
        self.point = 1 - self.point
        self.nit += 1
        self.recent = [*self.recent[-LOOK_BACK:], fun]
