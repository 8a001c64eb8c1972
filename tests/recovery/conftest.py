"""Shards as processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from shard_processes import ShardProcess


@pytest.fixture
def shard_processes(tmp_path: Path) -> Iterator[Callable[..., list[ShardProcess]]]:
    """Starts shards as processes: shard_processes(count, *flags). Killed when the test ends.

    `crash_points`: PSD_CRASH_POINT of each one's first life.
    """
    started: list[ShardProcess] = []

    def start(count: int, *flags: str, crash_points: Sequence[str] = ()) -> list[ShardProcess]:
        shards = [ShardProcess(i, count, tmp_path / f"shard-{len(started)}-{i}", *flags) for i in range(count)]
        for shard, crash_point in itertools.zip_longest(shards, crash_points, fillvalue=""):
            started.append(shard)
            shard.begin_start(crash_point)
        for shard in shards:
            shard.end_start()
        return shards

    yield start
    for shard in started:
        shard.close()
