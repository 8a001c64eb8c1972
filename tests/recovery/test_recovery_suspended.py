"""A shard that is suspended (SIGSTOP), and its workers meanwhile: they say so, end when they are told to, and go on later."""

from __future__ import annotations

import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loaded_programs import Program
from shard_processes import ShardProcess, servers_of

import psd_client
from psd_client.lanes.shard_lane import ShardLane

pytestmark = pytest.mark.process

TRANSPORTS = ("shm", "tcp", "grpc")
SIZE = 600_000
"""Blocks enough that sending and receiving overlap."""

ENDS_IN_S = 25
"""Six seconds and what a busy machine adds; before, the worker ended after 30 s over TCP, and not at all over shared memory."""

PROGRAM = """
import sys
import numpy as np
import psd_client

servers, transport, size = sys.argv[1:]
ps = psd_client.connect(servers, 0, 1, transport=transport)
ps.declare({"w": np.zeros(int(size), np.float32)}, psd_client.SGD(lr=1.0))
ones = np.ones(int(size), np.float32)
while True:
    ps.push_pull({"w": ones})
    print("step", flush=True)
"""


class Training:
    """A worker in a process of its own, and what it says."""

    def __init__(self, process: Program) -> None:
        self.process = process
        self.errors: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read_errors, daemon=True).start()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors.put(line)


@contextmanager
def training(tmp_path: Path, *arguments: str) -> Iterator[Training]:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with Program([str(script), *arguments], stderr=subprocess.PIPE) as process:
        try:
            for _ in range(3):
                assert process.stdout.readline() == "step\n"
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield Training(process)
        finally:
            process.kill()


@pytest.mark.parametrize(("transport", "count"), [("shm", 2), ("tcp", 1), ("grpc", 2)])
def test_worker_when_a_shard_is_suspended_then_names_it_and_ends_by_ctrl_c(
    shard_processes: Callable[..., list[ShardProcess]], tmp_path: Path, transport: str, count: int
) -> None:
    """Neither the call, nor the goodbye, nor the end of the interpreter waits for it for long."""
    shards = shard_processes(count)
    with training(tmp_path, servers_of(shards), transport, str(SIZE)) as program:
        shards[-1].signal(signal.SIGSTOP)
        named = f"shard {count - 1} at {shards[-1].address} has not answered"
        while named not in program.errors.get(timeout=ENDS_IN_S):
            pass

        program.process.send_signal(signal.SIGINT)

        assert program.process.wait(ENDS_IN_S) != 0
    shards[-1].signal(signal.SIGCONT)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_worker_when_interrupted_while_a_shard_is_suspended_then_may_go_on(
    shard_processes: Callable[..., list[ShardProcess]], transport: str
) -> None:
    """The shard that wakes up takes the gradient of the push that was interrupted, or none, and not what the program has put
    into its place since."""
    shards = shard_processes(2)
    with psd_client.connect(servers_of(shards), 0, 1, transport=transport, retry_timeout=60) as ps:
        ps.declare({"w": np.zeros(SIZE, np.float32)}, psd_client.SGD(lr=1.0))
        ones = np.ones(SIZE, np.float32)
        ps.push_pull({"w": ones})
        shards[1].signal(signal.SIGSTOP)
        timer = threading.Timer(1.0, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        timer.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                ps.push_pull({"w": ones})
        finally:  # or else, if the call ends otherwise, the signal interrupts the whole session of tests
            timer.cancel()
            timer.join()
        shards[1].signal(signal.SIGCONT)

        after = ps.push_pull({"w": 10 * ones})["w"]
        assert set(after.tolist()) <= {-11.0, -12.0}
        assert set((after - ps.push_pull({"w": 10 * ones})["w"]).tolist()) == {10.0}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_worker_when_a_shard_is_suspended_as_it_opens_the_lane_then_goes_on(
    shard_processes: Callable[..., list[ShardProcess]], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than a greeting is waited for: between the ticket and the greeting, the worst moment."""
    (shard,) = shard_processes(1)
    resumed = threading.Timer(7.0, shard.signal, (signal.SIGCONT,))

    def suspend(lane: Any, *arguments: Any) -> Any:
        reply = open_bulk(lane, *arguments)
        if not resumed.is_alive() and not resumed.finished.is_set():
            shard.signal(signal.SIGSTOP)
            resumed.start()
        return reply

    open_bulk = ShardLane.open_bulk
    monkeypatch.setattr(ShardLane, "open_bulk", suspend)
    with psd_client.connect(shard.address, 0, 1, transport=transport, retry_timeout=60) as ps:
        ps.declare({"w": np.zeros(SIZE, np.float32)}, psd_client.SGD(lr=1.0))

        assert set(ps.push_pull({"w": np.ones(SIZE, np.float32)})["w"].tolist()) == {-1.0}
        assert ps.transports == [transport]
    resumed.join()
