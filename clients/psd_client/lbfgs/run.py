"""One call of minimize: the leader's loop, and that of the others. They meet at a barrier before and after each evaluation."""

from __future__ import annotations

import math
import numbers
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.contract.arguments import whole_number
from psd.contract.errors import InvalidRequest, InvalidTensor, NonFiniteGradient, RolledBack, WorkerFailed
from psd_client.client import ParameterServer
from psd_client.lbfgs import state as states
from psd_client.lbfgs.evaluation import CALLBACK_RAISED, INFINITE_START, Evaluator, LossAndGrad, Shares
from psd_client.lbfgs.iteration import Iterations
from psd_client.lbfgs.line_search import NoStep
from psd_client.lbfgs.state import Order, State, Status

LEADER = 0

MESSAGES = {
    Status.CONVERGED_GRADIENT: "converged: no element of the gradient is above the tolerance",
    Status.CONVERGED_DECREASE: "converged: the objective's relative decrease in 5 iterations is at most the tolerance",
    Status.MAX_ITERATIONS: "the limit of iterations is reached",
    Status.NO_STEP: "line search failed: no step makes the objective smaller; is the gradient that of the loss?",
    Status.STOPPED: "stopped by the callback",
    Status.RUNNING: "running",
}

_finished: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # connection -> calls that have returned


@dataclass(frozen=True)
class Result:
    """Result of `minimize`, the same on all workers; the names are those of SciPy's OptimizeResult.

    Attributes:
        x: the point, a new array. fun: the objective there, including the terms of l1 and l2.
        nit: number of iterations. nfev: number of evaluations of the loss.
        success: True if the tolerance was reached. message: how the minimization ended, in words.
        status: the same as a number. The tolerance was reached: 0 by the gradient, 3 by the decrease of the objective. 1: the
            limit of iterations was reached. 2: the line search has failed. 99: the callback has raised StopIteration. 4, in a
            callback only: still running.
        gradient_norm: the largest absolute value in the gradient (with l1, in the pseudo-gradient).
        step: length of the last step, as a multiple of the direction.
    """

    x: NDArray[np.float64]
    fun: float
    nit: int
    nfev: int
    success: bool
    status: int
    message: str
    gradient_norm: float
    step: float


Callback = Callable[[Result], object]


def minimize(
    ps: ParameterServer,
    loss_and_grad: LossAndGrad,
    x0: Any,
    l2: float = 0.0,
    l1: float = 0.0,
    history: int = 10,
    max_iterations: int = 100,
    tolerance: float = 1e-8,
    *,
    callback: Callback | None = None,
    name: str | None = None,
) -> Result:
    """Minimize the sum of all workers' losses, plus l2 / 2 * sum(x**2) + l1 * sum(abs(x)).

    All workers call this with the same arguments, except for `loss_and_grad`, which computes each worker's share of the loss.
    Everything else is computed on the shards: x, its gradients and the history are vectors there. The result has the same bits
    for any number of shards, even if shards are killed; with another number of workers sums are rounded differently.

    A program may repeat a call, after a restart, RolledBack or another error: it then continues from the last iteration that
    the shards hold, or returns the result if there is one. The shards recognize the call by its number: the first one of a
    program is "lbfgs.0".

    Args:
        ps: the connection. `declare` need not be called.
        loss_and_grad: function of x, a new array (n,) of float64. Returns this worker's share of the sum and its gradient, a
            pair (float, array (n,)). A loss of +inf says that there is no value at x; a shorter step is then tried.
        x0: the point to begin at, (n,); that of worker 0 is used.
        l2, l1: weights of the regularization, >= 0. With l1, OWL-QN (Andrew and Gao 2007) is used: elements of x become zero.
        history: number of past steps from which the direction is computed, 1 to 20.
        max_iterations: largest number of iterations.
        tolerance: end when no element of the gradient exceeds this, or when the objective has decreased in 5 iterations by no
            more than this share of the objective (of 1, if the objective is smaller).
        callback: called on worker 0 after each iteration with a Result; it may raise StopIteration to end the minimization.
        name: name of the vectors on the shards; replaces the call's number.

    Raises:
        InvalidRequest, InvalidTensor: an argument is wrong.
        NonFiniteGradient: a loss is NaN, or a gradient NaN or infinite; names the worker. Raised on all workers.
        WorkerFailed: a worker has left, or its loss_and_grad has raised an error. Raised on the other workers.
        WaitTimeout, ShardUnavailable, SessionFenced: as `ParameterServer.push`.
    """
    start = _checked_start(x0)
    problem = State(_weight("l1", l1), _weight("l2", l2), _count("history", history, 1, states.HISTORY_MAX))
    _count("max_iterations", max_iterations, 0, 2**31)
    _weight("tolerance", tolerance)
    number = _finished.get(ps, 0)
    while True:
        run = _Run(ps, loss_and_grad, start, problem, name or f"lbfgs.{number}")
        try:
            result = run.lead(max_iterations, tolerance, callback) if ps.rank == LEADER else run.follow()
        except RolledBack:
            continue  # the shards hold an earlier iteration
        _finished[ps] = number + (name is None)
        return result


