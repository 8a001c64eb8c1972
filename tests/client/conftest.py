"""Shards that the client's tests stop and start again, and some that only do what a script says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client_faults import Restartable
from scripted_shard import Script, ScriptedShard, ToldLane


@pytest.fixture
def job(cluster: Callable[..., Any], tmp_path: Path) -> Restartable:
    return Restartable(cluster, tmp_path)


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedShard]]:
    """scripted(*scripts, local=False) -> a shard that behaves so; closed in the end."""
    started: list[ScriptedShard] = []

    def start(*scripts: Script, **options: Any) -> ScriptedShard:
        started.append(ScriptedShard(*scripts, **options))
        return started[-1]

    yield start
    for shard in started:
        shard.close()


@pytest.fixture
def told() -> Iterator[Callable[..., ToldLane]]:
    """told(port, **options) -> a lane there; closed in the end."""
    made: list[ToldLane] = []

    def make(port: int = 0, **options: Any) -> ToldLane:
        made.append(ToldLane(port, **options))
        return made[-1]

    yield make
    for lane in made:
        lane.close()
