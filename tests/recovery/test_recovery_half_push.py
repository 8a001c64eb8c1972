"""A worker that is killed in the middle of a push: the others go on when its lease ends; what it left is as promised."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import half_push_job
import numpy as np
import pytest
from loaded_programs import Program
from numpy.typing import NDArray

pytestmark = pytest.mark.process

WORLD_SIZE = 3
STEPS_TOGETHER = 3
STEPS = 6
LEASE_S = 6
SLACK_S = 100
"""Seconds for shards to look at leases, and for a busy machine."""


@contextmanager
def dying_worker(servers: str, blocks: int, aggregation: str, transport: str) -> Iterator[Program]:
    """Rank 2, a process."""
    program = str(Path(__file__).with_name("half_push_worker.py"))
    arguments = [servers, "2", f"{WORLD_SIZE}", f"{STEPS_TOGETHER}", f"{blocks}", aggregation, transport]
    with Program([program, *arguments]) as process:
        yield process
        process.kill()


def train(servers: str, blocks: int, aggregation: str, transport: str) -> tuple[list[NDArray[Any]], float]:
    """Parameters after each step of worker 0, and how long worker 0 waited for the first step without rank 2."""
    times: list[float] = []
    has_died = threading.Barrier(2)

    def work(rank: int) -> list[NDArray[Any]]:
        seen = []
        with half_push_job.connected(servers, rank, WORLD_SIZE, aggregation, transport) as (ps, params):
            for step in range(STEPS):
                if step == STEPS_TOGETHER:
                    if rank == 0:
                        assert dying.stdout.readline() == "here\n"
                        dying.kill()
                        times.append(time.monotonic())
                    has_died.wait(100)
                params = ps.push_pull(half_push_job.gradients(params, rank, step))
                seen.append(params["w"])
                if step == STEPS_TOGETHER and rank == 0:
                    times.append(time.monotonic())
        return seen

    with dying_worker(servers, blocks, aggregation, transport) as dying, ThreadPoolExecutor(2) as pool:
        seen, _ = pool.map(work, range(2))
    return seen, times[1] - times[0]


@pytest.mark.parametrize("transport", ["shm", *(pytest.param(other, marks=pytest.mark.chaos) for other in ("tcp", "grpc"))])
def test_exact_when_a_worker_is_killed_in_mid_push_then_its_half_push_leaves_no_trace(
    cluster: Callable[..., Any], transport: str
) -> None:
    """The others go on within its lease, to the same bits as if that push had never been begun."""
    without, _ = train(cluster(2, lease_s=LEASE_S).servers, 0, "exact", transport)
    with_half, waited = train(cluster(2, lease_s=LEASE_S).servers, 1, "exact", transport)

    assert waited < LEASE_S + SLACK_S
    np.testing.assert_array_equal(with_half, without)


@pytest.mark.parametrize("transport", ["tcp", *(pytest.param(other, marks=pytest.mark.chaos) for other in ("shm", "grpc"))])
def test_fast_when_a_worker_is_killed_in_mid_push_then_what_had_arrived_counts_once(
    cluster: Callable[..., Any], transport: str
) -> None:
    """The others go on within its lease; a block has the dead worker's gradient whole, or not at all."""
    seen, waited = train(cluster(2, lease_s=LEASE_S).servers, 1, "fast", transport)

    assert waited < LEASE_S + SLACK_S
    older, old, new = seen[STEPS_TOGETHER - 2 : STEPS_TOGETHER + 1]
    others, half = (
        sum(half_push_job.gradients({"w": old}, rank, STEPS_TOGETHER)["w"] for rank in ranks) for ranks in (range(2), [2])
    )
    first_block = np.arange(half_push_job.SIZE) < half_push_job.SIZE // 4
    momentum = (older - old) * half_push_job.SCALARS[1]
    np.testing.assert_array_equal(old - new, momentum + others + np.where(first_block, half, 0))
