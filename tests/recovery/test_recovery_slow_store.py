"""A checkpoint that is being written while its shard goes back to an earlier one: what it holds is the old arena's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psd_client
from psd.checkpoint import CheckpointDirectory, CheckpointState
from psd.contract.config import ServerConfig
from psd.rim.server import ShardServer

BLOCKS = 128
ELEMENTS = 2_000


class SlowStore:
    """A crash point at which a shard's numbers are held back as long as `holds` is set."""

    def __init__(self) -> None:
        self.holds = threading.Event()
        self.is_held = threading.Event()
        self.goes_on = threading.Event()

    def __call__(self, step: str) -> None:
        if self.holds.is_set() and step.startswith("write shard-"):
            self.is_held.set()
            assert self.goes_on.wait(100)


@pytest.fixture
def start_shard() -> Iterator[Callable[..., ShardServer]]:
    """Starts one of two shards: start_shard(index, crash_point, **ServerConfig fields)."""
    started: list[ShardServer] = []

    def start(index: int, crash_point: Callable[[str], None] = lambda _: None, **config: Any) -> ShardServer:
        config.setdefault("listen", "127.0.0.1:0")
        started.append(ShardServer(ServerConfig(index, 2, **config), crash_point=crash_point))
        started[-1].start()
        return started[-1]

    yield start
    for server in started:
        server.stop()


def connect(shards: list[ShardServer]) -> psd_client.ParameterServer:
    return psd_client.connect(",".join(shard.address for shard in shards), 0, 1, wait_timeout=60)


def declare(ps: psd_client.ParameterServer) -> dict[str, Any]:
    """Each group is a block of its own."""
    rng = np.random.default_rng(1)
    initial = {f"w{i}": rng.standard_normal(ELEMENTS).astype(np.float32) for i in range(BLOCKS)}
    groups = [{"params": [name]} for name in initial]
    return ps.declare(initial, psd_client.SGD(lr=0.1, momentum=0.9), groups=groups, aggregation="exact")


def step(ps: psd_client.ParameterServer, params: dict[str, Any]) -> dict[str, Any]:
    return ps.push_pull({name: (np.sin(value + ps.clock) + value) / 7 for name, value in params.items()})


def undisturbed(start_shard: Callable[..., ShardServer], end: int) -> dict[str, Any]:
    with connect([start_shard(0), start_shard(1)]) as ps:
        params = declare(ps)
        while ps.clock < end:
            params = step(ps, params)
        return params


@pytest.mark.parametrize(
    "has_state_dir", [pytest.param(False, marks=pytest.mark.chaos, id="in memory"), pytest.param(True, id="in --state-dir")]
)
def test_a_shard_goes_back_while_its_checkpoint_is_written_slowly(
    start_shard: Callable[..., ShardServer], tmp_path: Path, has_state_dir: bool
) -> None:
    """Its pages are given back when the new arena has long been in use; all blocks end in the bits of an undisturbed run."""
    url, store = str(tmp_path / "checkpoints"), SlowStore()
    config: dict[str, Any] = {"checkpoint_dir": url, "checkpoint_steps": 10, "lease_s": 60}
    if has_state_dir:
        config["state_dir"] = str(tmp_path / "state")
    shards = [start_shard(0, store, **config), start_shard(1, **config | {"state_dir": ""})]
    with connect(shards) as ps:
        params = declare(ps)
        while not any(info.state is CheckpointState.VALID for info in CheckpointDirectory(url).checkpoints()):
            params = step(ps, params)
            store.is_held.wait(0.02)  # an undisturbed job has to make each of these steps again
        store.holds.set()
        while not store.is_held.wait(0.02):
            params = step(ps, params)
        for _ in range(3):
            params = step(ps, params)
        shards[1].stop()
        start_shard(1, **config | {"state_dir": "", "listen": shards[1].address})
        with pytest.raises(psd_client.RolledBack):
            params = step(ps, params)
        params = ps.pull()
        for _ in range(3):
            params = step(ps, params)

        store.holds.clear()
        store.goes_on.set()
        checkpointer = shards[0]._checkpointer
        assert checkpointer is not None
        with checkpointer._idle:
            assert checkpointer._idle.wait_for(lambda: checkpointer._shard.cuts.unwritten == 0, 60)
        params = ps.pull()
        for _ in range(10):
            params = step(ps, params)
        end = ps.clock

    for name, values in undisturbed(start_shard, end).items():
        np.testing.assert_array_equal(values, params[name], err_msg=name)
