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

import psd_client
from psd.checkpoint import CheckpointDirectory
from psd.contract.layout import Layout
from psd_client.lanes.steps import SteppingLanes

pytestmark = pytest.mark.process

SIZES = (3000, 4001, 2500)
"""Of blocks, on two shards; the proxy takes no less for data."""
WORLD_SIZE = 2
STEPS_MIN = 200
"""Of each worker, and until everything has struck."""


def gradient(rank: int, step: int) -> dict[str, NDArray[np.float32]]:
    """Small integers that differ by worker, step and element; sums of thousands of them are exact in float32."""
    return {f"t{size}": ((np.arange(size) + 3 * rank + 5 * step) % 11).astype(np.float32) for size in SIZES}


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
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    kills: int,
    faults: int,
    consistency: str,
) -> None:
    """No step is lost, and none is counted twice, whatever was cut off of it or of its answer."""
    run, took = SteppingLanes.run, []

    def watched(steps: SteppingLanes, *args: Any) -> bool | None:
        took.append(run(steps, *args))
        return took[-1]

    monkeypatch.setattr(SteppingLanes, "run", watched)
    shards = shard_processes(2, "--lease", "60")
    doing = functools.partial(work, consistency=consistency, pushed=threading.Barrier(WORLD_SIZE))

    results = run_disturbed(shards, WORLD_SIZE, doing, transport=transport, seed=50, kills=kills, faults=faults)

    counts = [count for count, _ in results]
    for _, params in results:
        for name, value in params.items():
            made = [gradient(rank, step)[name] for rank, count in enumerate(counts) for step in range(count)]
            assert (value == -np.sum(made, axis=0, dtype=np.float32)).all(), name
    assert took.count(True) > STEPS_MIN / 4


EVERY = 20


def train(
    servers: str, rank: int, on_step: Callable[[], bool], *, transport: str, consistency: str, begin: int = 0
) -> dict[str, NDArray[Any]]:
    """Pushes the gradient of each clock until everything has struck, and then what all have pushed; parameters."""
    is_done = False
    with psd_client.connect(servers, rank, WORLD_SIZE, transport=transport, retry_timeout=60, wait_timeout=100) as ps:
        values = {name: np.zeros_like(array) for name, array in gradient(0, 0).items()}
        groups = [{"params": [name]} for name in values]
        ps.declare(values, psd_client.SGD(lr=1), groups=groups, consistency=consistency, reduce="sum")
        ps.barrier("begin")  # who comes later begins later
        assert ps.clock >= begin
        while ps.clock < begin + STEPS_MIN or not is_done:
            ps.push_pull(gradient(rank, ps.clock))
            is_done = on_step()
            if consistency == "sync" and ps.clock >= begin + STEPS_MIN:  # all make as many
                is_done = ps.all_reduce({"done": float(is_done)}, "min")["done"] == 1
        ps.barrier("end")
        return ps.pull()


def total(name: str, clocks: dict[int, int]) -> NDArray[Any]:
    """The sum of all gradients of the workers up to these clocks."""
    made = [gradient(rank, step)[name] for rank, clock in clocks.items() for step in range(clock)]
    return np.sum(made, axis=0, dtype=np.float32)


def check_stored(url: Path) -> list[int]:
    """Compare all whole checkpoints with what their clocks say; their steps, from the first to the last."""
    directory, steps = CheckpointDirectory(str(url)), []
    for info in directory.checkpoints():
        if info.reason:
            continue  # a shard was killed in its midst
        manifest = directory.load(info.name)
        layout = Layout(manifest.spec, 1)
        for block in directory.read_blocks(manifest, layout, 0):
            (tensor,) = set(block.block.segment_tensors)
            expected = -total(manifest.spec.tensors[tensor].name, dict(manifest.worker_clocks))
            assert (block.parameter == expected).all(), (info.name, manifest.worker_clocks)
        steps.append(info.step)
    return sorted(steps)


@pytest.mark.parametrize("consistency", ["async", "sync"])
def test_when_shards_are_killed_in_steps_then_each_checkpoint_has_all_before_it_and_the_job_goes_on_from_it(
    shard_processes: Callable[..., list[ShardProcess]],
    cluster: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    consistency: str,
) -> None:
    """And no push beyond it, on any shard; a job that goes on from one makes steps, and checkpoints, again."""
    run, took = SteppingLanes.run, []

    def watched(steps: SteppingLanes, *args: Any) -> bool | None:
        took.append(run(steps, *args))
        return took[-1]

    monkeypatch.setattr(SteppingLanes, "run", watched)
    flags = ["--checkpoint-dir", str(tmp_path / "stored"), "--checkpoint-steps", str(EVERY), "--checkpoint-keep", "1000"]
    shards = shard_processes(2, "--lease", "60", *flags)
    doing = functools.partial(train, consistency=consistency)

    run_disturbed(shards, WORLD_SIZE, doing, transport="shm", seed=51, kills=3, faults=0)

    for shard in shards:
        shard.wait()
    before = check_stored(tmp_path / "stored")
    assert len(before) > 2
    assert consistency != "sync" or all(step % EVERY == 0 for step in before[:-1])  # the last is that at the end
    assert took.count(True) > STEPS_MIN / 4
    took.clear()

    again = cluster(3, checkpoint_dir=str(tmp_path / "stored"), checkpoint_steps=EVERY, checkpoint_keep=1000)
    with ThreadPoolExecutor(WORLD_SIZE) as pool:
        going_on = functools.partial(train, again.servers, transport="tcp", consistency=consistency, begin=before[-1])
        list(pool.map(lambda rank: going_on(rank, lambda: True), range(WORLD_SIZE)))
    again.finish()

    after = check_stored(tmp_path / "stored")
    assert after[-1] >= before[-1] + STEPS_MIN
    assert len(after) > len(before) + 1
    assert took.count(True) > STEPS_MIN / 4
