"""Learners' differences corrected by the outer momentum (HeLoCo): the formula, however tensors are cut, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from learners import corrected, zeros  # noqa: E402
from torch import nn, optim  # noqa: E402

import psd_client  # noqa: E402
import psd_client.torch as psd  # noqa: E402
from psd.contract.errors import InvalidRequest  # noqa: E402

MOMENTUM = 0.9
LOCAL = psd.Local(steps=1, outer=psd_client.SGD(lr=1.0, momentum=MOMENTUM), merge="heloco")
TOKENS = (1.0, 2.0, 4.0)
SHAPES = {
    "large": (443, 301),  # of several blocks on each shard, cut within runs of rows
    "opposed": (7,),
    "alike": (5,),
    "weak": (2, 11),
    "of_one": (9,),
    "scalar": (),
}


def difference(name: str, rank: int, exchange: int) -> np.ndarray[Any, Any]:
    """How far a learner moves a tensor between two exchanges; learners differ in length."""
    shape = SHAPES.get(name, (31, 17))
    rng = np.random.default_rng([rank, exchange, len(name)])
    noise = rng.standard_normal(shape) * 10.0**rank
    if name == "of_one" and rank != 1:
        return np.zeros(shape, np.float32)
    way = {"opposed": -4.0 if exchange else 4.0, "alike": 4.0, "weak": 0.35}.get(name, -0.7 if exchange == 2 else 0.2)
    return np.asarray(noise + way * 10.0**rank, np.float32)


def expected(exchanges: int, weights: np.ndarray[Any, Any]) -> tuple[dict[str, Any], set[str]]:
    """Where the tensors are after these exchanges, in float64; and which angles there were."""
    found, angles = {}, set()
    for name in [*SHAPES, "rows.weight"]:
        value = buffer = torch.zeros(SHAPES.get(name, (31, 17)), dtype=torch.float64)
        for exchange in range(exchanges):
            differences = [torch.from_numpy(difference(name, rank, exchange)).double() for rank in range(len(weights))]
            mean = (1 - MOMENTUM) * buffer
            if name != "rows.weight":
                for one in differences if exchange else ():
                    cosine = float((one * mean).sum() / (one.norm() * mean.norm() or 1.0))
                    angles.add("alike" if cosine >= 0.2 else "opposed" if cosine < 0 else "weak" if cosine else "none")
                differences = [corrected(one, mean) for one in differences]
            merged = sum(weight * one for weight, one in zip(weights, differences, strict=True)) / weights.sum()
            buffer = MOMENTUM * buffer + merged
            value = value - buffer
        found[name] = value.numpy()
    return found, angles


def moved(run_workers: Any, shards: int, exchanges: int, weights: tuple[float, ...] = TOKENS, **options: Any) -> dict[str, Any]:
    """Where exchanges of these learners bring the tensors."""

    def learner(ps: Any) -> dict[str, Any]:
        module = zeros(SHAPES)
        optimizer = psd.distribute(module, optim.SGD(module.parameters(), lr=1.0), local=LOCAL, ps=ps, **options)
        for exchange in range(exchanges):
            for name, parameter in module.named_parameters():
                parameter.grad = torch.from_numpy(difference(name, ps.rank, exchange))
            optimizer.step(tokens=weights[ps.rank])
        return {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}

    first, *others = run_workers(len(weights), shards, learner)
    for other in others:
        for name, value in first.items():
            np.testing.assert_array_equal(other[name], value)
    return first


def test_differences_are_corrected_whole_however_tensors_are_cut(run_workers: Any) -> None:
    """As the reference has it, and the same bits on one shard as on three; embeddings have the mean."""
    right, angles = expected(4, np.square(TOKENS))  # tokens x tokens per step, after one step
    assert {"alike", "opposed", "weak"} <= angles

    found = moved(run_workers, 3, 4)

    for name, value in found.items():
        np.testing.assert_allclose(value, right[name], rtol=1e-4, atol=3e-6 * np.abs(right[name]).max())
    for name, value in moved(run_workers, 1, 4).items():
        np.testing.assert_array_equal(value, found[name])


def test_the_first_round_has_no_momentum_to_follow(run_workers: Any) -> None:
    """To the bit what the learner has moved."""
    for name, value in moved(run_workers, 2, 1, (3.0,)).items():
        np.testing.assert_array_equal(-value, difference(name, 0, 0))


def test_with_a_quorum_of_one_differences_are_corrected_one_by_one(cluster: Any) -> None:
    """The way of asynchronous learners: the second one's difference opposes what the first one's has left."""
    servers = cluster(2).servers
    local = psd.Local(steps=1, outer=psd_client.SGD(lr=1.0, momentum=0.5), merge="heloco")
    with psd_client.connect(servers, 0, 2) as first:
        ahead = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(ahead.weight)
        one = psd.distribute(ahead, optim.SGD(ahead.parameters(), lr=1.0), local=local, ps=first, quorum=1)
        with psd_client.connect(servers, 1, 2) as second:
            behind = nn.Linear(4, 1, bias=False)
            two = psd.distribute(behind, optim.SGD(behind.parameters(), lr=1.0), local=local, ps=second, quorum=1)
            for module, optimizer, way in ((ahead, one, 2.0), (behind, two, -1.0)):
                module.weight.grad = torch.full((1, 4), way)
                optimizer.step()
            two.pull()
            # |m| = (1 - 0.5) * 4 = 2 and |d| = 2: trust is a half, and so is what the opposed difference loses.
            assert behind.weight.tolist() == [[-2.0 - (0.5 * 2.0 - 0.5)] * 4]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"consistency": "async"},
            "merge: heloco merges the gradients of a round, and async has no rounds; in sync with quorum 1",
        ),
        ({"aggregation": "fast"}, "merge: heloco needs aggregation exact"),
        ({"clip_norm": 1.0}, "merge: heloco does not go with clip_norm"),
        ({"local": psd.Local(steps=1, outer=psd_client.SGD(lr=1.0), merge="heloco")}, "and sgd has none here"),
    ],
)
def test_what_does_not_go_with_corrections_is_refused(cluster: Any, options: dict[str, Any], words: str) -> None:
    module = zeros(SHAPES)
    with psd_client.connect(cluster(1).servers, 0, 1) as ps, pytest.raises(InvalidRequest, match=words):
        psd.distribute(module, optim.SGD(module.parameters(), lr=1.0), ps=ps, **{"local": LOCAL, **options})
