"""Batches on vectors count once: lost replies, calls made again, shards that are restarted, sessions that have ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_faults import Faults, Restartable, connect_faulty, expire

from psd.checkpoint import CheckpointDirectory, CheckpointState
from psd.contract.errors import RolledBack, ShardUnavailable, StateLost
from psd_client import SGD, ParameterServer
from psd_client.client import worker_of
from psd_client.vectors import Vector

Start = Callable[..., Any]

SIZE = 10_000  # of both shards
ACTIONS: dict[str, Callable[[Restartable, int], object]] = {
    "lost": lambda job, index: None,
    "restarted": lambda job, index: job.restart(index),
    "expired": lambda job, index: expire(job.shards[index], 0),
}


def connected(job: Restartable, **config: Any) -> tuple[ParameterServer, Faults]:
    return connect_faulty(job.servers, wait_timeout_s=20, **config)


@contextmanager
def impatient(job: Restartable) -> Iterator[tuple[Vector, Faults]]:
    """A vector of a worker that does not try again."""
    ps, faults = connected(job, retry_timeout_s=0)
    with ps:
        yield ps.vector("x", SIZE), faults


@pytest.mark.parametrize("transport", ["grpc", "shm", "tcp"])
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("action", list(ACTIONS))
def test_batch_when_its_reply_is_lost_then_it_is_answered_again_and_counts_once(
    job: Restartable, action: str, index: int, transport: str
) -> None:
    ps, faults = connected(job, transport=transport)
    with ps:
        x = ps.vector("x", SIZE)
        faults.lose_reply("run_vectors", shard=index, after=lambda: ACTIONS[action](job, index))
        with ps.batch() as b:
            b.add(x, np.ones(SIZE))
            d = b.sum(x)

        assert float(d) == SIZE
        assert x.sum() == SIZE
        faults.assert_all_fired()
        assert job.shards[index].shard.vectors.status().repeated == 1


@pytest.mark.parametrize("action", ["lost", "restarted"])
def test_vector_when_the_reply_to_its_making_is_lost_then_it_is_made_once(job: Restartable, action: str) -> None:
    ps, faults = connected(job)
    with ps:
        faults.lose_reply("change_vectors", shard=1, after=lambda: ACTIONS[action](job, 1))
        x = ps.vector("x", SIZE)
        x.fill(1)
        faults.lose_reply("change_vectors", shard=0, after=lambda: ACTIONS[action](job, 0))
        x.drop()

        assert ps.vectors == {}
        faults.assert_all_fired()


def test_batch_when_the_program_calls_again_after_a_failure_then_it_counts_once(job: Restartable) -> None:
    """One shard has run the batch, and the other has not heard of it."""
    with impatient(job) as (x, faults):
        values = np.ones(SIZE)
        faults.fail("run_vectors", shard=1, error=ShardUnavailable("gone"))
        with pytest.raises(ShardUnavailable):
            x.add(values)
        values[:] = 1  # the array is the program's again
        x.add(values)

        assert x.sum() == SIZE


def test_batch_when_another_one_follows_its_failure_then_it_is_completed_first(job: Restartable) -> None:
    with impatient(job) as (x, faults):
        values = np.ones(SIZE)
        for index in (0, 1):
            faults.fail("run_vectors", shard=index, error=ShardUnavailable("gone"))
        with pytest.raises(ShardUnavailable):
            x.add(values)
        values[:] = 1e6
        x.scale(3)

        assert x.pull().tolist() == [3.0] * SIZE
        faults.lose_reply("run_vectors", shard=1)
        with pytest.raises(ShardUnavailable):
            x.scale(2)
        assert x.pull().tolist() == [6.0] * SIZE


CALLS: dict[str, Callable[[ParameterServer, Vector], object]] = {
    "batch": lambda ps, x: x.fill(2.0),
    "pull": lambda ps, x: x.pull(),
    "pull at indices": lambda ps, x: x.pull(indices=[0, SIZE - 1]),
    "make": lambda ps, x: ps.vector("y", SIZE),
    "names": lambda ps, x: ps.vectors,
    "drop": lambda ps, x: x.drop(),
}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("call", list(CALLS))
def test_job_of_vectors_alone_when_a_shard_has_lost_its_state_then_every_call_says_so(
    job: Restartable, call: str, index: int
) -> None:
    """Its shard does not know of any job, nor the worker's run."""
    ps, _ = connected(job)
    with ps:
        x = ps.vector("x", SIZE)
        job.lose(index)

        for _ in range(2):
            with pytest.raises(StateLost, match=f"shard {index} has come back without"):
                CALLS[call](ps, x)


@pytest.mark.parametrize("call", ["batch", "pull", "names"])
def test_worker_of_vectors_when_another_has_brought_the_job_back_then_its_next_call_says_so(
    cluster: Callable[..., Any], tmp_path: Path, call: str
) -> None:
    """What it pulls then is of the checkpoint, which it would take for what its own batches have made."""
    where = {"checkpoint_dir": str(tmp_path / "checkpoints"), "checkpoint_secs": 0.01, "lease_s": 60.0}
    job = Restartable(cluster, tmp_path, **where)
    directory = CheckpointDirectory(where["checkpoint_dir"])
    with connect_faulty(job.servers, 0, 2)[0] as ps, connect_faulty(job.servers, 1, 2)[0] as other:
        x, y = ps.vector("x", SIZE), other.vector("x", SIZE)
        y.fill(1.0)
        while not any(info.state is CheckpointState.VALID for info in directory.checkpoints()):
            x.scale(1.0)
        y.fill(2.0)
        job.lose(1)
        with pytest.raises(RolledBack):
            x.scale(1.0)

        with pytest.raises(RolledBack):
            CALLS[call](other, y)
        assert len({*y.pull().tolist()}) == 1


def test_batch_when_it_is_given_up_while_a_shard_runs_it_then_memory_stays_shared(
    job: Restartable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard uses no memory of the worker's for a batch, so nobody waits for it before another call."""
    running, may_end = threading.Event(), threading.Event()
    desk = job.shards[1].shard.vectors
    run = desk.run

    def run_late(*args: Any) -> Any:
        running.set()
        assert may_end.wait(100)
        return run(*args)

    ps, faults = connected(job, transport="shm", retry_timeout_s=0)
    with ps:
        ps.declare({"w": np.zeros(SIZE, np.float32)}, SGD(1.0))
        ps.push_pull({"w": np.ones(SIZE, np.float32)})
        segments = [lane._shared[0].segment for lane in worker_of(ps)._shards.lanes]  # type: ignore[attr-defined]
        x = ps.vector("x", SIZE)
        monkeypatch.setattr(desk, "run", run_late)
        faults.lose_reply("run_vectors", shard=0, after=lambda: running.wait(100))

        with pytest.raises(ShardUnavailable):
            x.add(np.ones(SIZE))

        assert [segment.is_given_up for segment in segments] == [False, False]
        may_end.set()
        x.add(np.ones(SIZE))
        assert x.sum() == SIZE
        assert ps.push_pull({"w": np.ones(SIZE, np.float32)})["w"][0] == -2