class _Vectors:
    """The vectors of a minimization; each is opened when it is first used."""

    def __init__(self, ps: ParameterServer, name: str) -> None:
        self._ps = ps
        self._prefix = name
        self._open: dict[str, Any] = {}

    def __call__(self, name: str, size: int) -> Any:
        if name not in self._open:
            self._open[name] = self._ps.vector(f"{self._prefix}.{name}", size)
        return self._open[name]

    def drop_all_but(self, *names: str) -> None:
        """Drop the other vectors of this minimization, including those from before a restart of the program."""
        for full_name, vector in self._ps.vectors.items():
            prefix, _, name = full_name.partition(f"{self._prefix}.")
            if not prefix and name and name not in names:
                vector.drop()


class _Run:
    """One call on one worker; it continues from what the shards hold."""

    def __init__(
        self, ps: ParameterServer, loss_and_grad: LossAndGrad, start: NDArray[np.float64], problem: State, name: str
    ) -> None:
        self._ps = ps
        self._name = name
        self._start = start
        self._problem = problem
        self._vectors = _Vectors(ps, name)
        self._control = self._vectors(states.CONTROL, states.SIZE)
        self._evaluator = Evaluator(self._vectors, ps.rank, ps.world_size, len(start), loss_and_grad)

    def follow(self) -> Result:
        """Evaluate the loss whenever the leader asks, until it reports the end; return the result."""
        last = -1
        while True:
            self._meet()
            state = self._read()
            if state is None or (state.order == Order.EVALUATE and state.nfev == last):
                raise WorkerFailed(f"worker {LEADER}, which leads the minimization {self._name!r}, has left", rank=LEADER)
            if state.order == Order.FAIL:
                raise self._evaluator.failure(state)
            if state.order == Order.FINISH:
                return _result(state, self._vectors(f"x.{state.point}", len(self._start)).pull())
            last = state.nfev
            self._evaluator.evaluate(state)
            self._meet()

    def lead(self, max_iterations: int, tolerance: float, callback: Callback | None) -> Result:
        """Iterate until there is a reason to stop, tell the other workers, and return the result."""
        state = self._read()
        if state is None or not state.recent:
            state = replace(self._problem)  # begin again, also if a RolledBack has led to the time before the first evaluation
            self._vectors("x.0", len(self._start)).put(self._start)
        if state.order != Order.FINISH:
            state.order = Order.EVALUATE
            state.status = self._iterate(state, max_iterations, tolerance, callback)
            state.order, state.slots = Order.FINISH, []
            self._control.put(state.pack())
            self._vectors.drop_all_but(states.CONTROL, f"x.{state.point}")
        self._meet()
        return _result(state, self._vectors(f"x.{state.point}", len(self._start)).pull())

    def _iterate(self, state: State, max_iterations: int, tolerance: float, callback: Callback | None) -> Status:
        def evaluate() -> Shares:
            return self._evaluate(state)

        steps = Iterations(self._ps.batch, self._vectors, state, len(self._start), self._ps.world_size, evaluate)
        try:
            steps.start()
        except NoStep:
            raise self._fail(state, LEADER, INFINITE_START) from None
        while (status := state.why_stop(max_iterations, tolerance)) == Status.RUNNING:
            try:
                steps.iterate()
            except NoStep:
                return Status.NO_STEP
            try:
                if callback is not None:
                    callback(_result(state, self._evaluator.x))
            except StopIteration:
                return Status.STOPPED
            except Exception:
                self._fail(state, LEADER, CALLBACK_RAISED)
                raise
        return status

    def _evaluate(self, state: State) -> Shares:
        """Have all workers make the evaluation that the stored state asks for."""
        self._meet()
        self._evaluator.evaluate(state)
        self._meet()
        shares = self._evaluator.shares(state)
        if shares.trouble:
            raise self._fail(state, shares.failed_rank, shares.trouble)
        return shares

    def _fail(self, state: State, rank: int, trouble: int) -> Exception:
        """Tell all workers of a worker's trouble; return the error to raise on this one."""
        state.order, state.failed_rank, state.trouble = Order.FAIL, rank, trouble
        self._control.put(state.pack())
        self._meet()
        return self._evaluator.failure(state)

    def _meet(self) -> None:
        self._ps.barrier(self._name)

    def _read(self) -> State | None:
        state = State.unpack(self._control.pull().tolist())
        if state is not None:
            state.check_same(self._name, self._problem)
        return state


def _result(state: State, x: NDArray[np.float64]) -> Result:
    status = state.status
    is_success = status in (Status.CONVERGED_GRADIENT, Status.CONVERGED_DECREASE)
    counts = state.nit, state.nfev
    return Result(x, state.fun, *counts, is_success, int(status), MESSAGES[status], state.gradient_norm, state.step)


def _checked_start(x0: Any) -> NDArray[np.float64]:
    start = np.asarray(x0)
    if start.ndim != 1 or not start.size or start.dtype.kind not in "fiu":
        raise InvalidTensor(f"x0: must be real numbers of shape (n,), n at least 1, got {start.shape} of {start.dtype}")
    if not np.isfinite(start).all():
        raise NonFiniteGradient("x0: has NaN or infinity")
    return start.astype(np.float64)


def _weight(of: str, value: Any) -> float:
    number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    if not 0 <= number < math.inf:
        raise InvalidRequest(f"{of}: must be a number of at least 0, got {value!r}")
    return number


def _count(of: str, value: Any, least: int, most: int) -> int:
    if not least <= whole_number(InvalidRequest, of, value) <= most:
        raise InvalidRequest(f"{of}: must be from {least} to {most}, got {value}")
    return int(value)
