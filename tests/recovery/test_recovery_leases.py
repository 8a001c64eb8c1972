"""Shards and workers that are suspended (SIGSTOP) for longer than a lease, at the moments that hurt most."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from shard_processes import ShardProcess, servers_of
from waiting import wait_until

import psd_client
from psd.v1 import control_pb2

pytestmark = pytest.mark.process

AWAY_S = 10.0
"""Two and a half leases."""


def until_away(shard: ShardProcess) -> None:
    """Return when the others have been without somebody for long, by this shard's clock."""
    back_at = shard.status().numbers["uptime_s"] + AWAY_S
    while (left_s := back_at - shard.status().numbers["uptime_s"]) > 0:
        threading.Event().wait(left_s)


def seen(shard: ShardProcess) -> control_pb2.WorkerStatus:
    return shard.status().workers[0]


def test_a_worker_that_comes_back_while_a_shard_is_away_for_longer_than_its_lease_goes_on(
    shard_processes: Callable[..., list[ShardProcess]],
) -> None:
    """Fenced while it was suspended, it joins shard 0, and shard 1 answers 10 s later: its new session is still shard 0's."""
    shards = shard_processes(2, "--lease", "4")
    program = [sys.executable, str(Path(__file__).with_name("stepping_worker.py")), servers_of(shards), "grpc"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(program, text=True, bufsize=1, **pipes) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            worker.stdin.write("step\n")
            assert worker.stdout.readline() == "1 {-1.0} 0\n"
            before = seen(shards[0]).session
            worker.send_signal(signal.SIGSTOP)
            wait_until(lambda: all(seen(shard).state == control_pb2.WORKER_STATE_EXPIRED for shard in shards))
            shards[1].signal(signal.SIGSTOP)
            worker.stdin.write("step\n")
            worker.send_signal(signal.SIGCONT)
            wait_until(lambda: seen(shards[0]).session > before)
            joined = seen(shards[0]).session
            until_away(shards[0])
            assert (seen(shards[0]).session, seen(shards[0]).state) == (joined, control_pb2.WORKER_STATE_LIVE)
            shards[1].signal(signal.SIGCONT)
            rejoins = worker.stdout.readline().split()[-1:]
            said = worker.communicate(timeout=200)[1]
        finally:
            shards[1].signal(signal.SIGCONT)
            worker.kill()

    assert (rejoins, worker.returncode) == (["1"], 0), said
    assert "ran out; it has joined again and continues" in said
    assert "same rank" not in said


def test_a_shard_that_is_suspended_right_after_a_restart_expires_nobody(
    shard_processes: Callable[..., list[ShardProcess]],
) -> None:
    """It has heard nobody since it is back, because it has not run: the worker's next gradient counts as any other."""
    shards = shard_processes(2, "--lease", "4")
    ones = np.ones(20_000, np.float32)
    with psd_client.connect(servers_of(shards), 0, 1, retry_timeout=60) as ps:
        ps.declare({"w": np.zeros(20_000, np.float32)}, psd_client.SGD(lr=1))
        ps.push_pull({"w": ones})
        shards[0].kill()
        shards[0].start()
        shards[0].signal(signal.SIGSTOP)
        until_away(shards[1])
        shards[0].signal(signal.SIGCONT)

        params = ps.push_pull({"w": ones})

        assert set(params["w"].tolist()) == {-2.0}
        assert (ps.clock, ps.stats()["rejoins"], ps.stats()["pushes_dropped"]) == (2, 0, 0)
