"""Armed steps as a stranger sees them: raw sockets and structures, right and wrong ones. No psd_client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from raw_client import SGD
from raw_steps import CASE, REVOKED, Again, Done, StepWorker

LANES = ["tcp", "local", "memory"]


@pytest.fixture
def start(cluster: Callable[..., Any], dial: Callable[..., grpc.Channel]) -> Iterator[Callable[..., StepWorker]]:
    """start(rank, world_size, shard=..., ...) -> a worker of one job on one shard; `start.shard`."""
    joined: list[StepWorker] = []
    shards: list[Any] = []

    def enter(rank: int = 0, world_size: int = 1, *, config: dict[str, Any] | None = None, **how: Any) -> StepWorker:
        if not shards:
            shards.extend(cluster(1, **(config or {})).shards)
            enter.shard = shards[0].shard  # type: ignore[attr-defined]
        joined.append(StepWorker(dial(shards[0].address), rank, world_size, **how))
        return joined[-1]

    yield enter
    for worker in joined:
        worker.close()


@pytest.mark.parametrize("mode", ["async", "sync", "ssp"])
@pytest.mark.parametrize("lane", LANES)
def test_steps_do_what_pushes_do(start: Callable[..., StepWorker], mode: str, lane: str) -> None:
    worker = start(lane=lane, mode=mode)
    found = worker.push_pull((1, 2), 0)
    assert found == Done(1, 2, 0, [1, 1], [[-1.0] * 3, [-2.0] * 3])
    assert worker.offer is not None

    for clock in range(1, 6):
        assert worker.step((1, 2), clock) == Done(
            clock + 1, 2, 0, [clock + 1] * 2, [[-1.0 - clock] * 3, [-2.0 - 2 * clock] * 3]
        )

    assert worker.push_pull((1, 2), 6).parameters == [[-7.0] * 3, [-14.0] * 3], "and pushes what steps do"
