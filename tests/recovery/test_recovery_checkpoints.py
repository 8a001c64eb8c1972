"""Checkpoints of running jobs: a cluster that is lost, whole or in part, goes on from the last one, on any number of shards."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psd_client
from psd.checkpoint import CheckpointDirectory, CheckpointState

SHAPES = {"weight": (90, 170), "bias": (170,), "scale": ()}


def initial_values(seed: int = 1) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def gradients(params: dict[str, Any], rank: int, step: int) -> dict[str, Any]:
    return {name: (np.sin(value + rank + step) + value) / 7 for name, value in params.items()}


def train(servers: str, rank: int, world_size: int, until: int, **declaration: Any) -> dict[str, Any]:
    """Goes on at the step at which the shards are, until `until` steps are done."""
    with psd_client.connect(servers, rank, world_size, wait_timeout=60) as ps:
        params = ps.declare(initial_values(), psd_client.SGD(lr=0.1, momentum=0.9), **declaration)
        while ps.clock < until:
            params = ps.push_pull(gradients(params, rank, ps.clock), weight=1 + (rank + ps.clock) % 3)
        return params


def run(servers: str, world_size: int, until: int, **declaration: Any) -> dict[str, Any]:
    with ThreadPoolExecutor(world_size) as pool:
        jobs = [pool.submit(train, servers, rank, world_size, until, **declaration) for rank in range(world_size)]
        return [job.result() for job in jobs].pop()


EXACT = {"consistency": "sync", "aggregation": "exact"}


@pytest.fixture(scope="module")
def undisturbed(module_cluster: Callable[..., Any]) -> dict[str, Any]:
    """The parameters after 30 steps in one go."""
    return run(module_cluster(2).servers, 2, 30, **EXACT)


@pytest.fixture(scope="module", params=[1, 2, 3, 5], ids="from {}".format)
def stored(
    request: pytest.FixtureRequest, module_cluster: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A directory with the checkpoint after 10 steps on so many shards."""
    path = tmp_path_factory.mktemp("stored")
    running = module_cluster(request.param, checkpoint_dir=str(path))
    run(running.servers, 2, 10, **EXACT)
    running.finish()
    return path


