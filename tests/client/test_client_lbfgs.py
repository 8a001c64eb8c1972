"""L-BFGS: its decisions, on vectors that are NumPy arrays in this process."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_vectors import Connection, Killed, Space

from psd_client import InvalidRequest, InvalidTensor, NonFiniteGradient, RolledBack, WorkerFailed
from psd_client.lbfgs.line_search import NoStep, strong_wolfe
from psd_client.lbfgs.run import Status, minimize


def rosenbrock(x):
    odd, even = x[::2], x[1::2]
    gradient = np.empty_like(x)
    gradient[::2], gradient[1::2] = -400 * odd * (even - odd**2) - 2 * (1 - odd), 200 * (even - odd**2)
    return (100 * (even - odd**2) ** 2 + (1 - odd) ** 2).sum(), gradient


def least_squares(rows=60, columns=12, seed=0):
    """Loss and gradient of some rows of a problem, and the rows."""
    rng = np.random.default_rng(seed)
    features, targets = rng.normal(size=(rows, columns)) * np.geomspace(1, 30, columns), rng.normal(size=rows) * 40

    def of(part):
        def loss_and_grad(x):
            error = features[part] @ x - targets[part]
            return error @ error / 2, features[part].T @ error

        return loss_and_grad

    return features, targets, of


def test_minimum_is_found_and_described():
    (result,) = Space().minimize(np.tile([-1.2, 1.0], 10), losses=[rosenbrock], tolerance=1e-10)

    np.testing.assert_allclose(result.x, 1, rtol=1e-6)
    assert result.success
    assert (result.status, result.message.partition(":")[0]) in [(0, "converged"), (3, "converged")]
    assert result.fun < 1e-12
    assert result.nit < result.nfev < 80


@pytest.mark.parametrize("world_size", [1, 3])
def test_sum_of_workers_losses_is_minimized_with_l2(world_size):
    features, targets, of = least_squares()
    losses = [of(slice(rank, None, world_size)) for rank in range(world_size)]
    exact = np.linalg.solve(features.T @ features + 5 * np.eye(12), features.T @ targets)

    results = Space(world_size).minimize(np.zeros(12), losses=losses, l2=5.0, tolerance=1e-14)

    np.testing.assert_allclose(results[0].x, exact, rtol=1e-6)
    assert all(result.x.tobytes() == results[0].x.tobytes() for result in results)
    assert {(result.fun, result.nit, result.message) for result in results} == {
        (results[0].fun, results[0].nit, results[0].message)
    }


def test_l1_gives_the_zeros_of_the_optimum():
    """Optimality of each element: its gradient is -l1 * sign(x), or no larger than l1 where x is 0."""
    _, _, of = least_squares()
    (result,) = Space().minimize(np.ones(12), losses=[of(slice(None))], l1=2000.0, tolerance=1e-14, max_iterations=1000)

    gradient = of(slice(None))(result.x)[1]
    zero = result.x == 0
    assert 2 <= np.count_nonzero(zero) <= 10
    assert (np.abs(gradient[zero]) <= 2000).all()
    np.testing.assert_allclose(gradient[~zero], -2000 * np.sign(result.x[~zero]), rtol=1e-4)


def test_history_is_on_the_shards_until_the_end_and_nowhere_after():
    space = Space()
    space.minimize(np.zeros(12), losses=[least_squares()[2](slice(None))], history=3)

    assert space.most > 2 * 3
    assert sorted(space.arrays) in (["lbfgs.0.control", "lbfgs.0.x.0"], ["lbfgs.0.control", "lbfgs.0.x.1"])


def kill_at_end(left):
    if next(left, None) is None:
        raise Killed


def test_killed_at_any_batch_it_goes_on_to_the_same_bits():
    """The leader dies before one of its batches, the first, the second, and so on, and its successor calls again."""
    problem = {"losses": [rosenbrock], "l1": 1e-3, "history": 4, "max_iterations": 12}
    start, at = np.array([-1.2, 1.0]), 0
    (whole,) = Space().minimize(start, **problem)
    while True:
        space, left = Space(), iter(range(at))
        space.before_batch = lambda left=left: kill_at_end(left)
        (died,) = space.minimize(start, **problem)
        space.before_batch = lambda: None
        (result,) = space.minimize(start, **problem)
        assert (result.x.tobytes(), result.fun, result.nit) == (whole.x.tobytes(), whole.fun, whole.nit)
        if not isinstance(died, Killed):
            break
        at += 1
    assert at > 40


def test_calls_of_a_program_are_answered_again_when_it_is_started_again():
    """A program minimizes twice; started again, it gets the first result, and the second, without an evaluation."""
    space, evaluations = Space(), []

    def loss_and_grad(x):
        evaluations.append(1)
        return rosenbrock(x)

    for expected in ("first", "second", "once more"):
        connection = Connection(space)
        results = [minimize(connection, loss_and_grad, np.full(2, start)) for start in (0.0, 3.0)]
        assert (results[0].nit != results[1].nit, expected) == (True, expected)
        if expected == "first":
            made = len(evaluations)
    assert len(evaluations) == made


def test_state_of_another_problem_is_refused():
    space = Space()
    space.minimize(np.zeros(2), losses=[rosenbrock], l2=1.0, name="fit")

    (error,) = space.minimize(np.zeros(2), losses=[rosenbrock], l2=2.0, name="fit")

    assert isinstance(error, InvalidRequest)
    assert str(error) == "l2: is 2, but the minimization 'fit' on the shards has 1; give this one another name"


def test_gradient_that_is_not_the_losss_fails_the_line_search():
    (result,) = Space().minimize(np.ones(4), losses=[lambda x: (x @ x, -x)])

    assert not result.success
    assert result.status == Status.NO_STEP
    assert "line search failed" in result.message
    assert result.x.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("beyond", [np.inf, 1.2e308])
def test_infinite_loss_shortens_the_step(beyond):
    """The logarithm's domain ends before the first step does; also where two workers' losses are infinite only together."""

    steps_beyond = []

    def loss(x):
        if (x > 0).all():
            return np.sum(x - np.log(x)), 1 - 1 / x
        steps_beyond.append(x)
        return beyond, np.ones(3)

    result, _ = Space(2).minimize(np.full(3, 30.0), losses=[loss, loss])

    np.testing.assert_allclose(result.x, 1, rtol=1e-4)
    assert steps_beyond


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ((np.nan, np.zeros(2)), "loss_and_grad of worker 1, evaluation 3: the loss is NaN or -inf"),
        ((1.0, np.array([0, np.inf])), "loss_and_grad of worker 1, evaluation 3: the gradient is not finite at index 1"),
    ],
)
def test_nan_is_told_to_all_workers_with_the_one_it_is_of(bad, message):
    calls = []

    def second(x):
        calls.append(1)
        return rosenbrock(x) if len(calls) < 3 else bad

    errors = Space(2).minimize(np.zeros(2), losses=[rosenbrock, second])

    assert [(type(error), str(error), error.detail) for error in errors] == [(NonFiniteGradient, message, {"rank": 1})] * 2


def test_what_a_workers_function_raises_ends_all_workers():
    def broken(_x):
        raise KeyError("a column")

    errors = Space(3).minimize(np.zeros(2), losses=[rosenbrock, broken, rosenbrock])

    assert [type(error) for error in errors] == [WorkerFailed, KeyError, WorkerFailed]
    assert "loss_and_grad has raised on worker 1 in evaluation 1" in str(errors[0])


def test_share_of_a_worker_that_left_is_missed():
    """Nobody waits any more for one that has left, and its line is of an earlier evaluation."""
    space = Space(2)

    def leaving(x):
        if space.arrays["lbfgs.0.control"][9] >= 3:  # iterations
            space.leave()
            raise Killed
        return rosenbrock(x)

    error, _ = space.minimize(np.array([-1.2, 1]), losses=[rosenbrock, leaving])

    assert isinstance(error, WorkerFailed)
    assert error.detail == {"rank": 1}
    assert "worker 1 left during evaluation" in str(error)


def test_callback_sees_each_iteration_and_may_end_them():
    seen = []

    def callback(result):
        seen.append((result.nit, result.fun, rosenbrock(result.x)[0], result.message))
        if result.nit == 5:
            raise StopIteration

    first, second = Space(2).minimize(np.array([-1.2, 1]), losses=[rosenbrock, lambda x: (0.0, 0 * x)], callback=callback)

    assert [nit for nit, *_ in seen] == [1, 2, 3, 4, 5]
    assert all(fun == value and message == "running" for _, fun, value, message in seen)
    assert (first.status, first.nit, first.fun) == (second.status, second.nit, second.fun) == (99, 5, seen[-1][1])


@pytest.mark.parametrize(
    "left_by",
    [lambda batches: batches[20], lambda batches: {name: np.zeros_like(array) for name, array in batches[20].items()}],
    ids=["some batches ago", "before the first state"],
)
def test_job_that_goes_back_to_a_checkpoint_goes_on_from_there(left_by):
    """The shards then hold what they held some batches ago."""
    start = np.tile([-1.2, 1.0], 3)
    (whole,) = Space().minimize(start, losses=[rosenbrock])
    space, batches = Space(), []

    def before_batch():
        batches.append({name: array.copy() for name, array in space.arrays.items()})
        if len(batches) == 40:
            space.arrays = left_by(batches)
            raise RolledBack("the job went back to a checkpoint")

    space.before_batch = before_batch
    (result,) = space.minimize(start, losses=[rosenbrock])

    assert (result.x.tobytes(), result.nit) == (whole.x.tobytes(), whole.nit)
    assert result.nfev < whole.nfev + 10


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"x0": np.zeros((2, 2))}, InvalidTensor, "x0: must be real numbers of shape"),
        ({"x0": [np.nan]}, NonFiniteGradient, "x0: has NaN or infinity"),
        ({"l1": -1}, InvalidRequest, "l1: must be a number of at least 0, got -1"),
        ({"history": 21}, InvalidRequest, "history: must be from 1 to 20, got 21"),
        ({"tolerance": "1"}, InvalidRequest, "tolerance: must be a number of at least 0, got '1'"),
    ],
)
def test_bad_arguments_are_refused_by_name(wrong, error, message):
    space = Space()
    (raised,) = space.minimize(wrong.pop("x0", np.zeros(2)), losses=[rosenbrock], **wrong)

    assert isinstance(raised, error)
    assert message in str(raised)
    assert space.arrays == {}


def test_strong_wolfe_finds_a_step_that_is_far_or_near():
    """Both conditions hold at the step, for a quartic whose minimum is at 1, from first steps of any length."""
    for first in (1e-3, 0.1, 1.0, 17.0, 1e4):
        search = strong_wolfe(1.0, -4.0, first)
        step = next(search)
        with pytest.raises(StopIteration) as found:
            while True:
                step = search.send(((step - 1) ** 4, 4 * (step - 1) ** 3))
        assert found.value.value == step
        assert (step - 1) ** 4 <= 1 - 4e-4 * step
        assert abs(4 * (step - 1) ** 3) <= 0.9 * 4


def test_strong_wolfe_uphill_finds_none():
    search = strong_wolfe(1.0, -1.0, 1.0)
    step = next(search)
    with pytest.raises(NoStep):
        while True:
            step = search.send((1 + step, 1.0))
