"""Shared memory when either side is killed: the other one lets go of it, and keeps no descriptor."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from loaded_programs import Program
from shard_processes import ShardProcess
from tcp_sockets import connected_sockets

import psd_client

pytestmark = pytest.mark.process

SIZE = 1_200_000
"""float32: five blocks, so that the shard answers from a second thread."""

MEMORY = "memfd:psd-worker"


def held(pid: int) -> Counter[str]:
    """Descriptors of a process by kind, files aside: a job opens some. And the mappings of workers' memory.

    Connected TCP sockets count as such: a stranger may have come. One whose peer is dead has another state.
    """
    connected = connected_sockets(pid)
    found: Counter[str] = Counter()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            name = str(descriptor.readlink())
        except FileNotFoundError:  # closed meanwhile
            continue
        kind = "connected" if name in connected else name.split(":[")[0]
        if MEMORY in kind or not kind.startswith("/"):
            found[kind] += 1
    found["mapped"] = sum(MEMORY in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return found


def held_for_the_dead(pid: int) -> Counter[str]:
    """What a process holds, less the connections whose other end is open."""
    found = held(pid)
    del found["connected"]
    return found


def assert_comes_to_be(now: Callable[[], Counter[str]], expected: Counter[str]) -> None:
    """At once or soon: the end of a process is noticed a little later."""
    deadline = time.monotonic() + 100
    while now() != expected and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    assert now() == expected


def kill_workers(server: str, count: int) -> None:
    program = str(Path(__file__).with_name("killed_workers.py"))
    with Program([program, server, str(count), str(SIZE), "7"]) as killing:
        assert killing.wait(200) == 0


def test_shard_when_workers_are_killed_in_mid_push_then_lets_go_of_their_memory(
    shard_processes: Callable[..., list[ShardProcess]],
) -> None:
    (shard,) = shard_processes(1, "--lease", "60")
    before = held_for_the_dead(shard.pid)

    kill_workers(shard.address, 8)

    assert before["mapped"] == 0
    assert_comes_to_be(lambda: held_for_the_dead(shard.pid), before)


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=[pytest.mark.chaos, pytest.mark.timeout(600)])])
def test_worker_when_its_shard_is_killed_then_attaches_again_and_keeps_nothing_of_before(
    shard_processes: Callable[..., list[ShardProcess]], kills: int
) -> None:
    (shard,) = shard_processes(1, "--lease", "60")
    with psd_client.connect(shard.address, 0, 1, transport="shm", retry_timeout=60) as ps:
        ps.declare({"w": np.zeros(SIZE, np.float32)}, psd_client.SGD(lr=1), consistency="async")
        ones = np.ones(SIZE, np.float32)
        for step in range(1, kills + 2):
            assert set(ps.push_pull({"w": ones})["w"].tolist()) == {-float(step)}
            if step == 1:
                gc.collect()  # of tests before
                before = held(os.getpid())
            assert held(shard.pid)["mapped"] == 1
            shard.kill()
            shard.start()
        ps.pull()

        assert ps.transports == ["shm"]
        assert_comes_to_be(lambda: held(os.getpid()), before)
