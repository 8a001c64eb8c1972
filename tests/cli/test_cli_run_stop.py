"""psd-run: a job that one of its workers ends for all, while shard 0 is killed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL

import pytest
from commands import Job

from psd.checkpoint import CheckpointDirectory

pytestmark = pytest.mark.process

TRAINING = """
import pathlib, sys, threading
import numpy as np
import psd_client

def wait_for(name):
    while not pathlib.Path(sys.argv[1], name).exists():
        threading.Event().wait(0.01)

ones = {"w": np.ones(50_000, np.float32)}
with psd_client.connect() as ps:
    ps.declare({"w": np.zeros(50_000, np.float32)}, psd_client.SGD(lr=1.0), reduce="sum")
    while ps.clock < 3:
        ps.push_pull(ones)
    if ps.rank == 1:
        wait_for("sum")
    print("sums", flush=True)
    total = ps.all_reduce({"loss": 0.1 * (ps.rank + 1), "count": 10**ps.rank})
    print("sum", dict(total), "over", total.workers, flush=True)
    if ps.rank == 1:
        print("ends at", ps.stop(), flush=True)
        wait_for("end")
    try:
        while True:
            values = ps.push_pull(ones)["w"]
    except psd_client.Drained as ended:
        print(f"{ended}: {ps.clock} steps, {sorted(set(values.tolist()))}", flush=True)
        raise
"""
"""Three steps, a sum over both workers, and an end that worker 1 asks for. It waits twice for a file of the test's."""


def kill_shard_0(run: Job) -> None:
    os.kill(run.shard_pid(0), SIGKILL)
    run.line(r"shard 0 serves again")


def test_job_when_a_worker_stops_it_and_shard_0_is_killed_then_all_end_at_one_step_with_the_same_sums(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    """Once while a worker waits for the sum, and once between the call and the end. psd-run says why the job has ended."""
    place = str(tmp_path / "checkpoints")
    run = job(TRAINING, "--shards", "2", "--workers", "2", "--checkpoint-dir", place, args=(str(tmp_path),))

    run.line(r"worker 0\] sums")
    kill_shard_0(run)
    (tmp_path / "sum").touch()
    run.line(r"worker 1\] ends at 5")
    kill_shard_0(run)
    (tmp_path / "end").touch()

    assert run.end() == 0
    for rank in range(2):
        assert f"[worker {rank}] sum {{'loss': 0.30000000000000004, 'count': 11}} over 2" in run.output
        ended = f"[worker {rank}] the job ends at step 5, as worker 1 has asked (stop): 5 steps, [-10.0]"
        assert ended in run.output
    assert "ended at step 5, as worker 1 has asked (stop)" in run.output
    newest = CheckpointDirectory(place).newest()
    assert newest is not None
    assert newest.step == 5
    run.assert_nothing_left()
