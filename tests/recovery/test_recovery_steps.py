"""Armed steps of small integers, under shards that are killed and connections that break: the sum of all of them is exact."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from chaos import run_disturbed
from numpy.typing import NDArray
from shard_processes import ShardProcess
from short_ways import Watch

import psd_client

pytestmark = pytest.mark.process

SIZES = (3000, 4001, 2500)
"""Of blocks, on two shards; the proxy takes no less for data."""
WORLD_SIZE = 2
STEPS_MIN = 200
"""Of each worker, and until everything has struck."""


def gradient(rank: int, step: int) -> dict[str, NDArray[np.float32]]:
    """Small integers that differ by worker, step and element; sums of thousands of them are exact in float32."""
    return {f"t{size}": ((np.arange(size) + 3 * rank + 5 * step) % 11).astype(np.float32) for size in SIZES}


def work(
    servers: str, rank: int, on_step: Callable[[], bool], *, transport: str, consistency: str, pushed: threading.Barrier
) -> tuple[int, dict[str, NDArray[Any]]]:
    """Pushes until everything has struck and, when all workers have, pulls what there is then: steps, parameters."""
    count, is_done = 0, False
    with psd_client.connect(servers, rank, WORLD_SIZE, transport=transport, retry_timeout=60, wait_timeout=100) as ps:
        values = {name: np.zeros_like(array) for name, array in gradient(0, 0).items()}
        groups = [{"params": [name]} for name in values]
        ps.declare(values, psd_client.SGD(lr=1), groups=groups, consistency=consistency, reduce="sum")
        while count < STEPS_MIN or not is_done:
            ps.push_pull(gradient(rank, count))
            count += 1
            is_done = on_step()
            if consistency == "sync" and count >= STEPS_MIN:  # all make as many
                is_done = ps.all_reduce({"done": float(is_done)}, "min")["done"] == 1
        pushed.wait(100)
        return count, ps.pull()


@pytest.mark.parametrize("consistency", ["async", "sync"])
@pytest.mark.parametrize(("transport", "kills", "faults"), [("tcp", 2, 6), ("shm", 3, 0)])
def test_when_shards_are_killed_and_connections_break_in_steps_then_the_sum_is_exact(
    shard_processes: Callable[..., list[ShardProcess]],
    watch: Watch,
    transport: str,
    kills: int,
    faults: int,
    consistency: str,
) -> None:
    """No step is lost, and none is counted twice, whatever was cut off of it or of its answer."""
    shards = shard_processes(2, "--lease", "60")
    doing = functools.partial(work, consistency=consistency, pushed=threading.Barrier(WORLD_SIZE))

    results = run_disturbed(shards, WORLD_SIZE, doing, transport=transport, seed=50, kills=kills, faults=faults)

    counts = [count for count, _ in results]
    for _, params in results:
        for name, value in params.items():
            made = [gradient(rank, step)[name] for rank, count in enumerate(counts) for step in range(count)]
            assert (value == -np.sum(made, axis=0, dtype=np.float32)).all(), name
    assert watch.took.count(True) > STEPS_MIN / 4
