"""The last checkpoint of a job with vectors on several shards, whose worker says nothing any more: what the shards hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from test_rim_last_checkpoint import at_once, end, found_in

import psd_client
from psd.checkpoint import CheckpointDirectory, CheckpointState, Cut
from psd.contract.errors import CheckpointFailed, InvalidRequest
from psd.state.cuts.snapshots import Snapshot
from psd.v1 import data_pb2

SIZE = 3 * 4096


def elements(url: str, name: str, vector: str) -> list[float]:
    """The elements that the parts of a checkpoint have, each once."""
    directory = CheckpointDirectory(url)
    pieces = directory.read_vectors(directory.load(name))
    return sorted({*np.concatenate([values for spec, _, values in pieces if spec.name == vector]).tolist()})


@pytest.mark.parametrize("has_announced", [True, False], ids=["as psd-run ends it", "each by a signal"])
def test_shards_that_end_after_a_worker_that_is_gone_store_its_vectors(
    cluster: Callable[..., Any], tmp_path: Path, has_announced: bool
) -> None:
    """A cut was announced, and nobody has carried it from shard to shard: nothing waits for that when the shards end."""
    running = cluster(2, checkpoint_dir=str(tmp_path), lease_s=600)
    with psd_client.connect(running.servers, 0, 1, retry_timeout=1) as ps:
        ps.vector("x", SIZE).fill(7.0)
        ps._worker._heartbeats.stop()
        if has_announced:
            with pytest.raises(CheckpointFailed):
                running.shards[0].take_last_checkpoint(0.5)
            end(running.shards, grace_s=20)
        else:
            at_once([lambda shard=shard: shard.drain(4) for shard in running.shards])

    (stored,) = found_in(str(tmp_path))
    assert stored.state is CheckpointState.VALID
    assert elements(str(tmp_path), stored.name, "x") == [7.0]
    assert {shard.last_checkpoint for shard in running.shards} == {stored.name}
    assert not any(shard.has_failed_to_store for shard in running.shards)


@pytest.mark.parametrize("consistency", ["sync", "async"])
@pytest.mark.parametrize("is_gone", [False, True], ids=["its worker has left", "its worker is gone"])
def test_the_last_checkpoint_is_of_one_step_where_only_one_shard_has_tensors(
    cluster: Callable[..., Any], tmp_path: Path, consistency: str, is_gone: bool
) -> None:
    """The other one has vectors alone. Its batches are no steps, and nobody pushes to it."""
    running = cluster(2, checkpoint_dir=str(tmp_path), lease_s=600)
    with psd_client.connect(running.servers, 0, 1, retry_timeout=1) as ps:
        ps.declare({"w": np.zeros(3, np.float32)}, psd_client.SGD(lr=1.0), consistency=consistency)
        x = ps.vector("x", SIZE)
        for step in range(3):
            ps.push_pull({"w": np.ones(3, np.float32)})
            x.fill(step)
        if is_gone:
            ps._worker._heartbeats.stop()
            end(running.shards, grace_s=20)
    if not is_gone:
        running.finish()

    (stored,) = found_in(str(tmp_path))
    assert (stored.state, stored.step) == (CheckpointState.VALID, 3)
    assert elements(str(tmp_path), stored.name, "x") == [2.0]


def test_a_cut_that_fails_while_the_job_ends_is_no_last_checkpoint_that_failed(
    cluster: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one is stored. One that was due by time is under way, and the shards let go of it in any order."""
    running = cluster(2, checkpoint_dir=str(tmp_path), lease_s=600)
    first, second = running.shards
    has_failed = threading.Event()

    def fail(*_: Any) -> None:
        has_failed.set()
        raise CheckpointFailed("cannot write shard-00001-of-00002.come.note: No such file or directory")

    with psd_client.connect(running.servers, 0, 1, retry_timeout=1) as ps:
        x, is_taken = ps.vector("x", SIZE), threading.Event()

        def take() -> None:
            at_once([lambda shard=shard: shard.take_last_checkpoint(100) for shard in running.shards])
            is_taken.set()

        for shard in running.shards:
            shard.expect_end()
        taking = threading.Thread(target=take)
        taking.start()
        while not is_taken.is_set():
            x.fill(7.0)
        taking.join()
        monkeypatch.setattr(second._checkpointer._vector_cuts, "come", fail)
        first.shard.schedule.announce("later")
        while not has_failed.is_set():
            x.fill(8.0)
        ps._worker._heartbeats.stop()
        end(running.shards, grace_s=20)

    assert [shard.has_failed_to_store for shard in running.shards] == [False, False]
    assert {shard.last_checkpoint for shard in running.shards} == {info.name for info in found_in(str(tmp_path))}


