"""Differences of learners merged by norm and direction: the formula, however tensors are cut, and what it does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from learners import zeros  # noqa: E402
from torch import nn, optim  # noqa: E402

import psd_client  # noqa: E402
import psd_client.torch as psd  # noqa: E402
from psd.contract.errors import InvalidRequest  # noqa: E402

LOCAL = psd.Local(steps=1, outer=psd_client.SGD(lr=1.0), merge="rda")
TOKENS = (1.0, 2.0, 4.0)
SHAPES = {
    "large": (443, 301),  # of several blocks on each shard, cut within runs of rows
    "small": (7,),
    "opposed": (5,),
    "of_one": (9,),
    "scalar": (),
}


def difference(name: str, rank: int) -> np.ndarray[Any, Any]:
    """How far a learner moves a tensor; learners differ in length."""
    shape = SHAPES.get(name, (31, 17))
    rng = np.random.default_rng([rank, len(name)])
    if name == "opposed":  # of ranks 0 and 1 to that of rank 2
        return np.ones(shape, np.float32) * (5.0, 7.0, -3.0)[rank]
    if name == "of_one" and rank != 1:
        return np.zeros(shape, np.float32)
    return np.asarray(rng.standard_normal(shape) * 10.0**rank, np.float32)


def expected(name: str, weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """In float64 as the paper has it."""
    differences = np.stack([difference(name, rank).astype(np.float64) for rank in range(len(weights))])
    each = weights.reshape(-1, *[1] * (differences.ndim - 1))
    if name == "rows.weight":
        return (each * differences).sum(0) / weights.sum()
    norms = np.sqrt((differences**2).reshape(len(weights), -1).sum(1))
    lengths = norms.reshape(each.shape)
    directions = np.divide(differences, lengths, out=np.zeros_like(differences), where=lengths > 0)
    direction = (each * directions).sum(0) / weights.sum()
    if np.linalg.norm(direction) < 1e-9:
        return (each * differences).sum(0) / weights.sum()
    return (weights * norms).sum() / weights.sum() * direction / np.linalg.norm(direction)


def merged(run_workers: Any, shards: int, weights: tuple[float, ...] = TOKENS) -> dict[str, Any]:
    """What one exchange of these learners moves the tensors by."""

    def learner(ps: Any) -> dict[str, Any]:
        module = zeros(SHAPES)
        optimizer = psd.distribute(module, optim.SGD(module.parameters(), lr=1.0), local=LOCAL, ps=ps)
        for name, parameter in module.named_parameters():
            parameter.grad = torch.from_numpy(difference(name, ps.rank))
        optimizer.step(tokens=weights[ps.rank])
        return {name: -parameter.detach().numpy() for name, parameter in module.named_parameters()}

    first, *others = run_workers(len(weights), shards, learner)
    for other in others:
        for name, value in first.items():
            np.testing.assert_array_equal(other[name], value)
    return first


def test_tensors_are_merged_whole_however_they_are_cut(run_workers: Any) -> None:
    """As a NumPy reference has it, and the same bits on one shard as on three."""
    found = merged(run_workers, 3)

    for name, value in found.items():
        right = expected(name, np.square(TOKENS))  # tokens x tokens per step, after one step
        np.testing.assert_allclose(value, right, rtol=1e-5, atol=1e-6 * np.abs(right).max())
    for name, value in merged(run_workers, 1).items():
        np.testing.assert_array_equal(value, found[name])


def test_opposite_directions_have_the_mean(run_workers: Any) -> None:
    """Two learners of equal weight: what rounding leaves of the sum of their directions is no direction."""

    def learner(ps: Any) -> Any:
        module = nn.Linear(64, 3, bias=False)
        nn.init.zeros_(module.weight)
        optimizer = psd.distribute(module, optim.SGD(module.parameters(), lr=1.0), local=LOCAL, ps=ps)
        module.weight.grad = torch.linspace(0.1, 0.9, 192).reshape(3, 64) * (3.0 if ps.rank else -1.0)
        optimizer.step()
        return module.weight.detach()

    for found in run_workers(2, 2, learner):
        torch.testing.assert_close(found, -torch.linspace(0.1, 0.9, 192).reshape(3, 64))


def test_one_learner_moves_as_far_as_it_has_moved(run_workers: Any) -> None:
    """To the bit, as with the mean."""
    for name, value in merged(run_workers, 2, (3.0,)).items():
        np.testing.assert_array_equal(value, difference(name, 0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"consistency": "async"}, "merge: rda merges the gradients of a round, and async has no rounds"),
        ({"aggregation": "fast"}, "merge: rda needs aggregation exact"),
        ({"reduce": "sum"}, "merge: rda needs reduce mean"),
        ({"nan_policy": "allow"}, "merge: rda needs reduce mean, and nan_policy refuse or skip"),
        ({"clip_norm": 1.0}, "merge: rda does not go with clip_norm"),
        ({"local": psd.Local(steps=1, outer=psd_client.LAMB(), merge="rda")}, "merge: rda does not go with"),
    ],
)
def test_what_does_not_go_with_directions_is_refused(cluster: Any, options: dict[str, Any], words: str) -> None:
    module = zeros(SHAPES)
    with psd_client.connect(cluster(1).servers, 0, 1) as ps, pytest.raises(InvalidRequest, match=words):
        psd.distribute(module, optim.SGD(module.parameters(), lr=1.0), ps=ps, **{"local": LOCAL, **options})


def test_learners_that_merge_otherwise_are_told(cluster: Any) -> None:
    """The first one's declaration holds."""
    servers = cluster(1).servers
    for merge in ("rda", "mean"):
        module = nn.Linear(2, 2, bias=False)
        local = psd.Local(steps=1, merge=merge)
        with psd_client.connect(servers, 0, 1) as ps:
            if merge == "rda":
                psd.distribute(module, optim.SGD(module.parameters(), lr=1.0), local=local, ps=ps)
            else:
                with pytest.raises(psd_client.SpecMismatch, match="merge of parameter 'weight': rda in the job, none in this"):
                    psd.distribute(module, optim.SGD(module.parameters(), lr=1.0), local=local, aggregation="exact", ps=ps)
