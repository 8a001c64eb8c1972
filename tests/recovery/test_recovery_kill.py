"""Shards that are killed at random instants and started again: nothing acknowledged is lost, nothing is counted twice."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from shard_processes import ShardProcess

import psd_client

pytestmark = pytest.mark.process

SHAPES = {"weight": (300, 700), "bias": (700,), "scale": ()}


def initial_values() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


class Killer:
    """Kills shards and starts them again while `workers` runs, `kills` times, each after some more steps have been taken."""

    def __init__(self, shards: Sequence[ShardProcess], seed: int) -> None:
        self.kills = 0
        self._shards = shards
        self._random = random.Random(seed)
        self._steps = threading.Semaphore(0)

    def on_step(self, rank: int) -> None:
        """To be called by the workers after each step."""
        if rank == 0:
            self._steps.release()

    def run(self, kills: int) -> None:
        for _ in range(kills):
            for _ in range(self._random.randrange(1, 4)):
                self._steps.acquire(timeout=60)
            # Somewhere in the middle of the next step.
            threading.Event().wait(self._random.random() * 0.02)
            shard = self._random.choice(self._shards)
            shard.kill()
            shard.start()
            self.kills += 1


def train(
    servers: str, rank: int, world_size: int, steps: int, killer: Killer | None, use_push_pull: bool, **declaration: Any
) -> dict[str, np.ndarray[Any, Any]]:
    """Gradients depend on the parameters, so that one lost, doubled or late update shows in every later number."""
    with psd_client.connect(servers, rank, world_size, retry_timeout=60, wait_timeout=100) as ps:
        params = ps.declare(initial_values(), psd_client.SGD(lr=0.1, momentum=0.9), **declaration)
        for step in range(steps):
            grads = {name: (np.sin(value + rank + step) + value) / 7 for name, value in params.items()}
            if use_push_pull:
                params = ps.push_pull(grads, weight=1 + (rank + step) % 3)
            else:
                ps.push(grads, weight=1 + (rank + step) % 3)
                params = ps.pull()
            if killer is not None:
                killer.on_step(rank)
        return params


def run_workers(shards: Sequence[ShardProcess], world_size: int, work: Callable[[str, int], Any], kills: int, seed: int) -> Any:
    servers = ",".join(shard.address for shard in shards)
    with ThreadPoolExecutor(world_size) as pool:
        jobs = [pool.submit(work, servers, rank) for rank in range(world_size)]
        return [job.result() for job in jobs]


@pytest.mark.parametrize("use_push_pull", [True, False], ids=["push_pull", "push then pull"])
def test_exact_training_ends_in_the_same_bits(shard_processes: Callable[..., list[ShardProcess]], use_push_pull: bool) -> None:
    """Synchronous, exact, 3 workers x 2 shards: killed shards leave no trace in the result."""
    world_size, steps, kills, seed = 3, 40, 5, 20
    results = []
    for is_disturbed in (False, True):
        shards = shard_processes(2)
        killer = Killer(shards, seed)
        thread = threading.Thread(target=killer.run, args=(kills if is_disturbed else 0,))
        thread.start()

        def work(servers: str, rank: int, killer: Killer = killer) -> Any:
            return train(servers, rank, world_size, steps, killer, use_push_pull, consistency="sync", aggregation="exact")

        results.append(run_workers(shards, world_size, work, kills, seed))
        thread.join()
        assert killer.kills == (kills if is_disturbed else 0)

    for undisturbed, disturbed in zip(*results, strict=True):
        for name in SHAPES:
            np.testing.assert_array_equal(undisturbed[name], disturbed[name])