@pytest.mark.parametrize("restored_count", [1, 3], ids="to {}".format)
def test_a_job_goes_on_from_its_checkpoint_on_any_number_of_shards(
    cluster: Callable[..., Any],
    tmp_path: Path,
    undisturbed: dict[str, Any],
    stored: Path,
    restored_count: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """10 steps, a checkpoint at the end, 20 more steps elsewhere: the same bits as 30 steps in one go, and no warning."""
    url = str(shutil.copytree(stored, tmp_path / "checkpoints"))

    restored = run(cluster(restored_count, checkpoint_dir=url).servers, 2, 30, **EXACT)

    for name in SHAPES:
        np.testing.assert_array_equal(undisturbed[name], restored[name], err_msg=name)
    assert caplog.messages == []


def test_checkpoints_are_taken_by_steps_and_old_ones_removed(
    cluster: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every 10 steps, the last two kept, each at exactly that step on all shards; the log names each."""
    caplog.set_level("INFO", "psd")
    url = str(tmp_path / "checkpoints")
    running = cluster(3, checkpoint_dir=url, checkpoint_steps=10, checkpoint_keep=2)

    run(running.servers, 2, 150)
    for shard in running.shards:
        shard.drain(5)

    found = CheckpointDirectory(url).checkpoints()
    assert [info.state for info in found[:2]] == [CheckpointState.VALID, CheckpointState.VALID]
    assert found[0].step == 150
    assert f"stored checkpoint {found[0].name}" in caplog.messages
    assert all(info.step % 10 == 0 for info in found)
    assert sum(info.state is CheckpointState.VALID for info in found) == 2


def test_all_roll_back_when_one_shard_has_lost_its_memory(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """The workers are told, by an error that says the step, and end in the same bits as if nothing had happened."""
    url = str(tmp_path / "checkpoints")
    undisturbed = run(cluster(2).servers, 1, 40, **EXACT)
    running = cluster(2, checkpoint_dir=url, checkpoint_steps=10)
    address = running.shards[1].address
    rolled_back = []

    with psd_client.connect(running.servers, 0, 1, wait_timeout=60) as ps:
        params = ps.declare(initial_values(), psd_client.SGD(lr=0.1, momentum=0.9), **EXACT)
        while ps.clock < 40:
            ps.save_client_state(f"after step {ps.clock}".encode())
            try:
                params = ps.push_pull(gradients(params, 0, ps.clock), weight=1 + ps.clock % 3)
            except psd_client.RolledBack as error:
                rolled_back.append(error.detail["step"])
                assert ps.client_state == f"after step {ps.clock - 1}".encode()
                params = ps.pull()
            if ps.clock == 27 and not rolled_back:
                while not any(i.state is CheckpointState.VALID for i in CheckpointDirectory(url).checkpoints()):
                    ps.barrier("until the first checkpoint is complete")
                running.shards[1].stop()
                cluster(2, only=1, listen=address, checkpoint_dir=url, checkpoint_steps=10)

    assert rolled_back
    assert rolled_back[0] % 10 == 0
    for name in SHAPES:
        np.testing.assert_array_equal(undisturbed[name], params[name], err_msg=name)


def test_a_worker_whose_lease_ran_out_while_a_shard_lost_its_memory_is_told_too(
    cluster: Callable[..., Any], tmp_path: Path
) -> None:
    """It hears first that its session has ended, and finds the loss when it joins again: not a mere rejoin."""
    url = str(tmp_path / "checkpoints")
    undisturbed = run(cluster(2).servers, 1, 20, **EXACT)
    settings: dict[str, Any] = {"checkpoint_dir": url, "checkpoint_steps": 5, "lease_s": 60}
    running = cluster(2, **settings)

    def step(params: dict[str, Any]) -> dict[str, Any]:
        return ps.push_pull(gradients(params, 0, ps.clock), weight=1 + ps.clock % 3)

    with psd_client.connect(running.servers, 0, 1, wait_timeout=60) as ps:
        params = ps.declare(initial_values(), psd_client.SGD(lr=0.1, momentum=0.9), **EXACT)
        while ps.clock < 12:
            params = step(params)
        while not any(i.state is CheckpointState.VALID for i in CheckpointDirectory(url).checkpoints()):
            ps.barrier("until the first checkpoint is complete")
        core = running.shards[0].shard._core
        with core.lock.unchecked:  # by this test, over a whole tick
            core.members.worker(0).last_seen -= 1000
            assert [worker.rank for worker in running.shards[0].shard.tick()] == [0]
        running.shards[1].stop()
        cluster(2, only=1, listen=running.shards[1].address, **settings)

        with pytest.raises(psd_client.RolledBack, match="went back to a checkpoint at step") as caught:
            ps.barrier("shard 0 alone answers this")

        assert caught.value.detail == {"timeline": core.timeline, "step": ps.clock}, "the error of a worker that joins again"
        assert (core.timeline, ps.clock % 5) == (1, 0)
        params = ps.pull()
        while ps.clock < 20:
            params = step(params)

    for name in SHAPES:
        np.testing.assert_array_equal(undisturbed[name], params[name], err_msg=name)


def test_all_roll_back_when_a_shard_and_a_worker_are_lost_in_one_round(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """Exact: the round was decided with the worker's gradient, which nobody has any more. Then the same bits again."""
    url = str(tmp_path / "checkpoints")
    undisturbed = run(cluster(2).servers, 2, 20, **EXACT)

    def start(index: int, listen: str = "127.0.0.1:0") -> Any:
        settings = {"state_dir": str(tmp_path / f"{index}"), "checkpoint_dir": url, "checkpoint_steps": 5}
        return cluster(2, only=index, listen=listen, **settings).shards[0]

    shards = [start(index) for index in range(2)]
    servers = ",".join(shard.address for shard in shards)

    def step(ps: psd_client.ParameterServer, params: dict[str, Any], *, pulls: bool = True) -> dict[str, Any]:
        call = ps.push_pull if pulls else ps.push
        return call(gradients(params, ps.rank, ps.clock), weight=1 + (ps.rank + ps.clock) % 3) or {}

    def begin(rank: int) -> tuple[psd_client.ParameterServer, dict[str, Any]]:
        ps = psd_client.connect(servers, rank, 2, wait_timeout=60)
        return ps, ps.declare(initial_values(), psd_client.SGD(lr=0.1, momentum=0.9), **EXACT)

    found: list[bool] = []
    both_look = threading.Barrier(
        2, lambda: found.append(any(i.state is CheckpointState.VALID for i in CheckpointDirectory(url).checkpoints()))
    )

    def until_round_12(rank: int) -> psd_client.ParameterServer:
        ps, params = begin(rank)
        while ps.clock < 12:
            params = step(ps, params)
        while not found or not found[-1]:  # each for itself might find it a moment before the other, who would wait for it
            both_look.wait(100)
        step(ps, params, pulls=False)
        return ps

    def until_round_20(ps: psd_client.ParameterServer, params: dict[str, Any]) -> dict[str, Any]:
        while ps.clock < 20:
            params = step(ps, params)
        return params

    with ThreadPoolExecutor(2) as pool:
        survivor, dying = pool.map(until_round_12, range(2))
        shards[1].stop()
        start(1, shards[1].address)  # decided at shard 0, and not heard of here
        dying._worker.close(RuntimeError("it crashes"))
        with survivor:
            with pytest.raises(psd_client.RolledBack, match="went back to a checkpoint at step") as caught:
                survivor.pull()
            assert caught.value.detail["step"] in (5, 10)
            successor, others = begin(1)  # else the survivor, who was told that rank 1 has failed, may go on without it
            rest = pool.submit(until_round_20, successor, others)
            params = until_round_20(survivor, survivor.pull())
        rest.result()
        successor.close()

    for name in SHAPES:
        np.testing.assert_array_equal(undisturbed[name], params[name], err_msg=name)


def test_a_job_goes_on_with_other_workers_and_another_mode(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """2 synchronous workers, then 3 asynchronous ones: they find the parameters and the clock of the checkpoint."""
    url = str(tmp_path / "checkpoints")
    first = cluster(2, checkpoint_dir=url)
    stored = run(first.servers, 2, 10, consistency="sync")
    first.finish()
    second = cluster(3, checkpoint_dir=url)

    def look(rank: int) -> tuple[int, dict[str, Any]]:
        with psd_client.connect(second.servers, rank, 3, wait_timeout=60) as ps:
            params = ps.declare(initial_values(2), psd_client.SGD(lr=0.1, momentum=0.9), consistency="async")
            return ps.clock, params

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(look, range(3)))

    for clock, params in found:
        assert clock == 10
        for name in SHAPES:
            np.testing.assert_array_equal(stored[name], params[name], err_msg=name)


@pytest.mark.parametrize("aggregation", ["fast", "exact"])
def test_an_asynchronous_job_goes_on_as_a_synchronous_one(
    cluster: Callable[..., Any], tmp_path: Path, aggregation: str
) -> None:
    """2 workers in turn, 10 steps each, are 20 updates; then 1 worker from step 10 on: the bits of 1 worker all along."""
    url = str(tmp_path / "checkpoints")
    rule = psd_client.Adam(lr=0.1)

    def step(ps: psd_client.ParameterServer, params: dict[str, Any], update: int) -> dict[str, Any]:
        return ps.push_pull(gradients(params, 0, update))

    with psd_client.connect(cluster(1).servers, 0, 1) as ps:
        expected = ps.declare(initial_values(), rule)
        for update in range(24):
            expected = step(ps, expected, update)
    first = cluster(2, checkpoint_dir=url)
    workers = [psd_client.connect(first.servers, rank, 2) for rank in range(2)]
    for ps in workers:
        params = ps.declare(initial_values(), rule, consistency="async")
    for update in range(20):
        workers[update % 2].pull()
        params = step(workers[update % 2], params, update)
    for ps in workers:
        ps.close()
    first.finish()

    with psd_client.connect(cluster(3, checkpoint_dir=url).servers, 0, 1) as ps:
        params = ps.declare(initial_values(), rule, aggregation=aggregation)
        assert ps.clock == 10
        for update in range(20, 24):
            params = step(ps, params, update)
        assert (ps.clock, ps.stats()["blocks_late"]) == (14, 0)

    for name in SHAPES:
        np.testing.assert_array_equal(expected[name], params[name], err_msg=name)


def test_other_tensors_than_the_checkpoints_are_refused(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """The message names the checkpoint and the first difference."""
    url = str(tmp_path / "checkpoints")
    first = cluster(1, checkpoint_dir=url)
    run(first.servers, 1, 3)
    first.shards[0].drain(5)

    with (
        psd_client.connect(cluster(1, checkpoint_dir=url).servers, 0, 1) as ps,
        pytest.raises(
            psd_client.SpecMismatch,
            match=r"parameter .* in checkpoint timeline-00000-step-0*3-final, .*--from-checkpoint",
        ),
    ):
        ps.declare({"other": np.zeros(3, np.float32)}, psd_client.SGD(lr=0.1, momentum=0.9))
