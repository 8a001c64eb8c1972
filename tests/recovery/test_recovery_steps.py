"""Armed steps of small integers, under shards that are killed and connections that break: the sum of all of them is exact, and
that of those in each checkpoint."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos import run_disturbed
from numpy.typing import NDArray
from shard_processes import ShardProcess
from short_ways import Watch

import psd_client
from psd.checkpoint import CheckpointDirectory
from psd.contract.layout import Layout

pytestmark = pytest.mark.process

SIZES = (3000, 4001, 2500)
"""Of blocks, on two shards; the proxy takes no less for data."""
WORLD_SIZE = 2
STEPS_MIN = 200
"""Of each worker, and until everything has struck."""


def gradient(rank: int, step: int) -> dict[str, NDArray[np.float32]]:
    """Small integers that differ by worker, step and element; sums of thousands of them are exact in float32."""
    return _shifted((3 * rank + 5 * step) % 11)


@functools.cache
def _shifted(by: int) -> dict[str, NDArray[np.float32]]:
    return {f"t{size}": ((np.arange(size) + by) % 11).astype(np.float32) for size in SIZES}


def work(
    servers: str, rank: int, on_step: Callable[[], bool], *, transport: str, consistency: str, pushed: threading.Barrier
) -> tuple[int, dict[str, NDArray[Any]]]:
    """Pushes until everything has struck and, when all workers have, pulls what there is then: steps, parameters."""
    count, is_done = 0, False
    with psd_client.connect(servers, rank, WORLD_SIZE, transport=transport, retry_timeout=60, wait_timeout=100) as ps:
        values = {name: np.zeros_like(array) for name, array in gradient(0, 0).items()}
        groups = [{"params": [name]} for name in values]
        ps.declare(values, psd_client.SGD(lr=1), groups=groups, consistency=consistency, reduce="sum")
        while count < STEPS_MIN or not is_done:
            ps.push_pull(gradient(rank, count))
            count += 1
            is_done = on_step()
            if consistency == "sync" and count >= STEPS_MIN:  # all make as many
                is_done = ps.all_reduce({"done": float(is_done)}, "min")["done"] == 1
        pushed.wait(100)
        return count, ps.pull()


@pytest.mark.parametrize("consistency", ["async", "sync"])
@pytest.mark.parametrize(("transport", "kills", "faults"), [("tcp", 2, 6), ("shm", 3, 0)])
def test_when_shards_are_killed_and_connections_break_in_steps_then_the_sum_is_exact(
    shard_processes: Callable[..., list[ShardProcess]],
    watch: Watch,
    transport: str,
    kills: int,
    faults: int,
    consistency: str,
) -> None:
    """No step is lost, and none is counted twice, whatever was cut off of it or of its answer."""
    shards = shard_processes(2, "--lease", "60")
    doing = functools.partial(work, consistency=consistency, pushed=threading.Barrier(WORLD_SIZE))

    results = run_disturbed(shards, WORLD_SIZE, doing, transport=transport, seed=50, kills=kills, faults=faults)

    counts = [count for count, _ in results]
    for _, params in results:
        for name, value in params.items():
            made = [gradient(rank, step)[name] for rank, count in enumerate(counts) for step in range(count)]
            assert (value == -np.sum(made, axis=0, dtype=np.float32)).all(), name
    assert watch.took.count(True) > STEPS_MIN / 4


EVERY = 20


class Stored:
    """The checkpoints of a job, and what it has begun with.

    Args:
        parameters, clocks: by tensor, and by rank, when it began. Attributes: clocks.
    """

    def __init__(self, url: str, parameters: dict[str, NDArray[Any]], clocks: dict[int, int]) -> None:
        self._directory = CheckpointDirectory(url)
        self._parameters, self.clocks = parameters, clocks
        self._earlier = set(self.names)

    @property
    def names(self) -> list[str]:
        """Of those that are whole: a shard may have been killed in the midst of one."""
        return [info.name for info in self._directory.checkpoints() if not info.reason]

    def check(self) -> list[tuple[int, dict[int, int], dict[str, NDArray[Any]]]]:
        """Compare those of this job with what their clocks say; steps, clocks and parameters, from the first to the last."""
        found = []
        for name in sorted(set(self.names) - self._earlier):
            manifest = self._directory.load(name)
            tensors, parameters = manifest.spec.tensors, {}
            for block in self._directory.read_blocks(manifest, Layout(manifest.spec, 1), 0):
                (tensor,) = set(block.block.segment_tensors)
                parameters[tensors[tensor].name] = block.parameter
            clocks = dict(manifest.worker_clocks)
            for name, value in parameters.items():
                pushed = [gradient(rank, step)[name] for rank in clocks for step in range(self.clocks[rank], clocks[rank])]
                total = np.sum(pushed, axis=0, dtype=np.float32)
                assert (value == self._parameters[name] - total).all(), (manifest.name, clocks)
            found.append((manifest.step, clocks, parameters))
        return sorted(found, key=lambda each: each[0])


def train(
    servers: str, rank: int, on_step: Callable[[], bool], *, url: str, transport: str, consistency: str
) -> tuple[int, dict[str, NDArray[Any]]]:
    """Pushes the gradient of each clock until everything has struck, and some checkpoints are stored; what it began with."""
    is_done, enough = False, len(CheckpointDirectory(url).checkpoints()) + 4
    with psd_client.connect(servers, rank, WORLD_SIZE, transport=transport, retry_timeout=60, wait_timeout=100) as ps:
        values = {name: np.zeros_like(array) for name, array in gradient(0, 0).items()}
        groups = [{"params": [name]} for name in values]
        began_with = ps.declare(values, psd_client.SGD(lr=1), groups=groups, consistency=consistency, reduce="sum")
        ps.barrier("begin")  # who comes later begins later
        begin = ps.clock
        while ps.clock < begin + STEPS_MIN or not is_done:
            ps.push_pull(gradient(rank, ps.clock))
            is_done = on_step()
            if is_done and ps.clock >= begin + STEPS_MIN:
                is_done = ps.clock % EVERY == 0 and len(CheckpointDirectory(url).checkpoints()) >= enough
            if consistency == "sync" and ps.clock >= begin + STEPS_MIN:  # all make as many
                is_done = ps.all_reduce({"done": float(is_done)}, "min")["done"] == 1
        ps.barrier("end")
        return begin, began_with


@pytest.mark.parametrize("consistency", ["async", "sync"])
def test_when_shards_are_killed_in_steps_then_each_checkpoint_has_all_before_it_and_the_job_goes_on_from_it(
    shard_processes: Callable[..., list[ShardProcess]],
    cluster: Callable[..., Any],
    watch: Watch,
    tmp_path: Path,
    consistency: str,
) -> None:
    """And no push beyond it, on any shard; a job that goes on from one makes steps, and checkpoints, again."""
    url = str(tmp_path / "stored")
    (tmp_path / "stored").mkdir()
    stored = Stored(
        url, {name: np.zeros_like(value) for name, value in gradient(0, 0).items()}, dict.fromkeys(range(WORLD_SIZE), 0)
    )
    shards = shard_processes(
        2, "--lease", "60", "--checkpoint-dir", url, "--checkpoint-steps", str(EVERY), "--checkpoint-keep", "1000"
    )
    doing = functools.partial(train, url=url, consistency=consistency)

    run_disturbed(shards, WORLD_SIZE, doing, transport="shm", seed=51, kills=3, faults=0)

    for shard in shards:
        shard.wait()
    before = stored.check()
    assert len(before) > 2
    assert consistency != "sync" or all(step % EVERY == 0 for step, _, _ in before)
    assert watch.took.count(True) > STEPS_MIN / 4
    watch.took.clear()

    again = cluster(3, checkpoint_dir=url, checkpoint_steps=EVERY, checkpoint_keep=1000)
    stored = Stored(url, before[-1][2], {})
    with ThreadPoolExecutor(WORLD_SIZE) as pool:
        going_on = functools.partial(doing, again.servers, transport="tcp")
        began = list(pool.map(lambda rank: going_on(rank, lambda: True), range(WORLD_SIZE)))
    again.finish()

    stored.clocks = dict(enumerate(begin for begin, _ in began))
    assert len(stored.check()) > 2
    for _, parameters in began:
        assert {name: value.tolist() for name, value in parameters.items()} == {
            name: value.tolist() for name, value in before[-1][2].items()
        }
    assert watch.took.count(True) > STEPS_MIN / 4


def work_on_rows(
    servers: str, rank: int, on_step: Callable[[], bool], *, transport: str, pushed: threading.Barrier
) -> tuple[int, dict[str, NDArray[Any]]]:
    """Pushes small integers to rows that are there, and pulls them ahead, until everything has struck: steps, rows."""
    count, is_done = 0, False
    tables = [psd_client.Table(name, 600, psd_client.SGD(lr=1)) for name in ("a", "b")]
    with psd_client.connect(servers, rank, WORLD_SIZE, transport=transport, retry_timeout=60, wait_timeout=100) as ps:
        ps.declare({}, consistency="async", reduce="sum", tables=tables)
        while count < STEPS_MIN or not is_done:
            grads = np.full((len(IDS), 600), 1 + (count + rank) % 3, np.float32)
            for table in ps.tables.values():
                table.prefetch(IDS)
            ps.push_pull({}, tables={table.name: (IDS, grads) for table in tables})
            for table in ps.tables.values():
                table.pull(IDS)
            count += 1
            is_done = on_step()
        pushed.wait(100)
        return count, {name: table.pull(IDS) for name, table in ps.tables.items()}


IDS = np.arange(40)


@pytest.mark.parametrize(("transport", "kills", "faults"), [("tcp", 2, 6), ("shm", 3, 0)])
def test_when_shards_are_killed_and_connections_break_in_steps_with_rows_then_the_sum_is_exact(
    shard_processes: Callable[..., list[ShardProcess]], watch: Watch, transport: str, kills: int, faults: int
) -> None:
    """Likewise for rows of two tables, on two shards, whose partitions a kill may leave a push apart."""
    shards = shard_processes(2, "--lease", "60")
    doing = functools.partial(work_on_rows, pushed=threading.Barrier(WORLD_SIZE))

    results = run_disturbed(shards, WORLD_SIZE, doing, transport=transport, seed=50, kills=kills, faults=faults)

    total = sum(1 + (step + rank) % 3 for rank, (count, _) in enumerate(results) for step in range(count))
    for _, tables in results:
        for name, rows in tables.items():
            assert (rows == -float(total)).all(), name
    assert watch.took.count(True) > STEPS_MIN / 4
