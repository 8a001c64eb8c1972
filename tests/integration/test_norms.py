"""Norms over all shards: clip_norm is torch's clip_grad_norm_ on the aggregated gradient, LAMB is the paper's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import psd_client
from psd_core.optimizer import Optimizer

torch = pytest.importorskip("torch")

STEPS = 12
CLIP_NORM = 3.0
# Of several blocks, cut within the tensor; starting in the middle of a run of 16; scalar; empty; float64; not trained.
SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "odd": ((7,), "float32"),
    "embedding": ((301, 443), "float32"),
    "scalar": ((), "float32"),
    "empty": ((0, 4), "float32"),
    "matrix": ((37, 111), "float32"),
    "double": ((129, 43), "float64"),
}
Values = dict[str, np.ndarray[Any, Any]]


def initial_values() -> Values:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(dtype) for name, (shape, dtype) in SHAPES.items()}


@functools.cache
def gradients(step: int, rank: int) -> Values:
    """Some above the norm, some below."""
    rng, size = np.random.default_rng((step, rank)), 0.004 * (1 + 3 * (step % 3))
    return {name: (size * rng.standard_normal(shape)).astype(dtype) for name, (shape, dtype) in SHAPES.items()}


def mean_gradients(step: int, world_size: int, scale: Callable[[Values], float]) -> Values:
    """In float64; rank r has r + 1 samples."""
    parts, weight = [gradients(step, rank) for rank in range(world_size)], sum(range(1, world_size + 1))
    mean = {name: sum((r + 1.0) * p[name].astype(np.float64) for r, p in enumerate(parts)) / weight for name in SHAPES}
    factor = scale(mean)
    return {name: factor * value for name, value in mean.items()}


def train(servers: str, world_size: int, optimizer: Optimizer, **declaration: Any) -> list[Values]:
    def worker(rank: int) -> Values:
        with psd_client.connect(servers, rank, world_size, wait_timeout=60) as ps:
            params = ps.declare(initial_values(), optimizer, **declaration)
            for step in range(STEPS):
                params = ps.push_pull(gradients(step, rank), weight=1 + rank)
            return params

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(worker, range(world_size)))


def clipped_by_torch(world_size: int, make: Callable[[list[Any]], Any]) -> Values:
    params = {name: torch.tensor(value.astype(np.float64), requires_grad=True) for name, value in initial_values().items()}
    optimizer, clipped = make(list(params.values())), 0
    for step in range(STEPS):
        for name, gradient in mean_gradients(step, world_size, lambda _: 1.0).items():
            params[name].grad = torch.tensor(gradient)
        clipped += torch.nn.utils.clip_grad_norm_(list(params.values()), CLIP_NORM).item() > CLIP_NORM
        optimizer.step()
    assert 0 < clipped < STEPS, "some gradients are clipped, some are not"
    return {name: param.detach().numpy() for name, param in params.items()}


def lamb_by_the_paper(world_size: int, lr: float, eps: float, weight_decay: float, clip_norm: float) -> Values:
    """You et al. 2020, algorithm 2, in float64, on gradients clipped before."""

    def scale(mean: Values) -> float:
        norm = np.sqrt(sum((value**2).sum() for value in mean.values()))
        return min(1.0, clip_norm / (norm + 1e-6))

    x = {name: value.astype(np.float64) for name, value in initial_values().items()}
    m, v = ({name: np.zeros_like(value) for name, value in x.items()} for _ in range(2))
    for t in range(1, STEPS + 1):
        for name, g in mean_gradients(t - 1, world_size, scale).items():
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g**2
            r = m[name] / (1 - 0.9**t) / (np.sqrt(v[name] / (1 - 0.999**t)) + eps)
            u = r + weight_decay * x[name]
            ratio = np.linalg.norm(x[name]) / np.linalg.norm(u) if u.size else 1
            x[name] = x[name] - lr * ratio * u
    return x


def assert_equal(results: list[list[Values]], expected: Values) -> None:
    """All workers on any number of shards have the same bits, and what is expected to 1e-6. (The norm that scales a float64
    tensor is also over float32 ones, whose mean is rounded.)"""
    first = results[0][0]
    for name in SHAPES:
        assert np.linalg.norm(first[name] - expected[name]) <= 1e-6 * np.linalg.norm(expected[name]), name
        for params in (p for workers in results for p in workers):
            assert params[name].tobytes() == first[name].tobytes(), name


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_clipping_is_that_of_one_process_on_any_number_of_shards(cluster: Callable[..., Any], world_size: int) -> None:
    expected = clipped_by_torch(world_size, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01))

    sgd = psd_client.SGD(lr=0.1, momentum=0.9, weight_decay=0.01)
    results = [train(cluster(shards).servers, world_size, sgd, clip_norm=CLIP_NORM) for shards in (1, 2, 3, 5)]

    assert_equal(results, expected)


@pytest.mark.parametrize(("world_size", "clip_norm"), [(1, None), (2, None), (2, CLIP_NORM)])
def test_lamb_is_the_papers_on_any_number_of_shards(
    cluster: Callable[..., Any], world_size: int, clip_norm: float | None
) -> None:
    expected = lamb_by_the_paper(world_size, 0.01, 1e-6, 0.01, clip_norm or np.inf)

    lamb = psd_client.LAMB(lr=0.01)
    results = [train(cluster(shards).servers, world_size, lamb, clip_norm=clip_norm) for shards in (1, 2, 3, 5)]

    assert_equal(results, expected)


def test_a_norm_that_nothing_exceeds_changes_no_bit(cluster: Callable[..., Any]) -> None:
    """As exact aggregation without it."""
    adam = psd_client.Adam(lr=0.01)
    servers = [cluster(2).servers for _ in range(2)]

    results = [train(servers[0], 2, adam, clip_norm=1e30), train(servers[1], 2, adam, aggregation="exact")]

    for name in SHAPES:
        assert results[0][0][name].tobytes() == results[1][0][name].tobytes()


@pytest.mark.parametrize("mode", ["async", "ssp:2"])
def test_without_rounds_each_push_is_clipped_by_its_own_norm(cluster: Callable[..., Any], mode: str) -> None:
    """One worker: the same as in one process; the shards multiply."""
    expected = clipped_by_torch(1, lambda params: torch.optim.SGD(params, lr=0.1))

    sgd = psd_client.SGD(lr=0.1)
    results = [train(cluster(shards).servers, 1, sgd, clip_norm=CLIP_NORM, consistency=mode) for shards in (1, 3)]

    assert_equal(results, expected)


def test_a_shard_without_parameters_measures_nothing(cluster: Callable[..., Any]) -> None:
    """Two elements are one block, on one of three shards; the norm is 5."""
    with psd_client.connect(cluster(3).servers, 0, 1) as ps:
        ps.declare({"w": np.zeros(2)}, psd_client.SGD(lr=1), clip_norm=1)
        params = ps.push_pull({"w": np.array([3.0, 4.0])})

    np.testing.assert_allclose(params["w"], [-0.6, -0.8], rtol=1e-6)


def test_parameters_without_elements_have_nothing_to_measure(cluster: Callable[..., Any]) -> None:
    with psd_client.connect(cluster(2).servers, 0, 1) as ps:
        ps.declare({"w": np.zeros((0, 3))}, psd_client.LAMB(), clip_norm=1)
        for _ in range(2):
            assert ps.push_pull({"w": np.zeros((0, 3))})["w"].shape == (0, 3)

        assert ps.clock == 2


def test_a_sum_that_overflows_is_skipped_on_all_shards(cluster: Callable[..., Any], caplog: Any) -> None:
    """Finite on each worker, infinite together: no norm, so no update; said on the log."""
    servers = cluster(2).servers

    def worker(rank: int) -> tuple[Any, bool]:
        with psd_client.connect(servers, rank, 2, wait_timeout=60) as ps:
            ps.declare({"w": np.ones(3000, np.float32)}, psd_client.SGD(lr=1), clip_norm=1, reduce="sum")
            params = ps.push_pull({"w": np.full(3000, 3e38, np.float32)})
            return params["w"], ps.is_skipped

    with ThreadPoolExecutor(2) as pool:
        for params, is_skipped in pool.map(worker, range(2)):
            assert is_skipped
            assert (params == 1).all()
    assert "step 0 was skipped: a norm over all workers is not finite" in caplog.text


def test_nan_is_let_through_where_that_was_asked_for(cluster: Callable[..., Any]) -> None:
    with psd_client.connect(cluster(2).servers, 0, 1) as ps:
        ps.declare({"w": np.ones(2), "v": np.ones(2)}, psd_client.SGD(lr=1), nan_policy="allow")
        params = ps.push_pull({"w": np.array([np.nan, 1.0]), "v": np.ones(2)})

    assert np.isnan(params["w"][0])
    assert [params["w"][1], *params["v"]] == [0, 0, 0]


def test_refusing_names_worker_tensor_and_step(cluster: Callable[..., Any]) -> None:
    """The default; nothing was sent, and the worker goes on."""
    with psd_client.connect(cluster(2).servers, 0, 1) as ps:
        ps.declare({"w": np.ones(2), "v": np.ones(2)}, psd_client.SGD(lr=1), clip_norm=1)
        ps.push_pull({"w": np.zeros(2), "v": np.zeros(2)})
        with pytest.raises(psd_client.NonFiniteGradient, match="worker 0: the gradient of 'v' at step 1") as caught:
            ps.push_pull({"w": np.zeros(2), "v": np.array([1, np.inf])})
        params = ps.push_pull({"w": np.zeros(2), "v": np.array([3.0, 4.0])})

    assert caught.value.detail == {"rank": 0, "tensor": "v", "clock": 1}
    np.testing.assert_allclose(params["v"], [0.4, 0.2], rtol=1e-6)
