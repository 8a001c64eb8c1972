"""Many workers: nothing waits for a thread, and small steps of 64 workers on 4 shards go through."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import psd_client


def test_64_workers_on_4_shards(cluster: Callable[..., Any]) -> None:
    """Synchronous steps of many workers end in the sum of what they sent."""
    world_size, steps = 64, 5
    running = cluster(4, lease_s=60)
    initial = {"w": np.zeros(20_000, np.float32), "b": np.zeros((), np.float32)}

    def worker(rank: int) -> dict[str, Any]:
        with psd_client.connect(running.servers, rank, world_size, wait_timeout=100, report_after=100) as ps:
            params = ps.declare(initial, psd_client.SGD(lr=1.0), consistency="sync", reduce="sum")
            for _ in range(steps):
                params = ps.push_pull({"w": np.full(20_000, rank, np.float32), "b": np.float32(1)})
            ps.barrier("end")
            return params

    with ThreadPoolExecutor(world_size) as pool:
        results = list(pool.map(worker, range(world_size)))

    for params in results:
        np.testing.assert_array_equal(params["w"], np.full(20_000, -steps * sum(range(world_size)), np.float32))
        assert params["b"] == -steps * world_size
    assert all(shard.done.is_set() for shard in running.shards)
