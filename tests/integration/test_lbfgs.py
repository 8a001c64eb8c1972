"""L-BFGS and OWL-QN on real shards: the optimum that SciPy and scikit-learn find, whoever computes it."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize as scipy_minimize
from sklearn.linear_model import LogisticRegression

import psd_client.lbfgs

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def problem(monkeypatch):
    """Loss and gradient of some rows, `problem(part)`; all features and labels. 9000 features are three stripes."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example, data = importlib.import_module("lbfgs_logistic"), importlib.import_module("sparse_data")
    rows = data.generated_rows(count=600, features=8999, per_row=30)
    features = example.matrix(rows, 9000)

    def of(part):
        return example.logistic_loss(features[part], rows.labels[part])

    of.features, of.labels = features, rows.labels
    return of


def minimized(run_workers, problem, workers, shards, **options):
    def work(ps):
        mine = problem(slice(ps.rank, None, workers))
        return psd_client.lbfgs.minimize(ps, mine, np.zeros(9000), **options)

    first, *others = run_workers(workers, shards, work)
    assert all(other.x.tobytes() == first.x.tobytes() for other in others)
    assert all((other.fun, other.nit, other.status) == (first.fun, first.nit, first.status) for other in others)
    assert first.success
    return first


def test_l2_reaches_scipys_objective_and_the_same_bits_on_any_number_of_shards(run_workers, problem):
    def objective(x):
        loss, gradient = problem(slice(None))(x)
        return loss + x @ x / 2, gradient + x

    options = {"maxiter": 1000, "ftol": 1e-14, "gtol": 1e-8}
    expected = scipy_minimize(objective, np.zeros(9000), jac=True, method="L-BFGS-B", options=options).fun

    found = {key: minimized(run_workers, problem, *key, l2=1.0) for key in [(2, 1), (2, 3), (4, 2)]}

    for result in found.values():
        assert result.fun == pytest.approx(expected, rel=1e-6)
    assert found[2, 1].x.tobytes() == found[2, 3].x.tobytes()
    assert (found[2, 1].fun, found[2, 1].nit, found[2, 1].nfev) == (found[2, 3].fun, found[2, 3].nit, found[2, 3].nfev)


def test_l1_reaches_liblinears_objective_with_the_same_zeros(run_workers, problem):
    is_l1 = {"l1_ratio": 1} if "deprecated" in str(LogisticRegression().penalty) else {"penalty": "l1"}  # since 1.8
    liblinear = LogisticRegression(**is_l1, C=1.0, solver="liblinear", fit_intercept=False, tol=1e-8, max_iter=10_000)
    weights = liblinear.fit(problem.features, problem.labels).coef_[0]
    expected = problem(slice(None))(weights)[0] + np.abs(weights).sum()

    result = minimized(run_workers, problem, 2, 2, l1=1.0, tolerance=1e-11, max_iterations=500)

    assert result.fun == pytest.approx(expected, rel=1e-6)
    assert (result.x == 0).tolist() == (weights == 0).tolist()
    assert 20 < np.count_nonzero(weights) < 300
