"""Runs workers: threads of the test's process, each with a connection of its own to real shards."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import psd_client

RunWorkers = Callable[..., list[Any]]


@pytest.fixture
def run_workers(cluster: Callable[..., Any]) -> RunWorkers:
    """run_workers(world_size, shards, worker) -> what worker(ps) returned, in the order of the ranks; options go to connect."""

    def run(world_size: int, shards: int, worker: Callable[[psd_client.ParameterServer], Any], **options: Any) -> list[Any]:
        servers = cluster(shards, lease_s=60.0).servers  # a busy machine must not look like a dead worker

        def connected(rank: int) -> Any:
            with psd_client.connect(servers, rank, world_size, **{"wait_timeout": 20, **options}) as ps:
                return worker(ps)

        with ThreadPoolExecutor(world_size) as pool:
            return list(pool.map(connected, range(world_size)))

    return run
