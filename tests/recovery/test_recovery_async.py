"""Asynchronous training with integers: whatever dies, the sum of all that was acknowledged is exact."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos import run_disturbed
from loaded_programs import Program
from numpy.typing import NDArray
from shard_processes import ShardProcess, servers_of

import psd_client

pytestmark = pytest.mark.process

SIZE = 600_000
"""float32: two blocks on each of two shards."""

WORLD_SIZE = 3
SEED = 30


def gradient(rank: int, step: int) -> NDArray[np.float32]:
    """Small integers that differ by worker, step and element; sums of thousands of them are exact in float32."""
    return _shifted((3 * rank + 5 * step) % 11)


@functools.cache
def _shifted(by: int) -> NDArray[np.float32]:
    return ((np.arange(SIZE) + by) % 11).astype(np.float32)


def total(counts: Sequence[int]) -> NDArray[np.float32]:
    """The parameters after so many steps of each worker."""
    sums = np.zeros(SIZE, np.float32)
    for rank, count in enumerate(counts):
        for step in range(count):
            sums -= gradient(rank, step)
    return sums


def work(
    servers: str, rank: int, on_step: Callable[[], bool], *, transport: str, pushed: threading.Barrier, is_answered: bool = True
) -> tuple[int, NDArray[Any]]:
    """Pushes until everything has struck and, when all workers have, pulls what there is then: steps, parameters."""
    count = 0
    with psd_client.connect(servers, rank, WORLD_SIZE, transport=transport, retry_timeout=60) as ps:
        ps.declare({"w": np.zeros(SIZE, np.float32)}, psd_client.SGD(lr=1), consistency="async", reduce="sum")
        is_done = False
        while not is_done:
            grads = {"w": gradient(rank, count)}
            if is_answered:
                ps.push_pull(grads)
            else:
                ps.push(grads)
            count += 1
            is_done = on_step()
        pushed.wait(100)
        return count, ps.pull()["w"]


@pytest.mark.parametrize(("transport", "is_answered", "kills", "faults"), [("grpc", True, 2, 4), ("shm", False, 3, 0)])
def test_when_shards_are_killed_and_connections_break_then_the_sum_is_exact(
    shard_processes: Callable[..., list[ShardProcess]], transport: str, is_answered: bool, kills: int, faults: int
) -> None:
    """No push is lost, and none is counted twice, though it may have been sent any number of times; test_recovery_steps.py has
    TCP, tests/jepsen does it at length."""
    shards = shard_processes(2, "--lease", "60")
    doing = functools.partial(work, pushed=threading.Barrier(WORLD_SIZE), is_answered=is_answered)

    results = run_disturbed(shards, WORLD_SIZE, doing, transport=transport, seed=SEED, kills=kills, faults=faults)

    expected = total([count for count, _ in results])
    for _, result in results:
        np.testing.assert_array_equal(result, expected)


def test_when_a_worker_is_killed_then_it_loses_at_most_the_push_that_was_not_acknowledged(
    shard_processes: Callable[..., list[ShardProcess]],
) -> None:
    """Each block has counted that push or not; the other workers' sum, and what was acknowledged before, are exact."""
    source = random.Random(SEED)
    shards = shard_processes(2, "--lease", "60")
    program = str(Path(__file__).with_name("dying_worker.py"))
    arguments = [servers_of(shards), "2", "3", str(SIZE), "shm"]

    with Program([program, *arguments]) as dying:
        acknowledged: list[int] = []
        killing = threading.Thread(target=_kill_after, args=(dying, source, acknowledged))
        killing.start()
        doing = functools.partial(work, pushed=threading.Barrier(2, action=killing.join))
        results = run_disturbed(shards, 2, doing, transport="shm", seed=SEED, kills=1, faults=0)

    (left, values), (right, _) = results
    pushed = total([left, right]) - values
    print(f"acknowledged {acknowledged[-1]}, counted {np.unique(pushed)}")  # noqa: T201 - for whoever sees it fail
    assert set(np.unique(pushed)) <= {acknowledged[-1], acknowledged[-1] + 1}


def _kill_after(process: Program, source: random.Random, acknowledged: list[int]) -> None:
    """At a random instant after a random number of acknowledged pushes, which are noted."""
    acknowledged += [int(process.stdout.readline()) for _ in range(source.randrange(2, 10))]
    threading.Event().wait(source.random() * 0.03)  # the instant itself is random
    process.kill()
    acknowledged += [int(line) for line in process.stdout]
