"""Evaluation of the loss by all workers: how each one stores its share, and how the leader collects them.

Each worker puts its gradient into its own vector. Once that is complete on all shards, it writes one line into a small vector
that all workers share: the number of the evaluation, the loss, and the trouble if there was one. So the leader can tell which
shares are complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import InvalidRequest, InvalidTensor, NonFiniteGradient, PsdError, WorkerFailed
from psd_client.lbfgs.state import State

LossAndGrad = Callable[[NDArray[np.float64]], tuple[float, Any]]
Open = Callable[[str, int], Any]
"""Open a vector of float64 of the minimization, by name and size."""

_LINE = 3
_MISSING, _RAISED, _BAD_LOSS, _BAD_GRADIENT = -1, -2, -3, 1  # a gradient's element i that is not finite: 1 + i
INFINITE_START, CALLBACK_RAISED = -4, -5
"""Troubles that only the leader can have."""


class Shares(NamedTuple):
    """Losses of all workers; or, if some have failed, the rank and the trouble of the first of them."""

    losses: list[float]
    failed_rank: int = 0
    trouble: int = 0


class Evaluator:
    """One worker's part in evaluations.

    Attributes:
        x: the last point that this worker has pulled. error: the error that `loss_and_grad` has raised, or None.
    """

    def __init__(self, open_vector: Open, rank: int, world_size: int, size: int, loss_and_grad: LossAndGrad) -> None:
        self._open = open_vector
        self._rank = rank
        self._size = size
        self._world_size = world_size
        self._loss_and_grad = loss_and_grad
        self._shares = open_vector(f"shares.{world_size}", _LINE * world_size)
        self.x: NDArray[np.float64] = np.empty(0)
        self.error: Exception | None = None

    def evaluate(self, state: State) -> None:
        """Compute and store this worker's share of the loss and of the gradient, at the point `state.at`."""
        self.x = self._open(f"x.{state.at}", self._size).pull()
        loss, trouble = math.nan, 0
        try:
            loss, gradient = self._checked(*self._loss_and_grad(self.x.copy()))
        except Exception as error:  # noqa: BLE001 - raised when the others know of it
            self.error, trouble = error, _RAISED
        else:
            if loss != loss or loss == -math.inf:
                trouble = _BAD_LOSS
            elif loss != math.inf and not np.isfinite(gradient).all():
                trouble = _BAD_GRADIENT + int(np.flatnonzero(~np.isfinite(gradient))[0])
            if not trouble and loss != math.inf:
                self._open(f"part.{self._rank}", self._size).put(gradient)
        self._shares.put([state.nfev, loss, trouble], _LINE * self._rank)

    def _checked(self, loss: Any, gradient: Any) -> tuple[float, NDArray[np.float64]]:
        gradient = np.asarray(gradient)
        if np.ndim(loss) or np.iscomplexobj(loss):
            raise InvalidTensor(f"loss_and_grad: the loss must be one number, got shape {np.shape(loss)}")
        if gradient.shape != self.x.shape or gradient.dtype.kind not in "fiu":
            raise InvalidTensor(
                f"loss_and_grad: the gradient must have the shape of x, {self.x.shape}, and real numbers, got "
                f"{gradient.shape} of {gradient.dtype}"
            )
        return float(loss), gradient.astype(np.float64, copy=False)

    def shares(self, state: State) -> Shares:
        """Losses of all workers, or the first trouble; called by the leader."""
        lines = self._shares.pull().reshape(-1, _LINE)
        for rank, (number, _, trouble) in enumerate(lines.tolist()):
            if number != state.nfev or trouble:
                return Shares([], rank, int(trouble) if number == state.nfev else _MISSING)
        return Shares(lines[:, 1].tolist())

    def failure(self, state: State) -> Exception:
        """The error to raise on this worker after a failed evaluation."""
        if self.error is not None:
            return self.error
        return trouble_error(state.failed_rank, state.trouble, state.nfev)


def trouble_error(rank: int, trouble: int, number: int) -> PsdError:
    """The error that describes a worker's trouble. number: number of the evaluation."""
    if trouble == _MISSING:
        return WorkerFailed(f"worker {rank} left during evaluation {number} of the loss: its share is missing", rank=rank)
    if trouble == _RAISED:
        return WorkerFailed(f"loss_and_grad has raised on worker {rank} in evaluation {number}; its log says what", rank=rank)
    if trouble == CALLBACK_RAISED:
        return WorkerFailed(f"the callback has raised on worker {rank}; its log says what", rank=rank)
    if trouble == INFINITE_START:
        return InvalidRequest("x0: the loss is infinite there")
    what = "loss is NaN or -inf" if trouble == _BAD_LOSS else f"gradient is not finite at index {trouble - _BAD_GRADIENT}"
    return NonFiniteGradient(f"loss_and_grad of worker {rank}, evaluation {number}: the {what}", rank=rank)
