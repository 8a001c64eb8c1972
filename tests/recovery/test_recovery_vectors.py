"""Random batches on server-side vectors, of several workers at once: whatever dies, NumPy has the same numbers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import numpy as np
import pytest
from chaos import WITH_CONNECTIONS, run_disturbed
from shard_processes import ShardProcess
from vector_programs import Mirror

import psd_client

pytestmark = pytest.mark.process

WORLD_SIZE = 2
SHARED = 9000
WIDE = 1_200_000  # of a batch that needs more than one frame at each shard


def work(
    servers: str, rank: int, on_step: Callable[[], bool], *, transport: str, steps: int, added: threading.Barrier
) -> tuple[int, int]:
    """Checks batches on vectors of its own, and counts in one of all workers; what that counts in the end, and should."""
    rng, mine = np.random.default_rng(rank), 0
    with psd_client.connect(servers, rank, WORLD_SIZE, transport=transport, retry_timeout=60) as ps:
        mirrors = [Mirror(ps, dtype, f"{rank}.") for dtype in ("float64", "int64")]
        counts = ps.vector("counts", SHARED, "int64")
        wide, ones = ps.vector(f"{rank}.wide", WIDE), np.ones(WIDE)
        for step in range(steps):
            mirrors[step % 2].run(rng, int(rng.integers(1, 12)))
            counts.add(1, rng.integers(0, SHARED, 50))
            mine += 50
            if step % 4 == 3:
                wide.add(ones)
            if step % 20 == 19:
                mirrors[step // 20 % 2].check()
            on_step()
        for mirror in mirrors:
            mirror.check()
        np.testing.assert_array_equal(wide.pull(), steps // 4)
        added.wait(100)
        return int(counts.sum()), mine


@pytest.mark.parametrize(
    ("transport", "steps", "kills", "faults"),
    [
        *(pytest.param(transport, 40, 2, 2, id=f"short-{transport}") for transport in WITH_CONNECTIONS),
        *(
            pytest.param(
                transport, 5000, 120, 200, id=f"long-{transport}", marks=[pytest.mark.chaos, pytest.mark.timeout(2400)]
            )
            for transport in (*WITH_CONNECTIONS, "shm")
        ),
    ],
)
def test_when_shards_are_killed_and_connections_break_then_every_batch_counts_once(
    shard_processes: Callable[..., list[ShardProcess]], transport: str, steps: int, kills: int, faults: int
) -> None:
    """5,000 steps of two workers, each of a random batch and a count: 10,000 random batches."""
    shards = shard_processes(2, "--lease", "60")
    doing = functools.partial(work, steps=steps, added=threading.Barrier(WORLD_SIZE))

    faults = faults if transport in WITH_CONNECTIONS else 0
    results = run_disturbed(shards, WORLD_SIZE, doing, transport=transport, seed=18, kills=kills, faults=faults)

    total = sum(mine for _, mine in results)
    assert [found for found, _ in results] == [total] * WORLD_SIZE
