"""Shards as processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shard_processes import ShardProcess


@pytest.fixture
def shard_processes(tmp_path: Path) -> Iterator[Callable[..., list[ShardProcess]]]:
    """Starts shards as processes: shard_processes(count, *flags). Killed when the test ends."""
    started: list[ShardProcess] = []

    def start(count: int, *flags: str) -> list[ShardProcess]:
        shards = [ShardProcess(i, count, tmp_path / f"shard-{len(started)}-{i}", *flags) for i in range(count)]
        for shard in shards:
            shard.start()
            started.append(shard)
        return shards

    yield start
    for shard in started:
        shard.close()
