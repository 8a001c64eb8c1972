"""Server-side vectors that go back to a checkpoint: taken while workers send batches, restored on another number of shards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np

import psd_client
from psd.checkpoint import CheckpointDirectory, CheckpointState
from psd.v1 import control_pb2, control_pb2_grpc

SIZE = 5 * 4096 + 7


def checkpoint(address: str) -> str:
    """Take a checkpoint, as psdctl does; its name."""
    with grpc.insecure_channel(address) as channel:
        call = control_pb2_grpc.ControlServiceStub(channel).Checkpoint
        return call(control_pb2.CheckpointRequest(), timeout=60).name


def test_checkpoints_of_vectors_come_at_the_pace_that_was_asked_for(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """Batches carry the cuts from shard to shard; heartbeats come every third of a lease, which is a long time."""
    running = cluster(2, checkpoint_dir=str(tmp_path), checkpoint_secs=0.01, lease_s=3600)
    directory, steps = CheckpointDirectory(str(tmp_path)), set[int]()
    deadline = time.monotonic() + 100
    with psd_client.connect(running.servers, 0, 1, wait_timeout=60) as ps:
        x, ones = ps.vector("x", SIZE), ps.vector("ones", SIZE)
        ones.fill(1.0)
        while len(steps) < 3:
            assert time.monotonic() < deadline, f"checkpoints at steps {steps}"
            x.axpy(1.0, ones)
            steps |= {info.step for info in directory.checkpoints() if info.state is CheckpointState.VALID}
    assert not any(shard.has_failed_to_store for shard in running.shards)


def test_a_checkpoint_of_vectors_is_of_one_moment(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """Two workers add 1 to every element, batch after batch, of any vector that is stored all elements are equal, and so are
    they after the job has gone on from there on three shards. Nothing else is trained."""
    url = str(tmp_path / "checkpoints")
    first = cluster(2, checkpoint_dir=url, lease_s=6.0)
    stopping, begun, counted = threading.Event(), threading.Barrier(3), [0, 0]

    def add(rank: int) -> None:
        with psd_client.connect(first.servers, rank, 2, wait_timeout=60) as ps:
            x, ones = ps.vector("x", SIZE), ps.vector("ones", SIZE)
            ones.fill(1.0)
            counts = ps.matrix("counts", 41, 500, "int64")
            begun.wait(100)
            while not stopping.is_set():
                with ps.batch() as b:
                    b.axpy(x, 1.0, ones)
                    b.add_rows(counts, np.ones((3, 500), np.int64), np.array([0, 20, 40]))
                counted[rank] += 1

    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(add, rank) for rank in range(2)]
        try:
            begun.wait(100)
            names = [checkpoint(first.shards[0].address) for _ in range(2)]
        finally:
            stopping.set()
        for worker in workers:
            worker.result()
    first.finish()

    directory = CheckpointDirectory(url)
    final = directory.newest()
    assert final is not None
    assert final.step >= directory.load(names[1]).step > directory.load(names[0]).step > 0
    for name in (*names, final.name):
        assert directory.verify(name) == []
        manifest, found = directory.load(name), {"x": [], "counts": []}
        for spec, _, values in directory.read_vectors(manifest):
            if spec.name in found:
                found[spec.name].append(values)
        x, counts = np.concatenate(found["x"]), np.concatenate(found["counts"]).reshape(41, 500)
        assert (x == x[0]).all()
        assert (counts[[0, 20, 40]] == x[0]).all()
        assert not counts[1].any()
        assert not list((tmp_path / "checkpoints" / name).glob("*.note"))
    assert x[0] == sum(counted)

    second = cluster(3, checkpoint_dir=url)
    with psd_client.connect(second.servers, 0, 1, wait_timeout=60) as ps:
        assert (ps.vector("x").pull() == sum(counted)).all()
        assert ps.matrix("counts").shape == (41, 500)
        ps.vector("x").axpy(1.0, ps.vector("ones"))
        assert (ps.vector("x").pull() == sum(counted) + 1).all()
