"""Helpers of the rim's tests: channels that are closed when the test ends, and waiting for a condition."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from raw_bulk import SIZE, sealed_memory
from raw_steps import StepWorker


@pytest.fixture
def dial() -> Iterator[Callable[..., grpc.Channel]]:
    """Opens channels: dial(address, **options) -> Channel. Two calls do not share a connection."""
    channels: list[grpc.Channel] = []

    def open_channel(address: str, **options: int) -> grpc.Channel:
        settings = [(f"grpc.{name}", value) for name, value in options.items()]
        channels.append(grpc.insecure_channel(address, [*settings, ("grpc.use_local_subchannel_pool", 1)]))
        return channels[-1]

    yield open_channel
    for channel in channels:
        channel.close()


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Waits for a condition, a few milliseconds at a time, and fails when it has not come true in time."""
    pause = threading.Event()

    def wait(condition: Callable[[], bool], what: str, timeout_s: float = 100.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not in {timeout_s:g} s: {what}"
            pause.wait(0.005)

    return wait


@pytest.fixture
def memory() -> Iterator[int]:
    """The descriptor of a sealed memory file."""
    fd = sealed_memory(SIZE)
    yield fd
    os.close(fd)


@pytest.fixture
def start(cluster: Callable[..., Any], dial: Callable[..., grpc.Channel]) -> Iterator[Callable[..., StepWorker]]:
    """start(rank, world_size, shard=..., ...) -> a worker of one job on one shard; `start.shard`."""
    joined: list[StepWorker] = []
    shards: list[Any] = []

    def enter(rank: int = 0, world_size: int = 1, *, config: dict[str, Any] | None = None, **how: Any) -> StepWorker:
        if not shards:
            shards.extend(cluster(1, **(config or {})).shards)
            enter.server, enter.shard = shards[0], shards[0].shard  # type: ignore[attr-defined]
        joined.append(StepWorker(dial(shards[0].address), rank, world_size, **how))
        return joined[-1]

    yield enter
    for worker in joined:
        worker.close()
