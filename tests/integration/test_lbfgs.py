"""L-BFGS and OWL-QN on real shards: the minimum, whoever computes it."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

import psd_client.lbfgs

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def problem(monkeypatch):
    """Loss and gradient of some rows, `problem(part)`; all features and labels. 9000 features are three stripes."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example, data = importlib.import_module("lbfgs_logistic"), importlib.import_module("sparse_data")
    rows = data.generated_rows(count=300, features=8999, per_row=30)
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


def test_l2_gives_the_minimum_in_the_same_bits_on_any_number_of_shards(run_workers, problem):
    """The objective is 1-strongly convex, so that its distance from the minimum is at most half the gradient's square."""
    found = [minimized(run_workers, problem, 2, shards, l2=1.0) for shards in (1, 3)]

    loss, gradient = problem(slice(None))(found[0].x)
    assert found[0].fun == pytest.approx(loss + found[0].x @ found[0].x / 2, rel=1e-12)
    assert np.sum((gradient + found[0].x) ** 2) / 2 < 1e-6 * loss
    first, second = ((result.x.tobytes(), result.fun, result.nit, result.nfev) for result in found)
    assert first == second


def test_l1_gives_the_minimum_with_its_zeros(run_workers, problem):
    """A point is the minimum if each weight's slope is -l1 or l1, against its sign, or is between both where it is 0."""
    result = minimized(run_workers, problem, 2, 2, l1=1.0, tolerance=1e-9, max_iterations=500)

    loss, gradient = problem(slice(None))(result.x)
    assert result.fun == pytest.approx(loss + np.abs(result.x).sum(), rel=1e-12)
    is_zero = result.x == 0
    assert (np.abs(gradient[is_zero]) < 1).all()
    np.testing.assert_allclose(gradient[~is_zero], -np.sign(result.x[~is_zero]), atol=1e-2)
    assert 20 < np.count_nonzero(result.x) < 300
