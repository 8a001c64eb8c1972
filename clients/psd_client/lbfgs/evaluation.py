"""Evaluation of the loss by all workers: each one's share, and what the leader learns of all shares.

A worker puts its gradient in a vector of its own. When that is complete on all shards, it puts one line into a small vector of
all workers: the number of the evaluation, the loss, and a trouble if there is one. So the leader knows whose shares are whole.
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
"""Troubles of the leader's."""


class Shares(NamedTuple):
    """Shares of all workers: their losses, or the first one's trouble and its rank."""

    losses: list[float]
    failed_rank: int = 0
    trouble: int = 0


class Evaluator:
    """One worker's part of evaluations.

    Attributes:
        x: the last point, as this worker has pulled it. error: what `loss_and_grad` has raised.
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
        """Store this worker's share of the loss and its gradient at the point that the state names."""
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
        """The shares of all workers, for the leader."""
        lines = self._shares.pull().reshape(-1, _LINE)
        for rank, (number, _, trouble) in enumerate(lines.tolist()):
            if number != state.nfev or trouble:
                return Shares([], rank, int(trouble) if number == state.nfev else _MISSING)
        return Shares(lines[:, 1].tolist())

    def failure(self, state: State) -> Exception:
        """The error that a failed evaluation is on this worker."""
        if self.error is not None:
            return self.error
        return trouble_error(state.failed_rank, state.trouble, state.nfev)


def trouble_error(rank: int, trouble: int, number: int) -> PsdError:
    """Error of a worker's trouble in an evaluation, which has a number."""
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
