"""Fixtures shared by all tests: real shards in this process, on free loopback ports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from psd.contract.config import ServerConfig
from psd.rim.server import ShardServer


@dataclass
class Cluster:
    """Running shards. `servers` is the address list that clients take."""

    shards: list[ShardServer]

    @property
    def servers(self) -> str:
        return ",".join(shard.address for shard in self.shards)


@pytest.fixture
def cluster() -> Iterator[Callable[..., Cluster]]:
    """Starts shards: cluster(shard_count, **ServerConfig fields) -> Cluster; `only`: one of them. Stopped at the end."""
    started: list[ShardServer] = []

    def start(shard_count: int = 1, *, only: int | None = None, listen: str = "127.0.0.1:0", **config: Any) -> Cluster:
        shards = [
            ShardServer(ServerConfig(shard_index=i, shard_count=shard_count, listen=listen, **config))
            for i in (range(shard_count) if only is None else [only])
        ]
        for shard in shards:
            shard.start()
            started.append(shard)
        return Cluster(shards)

    yield start
    for shard in started:
        shard.stop()
