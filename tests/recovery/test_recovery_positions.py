"""Cuts of jobs without rounds: positions of the workers, the same on all shards, in tensors, in rows and in what is saved."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psd_client
from psd.checkpoint import CheckpointDirectory, Manifest
from psd.contract.layout import Layout

ROWS = 40


class Job:
    """Workers that push ones, each to a column of its own, of a tensor that all shards hold and of a table's rows.

    With lr 1 and the sum of gradients, minus the numbers of a column count its worker's pushes; what the worker saves with each
    says so, too.
    """

    def __init__(self, servers: str, world_size: int, consistency: str, transport: str = "auto") -> None:
        self.world_size = world_size
        self._servers = servers
        self._consistency = consistency
        self._transport = transport
        self.stop = threading.Event()
        self._pool = ThreadPoolExecutor(world_size)
        self._begun = threading.Barrier(world_size + 1)
        self.pushed = [0] * world_size

    def initial(self) -> dict[str, Any]:
        return {"a": np.zeros((60_000, self.world_size), np.float32), "b": np.zeros((7, self.world_size))}

    def connect(self, rank: int) -> tuple[psd_client.ParameterServer, dict[str, Any]]:
        ps = psd_client.connect(self._servers, rank, self.world_size, wait_timeout=60, transport=self._transport)
        table = psd_client.Table("rows", self.world_size, psd_client.SGD(lr=1.0))
        params = ps.declare(self.initial(), psd_client.SGD(lr=1.0), tables=[table], reduce="sum", consistency=self._consistency)
        return ps, params

    def __enter__(self) -> Job:
        """Train, until the end."""
        self._workers = [self._pool.submit(self._train, rank) for rank in range(self.world_size)]
        self._begun.wait(200)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for worker in self._workers:
            worker.result()

    def _train(self, rank: int) -> None:
        ps, _ = self.connect(rank)
        with ps:
            self._begun.wait(200)
            count = int(ps.client_state or b"0")
            ids = np.arange(ROWS)
            gradient = np.zeros(self.world_size)
            gradient[rank] = 1
            ones = {name: np.broadcast_to(gradient, value.shape).astype(value.dtype) for name, value in self.initial().items()}
            rows = {"rows": (ids, np.broadcast_to(gradient, (ROWS, self.world_size)).astype(np.float32))}
            while not self.stop.is_set():
                count += 1
                ps.save_client_state(b"%d" % count)
                ps.push_pull(ones, tables=rows)
                self.pushed[rank] = count


def counted_in(directory: CheckpointDirectory, manifest: Manifest) -> list[int]:
    """How many pushes of each worker a checkpoint has: the same in every number of every shard, and in what they saved."""
    layout, world_size = Layout(manifest.spec, 1), manifest.spec.world_size
    found: set[tuple[float, ...]] = set()
    spaces: dict[Any, list[Any]] = {}
    for restored in directory.read_blocks(manifest, layout, 0):
        spaces.setdefault(restored.block.space, []).append(np.array(restored.parameter))
    for pieces in spaces.values():
        found |= {tuple(-counts) for counts in np.unique(np.concatenate(pieces).reshape(-1, world_size), axis=0)}
    for batch in directory.read_table(manifest, layout, 0, 0):
        found |= {tuple(-counts) for counts in np.unique(batch.rows[:, :world_size], axis=0)}
    found.add(tuple(float(manifest.client_states.get(rank, b"0")) for rank in range(world_size)))
    assert len(found) == 1, f"{manifest.name}: {sorted(found)}"
    counted = [int(count) for count in found.pop()]
    assert manifest.worker_clocks == dict(enumerate(counted))
    assert manifest.name.endswith("final") or manifest.step == min(counted)
    return counted


def train(job: Job, rank: int, take: Callable[[], str] | None = None, *, steps: int = 2) -> str:
    """Train as that rank, for so many steps, and until a checkpoint is taken; leave. The name of the checkpoint."""
    ps, _ = job.connect(rank)
    gradient = {name: np.zeros_like(value) for name, value in job.initial().items()}
    for value in gradient.values():
        value[:, rank] = 1
    rows = np.zeros((ROWS, job.world_size), np.float32)
    rows[:, rank] = 1
    with ps, ThreadPoolExecutor(1) as pool:
        name = None
        while steps > 0 or not (name is None or name.done()):
            steps -= 1
            if steps == 1 and take is not None:
                name = pool.submit(take)
            job.pushed[rank] += 1
            ps.save_client_state(b"%d" % job.pushed[rank])
            ps.push_pull(gradient, tables={"rows": (np.arange(ROWS), rows)})
    return "" if name is None else name.result()


def test_what_is_stored_later_is_the_newer_checkpoint_whoever_is_the_slowest(
    cluster: Callable[..., Any], tmp_path: Path
) -> None:
    """The step of a checkpoint is where the slowest worker is, and that may be another one than before, further back."""
    url = str(tmp_path / "checkpoints")
    running = cluster(2, checkpoint_dir=url, checkpoint_keep=100)
    directory = CheckpointDirectory(url)
    job = Job(running.servers, 2, "async")

    def take() -> str:
        name: str = running.shards[0]._checkpointer.take_now(60)
        return name

    train(job, 0)
    ahead = train(job, 1, take, steps=40)
    behind = train(job, 0, take)
    running.finish()

    names = [info.name for info in directory.checkpoints()]
    assert [names[0].endswith("final"), *names[1:]] == [True, behind, ahead]
    assert directory.load(behind).step < directory.load(ahead).step
    newest = directory.newest()
    assert newest is not None
    assert counted_in(directory, newest) == job.pushed


CASES = [("async", 1, "auto"), ("async", 3, "tcp"), ("ssp:1", 2, "grpc")]


@pytest.mark.parametrize(("consistency", "world_size", "transport"), CASES)
def test_a_checkpoint_counts_the_same_pushes_everywhere(
    cluster: Callable[..., Any], tmp_path: Path, consistency: str, world_size: int, transport: str
) -> None:
    """While all train at full speed, on demand; and what comes last."""
    url = str(tmp_path / "checkpoints")
    running = cluster(2, checkpoint_dir=url, checkpoint_keep=100)
    directory = CheckpointDirectory(url)

    def take() -> str:
        assert all(shard._checkpointer.await_written(30) for shard in running.shards)
        name: str = running.shards[0]._checkpointer.take_now(30)
        return name

    with Job(running.servers, world_size, consistency, transport) as job:
        names = [take() for _ in range(3)]
    running.finish()

    counted = [counted_in(directory, directory.load(name)) for name in names]
    assert counted == sorted(counted)
    newest = directory.newest()
    assert newest is not None
    assert counted_in(directory, newest) == job.pushed


@pytest.mark.parametrize(("consistency", "world_size"), [("async", 2), ("ssp:1", 3)])
def test_a_reader_sees_the_same_pushes_everywhere(cluster: Callable[..., Any], consistency: str, world_size: int) -> None:
    """A reader's copy is a cut, too; two readers at once have theirs."""
    running = cluster(2)

    def read(_: int) -> list[list[float]]:
        with psd_client.connect(running.servers, role="reader", wait_timeout=60) as reader:
            copies = [np.concatenate([v.reshape(-1, world_size) for v in reader.pull().values()]) for _ in range(5)]
        return [row.tolist() for copy in copies for row in np.unique(copy, axis=0)]

    with Job(running.servers, world_size, consistency), ThreadPoolExecutor(2) as pool:
        found = list(pool.map(read, range(2)))

    for rows in found:
        assert len(rows) == 5, "each copy has one row, everywhere"
        assert rows == sorted(rows, reverse=True)
