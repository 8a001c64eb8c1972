"""Synchronous training with any number of workers and shards is one process of torch.optim.SGD on the joined batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import psd_client

torch = pytest.importorskip("torch")

STEPS = 50

# Larger than a block, of more than one block with a remainder, scalar, empty, fewer elements than shards, and of other dtypes.
SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "embedding": ((601, 443), "float32"),
    "empty": ((0, 4), "float32"),
    "scalar": ((), "float32"),
    "two": ((2,), "float32"),
    "matrix": ((37, 11), "float32"),
    "double": ((129, 3), "float64"),
}


def initial_values(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(dtype) for name, (shape, dtype) in SHAPES.items()}


@functools.cache
def noise(rank: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng((7, rank))
    return {name: (0.1 * rng.standard_normal(shape)).astype(dtype) for name, (shape, dtype) in SHAPES.items()}


def gradients(step: int, rank: int) -> dict[str, np.ndarray[Any, Any]]:
    """Gradients of one worker at one step: its own noise, moved on and scaled anew at each step."""
    return {name: (np.roll(value, 31 * step) * np.cos(step)).astype(value.dtype) for name, value in noise(rank).items()}


def batch_size(step: int, rank: int) -> int:
    """Uneven, as last batches are."""
    return 1 + (step * 7 + rank * 3) % 5


def torch_training(world_size: int, seed: int, **sgd: Any) -> dict[str, np.ndarray[Any, Any]]:
    """One process that sees the mean gradient over all samples of all workers."""
    params = {name: torch.tensor(value, requires_grad=True) for name, value in initial_values(seed).items()}
    optimizer = torch.optim.SGD(list(params.values()), **sgd)
    for step in range(STEPS):
        weights = [batch_size(step, rank) for rank in range(world_size)]
        parts = [gradients(step, rank) for rank in range(world_size)]
        for name, param in params.items():
            total = sum(np.float64(w) * part[name].astype(np.float64) for w, part in zip(weights, parts, strict=True))
            param.grad = torch.as_tensor(total / sum(weights)).to(param.dtype).reshape(param.shape)
        optimizer.step()
    return {name: param.detach().numpy() for name, param in params.items()}


def worker(servers: str, rank: int, world_size: int, seed: int, sgd: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    with psd_client.connect(servers, rank, world_size, wait_timeout=60) as ps:
        params = ps.declare(initial_values(seed), psd_client.SGD(**sgd), consistency="sync", reduce="mean")
        for step in range(STEPS):
            params = ps.push_pull(gradients(step, rank), weight=batch_size(step, rank))
        return params


FLAVOURS: list[dict[str, Any]] = [
    {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.5, "dampening": 0.3, "weight_decay": 1e-3},
]


@pytest.mark.parametrize(("world_size", "shard_count"), [(1, 1), (1, 5), (2, 2), (2, 3), (4, 1), (4, 3), (4, 5)])
def test_training_equals_one_torch_process(cluster: Callable[..., Any], world_size: int, shard_count: int) -> None:
    """Equal to 1e-6 of the tensor's largest value after 50 steps, and the same bits for every worker."""
    sgd = FLAVOURS[(world_size + shard_count) % len(FLAVOURS)]  # each size of job meets each flavour
    servers = cluster(shard_count).servers
    with ThreadPoolExecutor(world_size) as pool:
        jobs = [pool.submit(worker, servers, rank, world_size, 0, sgd) for rank in range(world_size)]
        results = [job.result() for job in jobs]

    expected = torch_training(world_size, 0, **sgd)
    for name in SHAPES:
        scale = np.abs(expected[name]).max(initial=0)
        np.testing.assert_allclose(results[0][name], expected[name], rtol=0, atol=1e-6 * scale, err_msg=name)
    for other in results[1:]:
        for name in SHAPES:
            np.testing.assert_array_equal(results[0][name], other[name])


def test_shard_count_does_not_change_a_bit(cluster: Callable[..., Any]) -> None:
    """However the parameters are cut, elementwise rules compute the same bits."""
    sgd = FLAVOURS[0]

    results = [worker(cluster(shard_count).servers, 0, 1, 0, sgd) for shard_count in (1, 2, 3, 5)]

    for other in results[1:]:
        for name in SHAPES:
            np.testing.assert_array_equal(results[0][name], other[name])