def test_a_shard_that_has_no_tensors_waits_for_those_that_have(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """It has its part of a cut as soon as it hears of it; the others have theirs some rounds later, however long those take."""
    running = cluster(2, checkpoint_dir=str(tmp_path), lease_s=600)
    with psd_client.connect(running.servers, 0, 1) as ps:
        ps.declare({"w": np.zeros(3, np.float32)}, psd_client.SGD(lr=1.0))
        ps.vector("x", SIZE).fill(1.0)
        untrained = next(server for server in running.shards if not server.shard.declared().trained_count)
        checkpointer = untrained._checkpointer
        snapshot = Snapshot(data_pb2.Cut(id="a1", step=9, created_at=1.0), untrained.shard.declared(), SimpleQueue())
        checkpointer._vector_cuts.come(checkpointer._cut_of(snapshot))
        checkpointer._coming[snapshot] = long_ago = time.monotonic() - 10_000

        assert not checkpointer._is_come(snapshot)
        assert checkpointer._coming.pop(snapshot) > long_ago, "it would have been given up"


def test_a_shard_that_has_missed_a_cut_says_so(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """Or the others would wait for it to hold batches back, and take no other one meanwhile."""
    running = cluster(2, checkpoint_dir=str(tmp_path), lease_s=600)
    with psd_client.connect(running.servers, 0, 1) as ps:
        ps.declare({"w": np.zeros(SIZE, np.float32)}, psd_client.SGD(lr=1.0))
        ps.vector("x", SIZE).fill(1.0)
        for _ in range(2):
            ps.push_pull({"w": np.ones(SIZE, np.float32)})
        cut = data_pb2.Cut(id="a1", step=1, created_at=1.0)
        second = running.shards[1]
        second.shard.cuts.learn(second.shard.declared(), [cut])
        deadline, pause = time.monotonic() + 100, threading.Event()
        while not second._checkpointer.progress.failed and time.monotonic() < deadline:
            pause.wait(0.01)

        of = Cut("a1", 1, 0, second.shard.run_id, 1.0, second.shard.declared().layout)
        assert CheckpointDirectory(str(tmp_path)).notes.shards(of.name, "left", 2) == {1}


def test_a_batch_that_its_worker_has_left_half_done_is_stored_so(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """Nobody is left to complete it, and all that was acknowledged is worth more."""
    running = cluster(2, checkpoint_dir=str(tmp_path), lease_s=600)
    first, second = (server.shard.vectors for server in running.shards)
    has_run, run = threading.Event(), first.run

    def count(*args: Any) -> bytes:
        found = run(*args)
        has_run.set()
        return found

    def refuse(*args: Any) -> bytes:
        assert has_run.wait(100)  # else the worker would have ended its call to the first shard
        raise InvalidRequest("the worker has died")

    with psd_client.connect(running.servers, 0, 1, retry_timeout=1) as ps:
        x = ps.vector("x", SIZE)
        x.fill(1.0)
        first.run, second.run = count, refuse  # type: ignore[method-assign]
        with pytest.raises(InvalidRequest, match="the worker has died"):
            x.fill(2.0)
        ps._worker._heartbeats.stop()
        end(running.shards, grace_s=20)

    (stored,) = found_in(str(tmp_path))
    assert stored.state is CheckpointState.VALID
    assert elements(str(tmp_path), stored.name, "x") == [1.0, 2.0]
