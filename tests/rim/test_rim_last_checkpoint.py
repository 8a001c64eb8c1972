"""The last checkpoint of shards that end together: taken while workers train, or made of what the shards hold."""

from __future__ import annotations

import errno
import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from free_ports import free_port

import psd_client
from psd.checkpoint import CheckpointDirectory, CheckpointInfo, CheckpointState
from psd.contract.config import ConfigError, ServerConfig
from psd.contract.errors import CheckpointFailed, InvalidRequest, ShardUnavailable
from psd.rim.server import ShardServer
from psd.v1 import data_pb2
from psd_client.worker.session.heartbeat import Heartbeats

SIZE = 3000
MODES = {
    "sync": {},
    "quorum": {"quorum": 1},
    "exact": {"aggregation": "exact"},
    "async": {"consistency": "async"},
    "ssp": {"consistency": "ssp:3"},
}


@contextmanager
def connected(
    servers: str, rank: int, world_size: int, mode: str, retry_timeout: float = 1
) -> Iterator[psd_client.ParameterServer]:
    """A worker, which dies in the end."""
    ps = psd_client.connect(servers, rank, world_size, wait_timeout=60, retry_timeout=retry_timeout)
    ps.declare({"w": np.zeros(SIZE, np.float32)}, psd_client.SGD(lr=1.0), **MODES[mode])
    try:
        yield ps
    finally:
        ps._worker.close(RuntimeError("it dies"))


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [result.result() for result in [pool.submit(call) for call in calls]]


def end(shards: Sequence[ShardServer], grace_s: float = 30.0) -> None:
    """As if psd-run had asked for a checkpoint before, in vain, and has ended the workers."""
    for shard in shards:
        shard.expect_end()
    at_once([lambda shard=shard: shard.drain(grace_s) for shard in shards])


def found_in(url: str) -> list[CheckpointInfo]:
    directory = CheckpointDirectory(url)
    found = directory.checkpoints()
    assert [directory.verify(info.name) for info in found if info.state is CheckpointState.VALID] in ([], [[]], [[], []])
    return found


def test_shards_that_stay_when_all_workers_have_left_say_when_they_store_the_last_checkpoint(
    cluster: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those without --exit-when-done: readers may be there."""
    caplog.set_level(logging.INFO)
    running = cluster(2, checkpoint_dir=str(tmp_path), lease_s=600)
    with psd_client.connect(running.servers, 0, 1) as ps:
        ps.declare({"w": np.zeros(SIZE, np.float32)}, psd_client.SGD(lr=1.0))
        ps.push_pull({"w": np.ones(SIZE, np.float32)})

    assert all(server.done.wait(200) for server in running.shards)
    assert caplog.text.count("all workers have left; what they have trained is stored when this shard is told to end") == 1
    assert found_in(str(tmp_path)) == []
    end(running.shards)
    (stored,) = found_in(str(tmp_path))
    assert (stored.state, stored.step) == (CheckpointState.VALID, 1)


def test_a_shard_that_is_told_to_end_once_the_last_checkpoint_is_there_does_not_say_that_there_is_none(
    cluster: Callable[..., Any], tmp_path: Path
) -> None:
    """Shard 0 has said so, and another one has not looked since."""
    running = cluster(1, checkpoint_dir=str(tmp_path), lease_s=600)
    (shard,) = running.shards
    last = shard._last_checkpoint
    with connected(running.servers, 0, 1, "sync") as ps:
        taking = threading.Thread(target=shard.take_last_checkpoint, args=(100,))
        taking.start()
        while taking.is_alive():
            ps.push_pull({"w": np.ones(SIZE, np.float32)})
        name, last.name = last.name, ""
        last.give_up()

        shard.take_last_checkpoint(100)

    assert last.name == name == CheckpointDirectory(str(tmp_path)).newest().name


@pytest.mark.parametrize("mode", MODES)
def test_shards_that_end_after_workers_that_hang_store_what_they_hold(
    cluster: Callable[..., Any], tmp_path: Path, mode: str
) -> None:
    """One worker has made another step than the other, and neither says any more."""
    running = cluster(3, checkpoint_dir=str(tmp_path), lease_s=600)
    gradient = {"w": np.ones(SIZE, np.float32)}
    three_steps, ended = threading.Barrier(3), threading.Event()

    def work(rank: int) -> None:
        with connected(running.servers, rank, 2, mode) as ps:
            for _ in range(3):
                ps.push_pull(gradient)
            if rank == 0:
                ps.push(gradient)
            three_steps.wait(100)
            assert ended.wait(100)

    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(work, rank) for rank in range(2)]
        three_steps.wait(100)
        end(running.shards)
        ended.set()
        for worker in workers:
            worker.result()

    (stored,) = found_in(str(tmp_path))
    assert stored.state is CheckpointState.VALID
    assert mode not in ("sync", "exact") or stored.step == 3
    assert {shard.last_checkpoint for shard in running.shards} == {stored.name}
    assert not any(shard.has_failed_to_store for shard in running.shards)
    assert [path.name for path in tmp_path.iterdir()] == [stored.name]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_shards_that_end_when_one_of_them_has_stored_half_a_cut_leave_no_half(
    cluster: Callable[..., Any], tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker dies between one shard and the other. No checkpoint could be of both; without rounds, the cut waits for the
    whole push until then."""
    monkeypatch.setattr(Heartbeats, "soon", lambda _: None)  # heartbeats die with it, and bring no news of the cut before
    running = cluster(2, checkpoint_dir=str(tmp_path), lease_s=600)
    first, second = (server.shard for server in running.shards)

    has_counted, end_push = threading.Event(), first.exchange.end_push

    def count(*args: Any) -> Any:
        found = end_push(*args)
        has_counted.set()
        return found

    def refuse(header: data_pb2.PushHeader) -> None:
        assert has_counted.wait(100)  # else the worker would have ended its call to the first shard
        raise InvalidRequest("the worker has died")

    with connected(running.servers, 0, 1, mode) as ps:
        first.cuts.learn(first.declared(), [data_pb2.Cut(id="half", step=1)])
        first.exchange.end_push, second.exchange.begin_push = count, refuse  # type: ignore[assignment, method-assign]
        with pytest.raises(InvalidRequest):
            ps.push({"w": np.ones(SIZE, np.float32)})
        assert running.shards[0]._checkpointer.await_written(30)
        expected = [CheckpointState.INCOMPLETE] if mode == "sync" else []
        assert [info.state for info in found_in(str(tmp_path))] == expected

        end(running.shards)

    assert found_in(str(tmp_path)) == []
    assert all(shard.has_failed_to_store for shard in running.shards)


def test_shards_that_are_told_one_after_the_other_take_one_checkpoint_while_workers_train(
    cluster: Callable[..., Any], tmp_path: Path
) -> None:
    """A worker may be at a shard with the cut before the shard is told of the end."""
    running = cluster(2, checkpoint_dir=str(tmp_path), lease_s=600)
    stop = threading.Event()

    def train() -> None:
        with connected(running.servers, 0, 1, "sync") as ps:
            while not stop.is_set():
                ps.push_pull({"w": np.ones(SIZE, np.float32)})

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        while not running.shards[0].shard.schedule.is_training or not running.shards[1].shard.schedule.is_training:
            assert not training.done()
        for shard in running.shards:
            shard.take_last_checkpoint(30)
        stop.set()
        training.result()

    (stored,) = found_in(str(tmp_path))
    assert {shard.last_checkpoint for shard in running.shards} == {stored.name}


@pytest.mark.parametrize("mode", MODES)
def test_a_shard_that_was_started_again_does_not_take_its_last_checkpoint_for_that_of_the_jobs_end(
    tmp_path: Path, mode: str
) -> None:
    """A shard was ended in order, while workers trained, and came back; a few seconds later the job ended. The shards believed
    that the checkpoint of the first end was that of the second, and what had been trained since was in none."""
    servers, shards, start = restartable(tmp_path)
    stop, is_back = threading.Event(), threading.Event()

    def train() -> int:
        with connected(servers, 0, 1, mode, retry_timeout=100) as ps:
            further = 5
            while not stop.is_set() or further:
                is_back.wait(0.05)  # thousands of steps would show no more
                ps.push_pull({"w": np.ones(SIZE, np.float32)})
                further -= is_back.is_set() and further > 0
            return ps.clock

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        while not shards[1].shard.schedule.is_training:
            assert not training.done()
        shards[1].drain(30)
        shards[1] = start(1)
        is_back.set()
        stop.set()
        clock = training.result()
    end(shards)

    last, _ = found_in(str(tmp_path / "checkpoints"))
    assert last.step == clock
    assert {shard.last_checkpoint for shard in shards} == {last.name}
    assert list((tmp_path / "checkpoints").glob("ends/*")) == []


def test_a_shard_that_dies_once_the_last_checkpoint_is_stored_ends_with_it_when_it_is_back(tmp_path: Path) -> None:
    """The others have ended with that checkpoint, and will say nothing more."""
    servers, shards, start = restartable(tmp_path)
    stop = threading.Event()

    def train() -> None:
        with connected(servers, 0, 1, "sync") as ps:
            while not stop.is_set():
                ps.push_pull({"w": np.ones(SIZE, np.float32)})

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        while not all(shard.shard.schedule.is_training for shard in shards):
            assert not training.done()
        at_once([lambda shard=shard: shard.take_last_checkpoint(30) for shard in shards])
        stop.set()
        training.result()
    shards[0].stop()
    shards[0] = start(0)
    end(shards[1:])
    end(shards[:1], grace_s=1)

    (stored,) = found_in(str(tmp_path / "checkpoints"))
    assert {shard.last_checkpoint for shard in shards} == {stored.name}
    assert not any(shard.has_failed_to_store for shard in shards)


def restartable(directory: Path) -> tuple[str, list[ShardServer], Callable[[int], ShardServer]]:
    """Addresses of two shards; the shards, which have started; and a function that starts one again, where it was."""
    configs = [
        ServerConfig(
            index,
            2,
            listen=f"127.0.0.1:{free_port()}",
            state_dir=str(directory / f"state-{index}"),
            checkpoint_dir=str(directory / "checkpoints"),
            lease_s=600,
        )
        for index in range(2)
    ]

    def start(index: int) -> ShardServer:
        shard = ShardServer(configs[index])
        shard.start()
        return shard

    return ",".join(config.listen for config in configs), [start(index) for index in range(2)], start


def test_a_shard_that_ends_alone_says_that_the_others_did_not(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """It does not wait for them for long; they may go on, and wait for it to come back."""
    running = cluster(2, checkpoint_dir=str(tmp_path), lease_s=600)
    with connected(running.servers, 0, 1, "sync"):
        end(running.shards[1:], grace_s=0.2)

        error = running.shards[1]._checkpointer.progress.error
        assert "shard 0 did not end at the same time" in error
        assert found_in(str(tmp_path)) == []
        running.shards[0].stop()


@pytest.mark.parametrize("untold", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_a_shard_that_has_not_heard_of_a_workers_end_stores_its_part_of_what_the_others_have_stored(
    cluster: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, untold: int
) -> None:
    """Hundreds of workers that end at once keep a machine busy, and each tells a shard for some seconds only. The checkpoint of
    a job that had ended well was never whole."""
    running = cluster(2, checkpoint_dir=str(tmp_path), lease_s=600)
    gradient = {"w": np.ones(SIZE, np.float32), "v": np.ones(SIZE, np.float32)}

    def not_told(_request: object, _timeout_s: float) -> None:
        raise ShardUnavailable("it is busy", shard=untold)

    def work(rank: int) -> None:
        with psd_client.connect(running.servers, rank, 2, wait_timeout=60) as ps:
            ps.declare({name: np.zeros(SIZE, np.float32) for name in gradient}, psd_client.SGD(lr=1.0), **MODES[mode])
            for _ in range(3 + rank if mode in ("async", "ssp") else 3):
                ps.push_pull(gradient)
            if rank == 1:
                monkeypatch.setattr(ps._worker._shards.lanes[untold], "leave", not_told)

    at_once([lambda rank=rank: work(rank) for rank in range(2)])
    assert running.shards[1 - untold].done.wait(200)
    assert not running.shards[untold].done.is_set()
    end(running.shards)

    (stored,) = found_in(str(tmp_path))
    assert stored.state is CheckpointState.VALID
    assert not any(shard.has_failed_to_store for shard in running.shards)


def test_a_shard_without_anything_to_store_ends_without(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """There is no job yet; that is no failure."""
    (shard,) = cluster(1, checkpoint_dir=str(tmp_path)).shards

    with pytest.raises(CheckpointFailed, match="holds nothing that is trained"):
        shard.take_last_checkpoint(30)
    shard.drain(30)

    assert (found_in(str(tmp_path)), shard.has_failed_to_store) == ([], False)


def test_a_shard_that_continues_where_it_was_does_so_without_a_place_for_checkpoints(tmp_path: Path) -> None:
    """A job is worth more than its checkpoints; a shard that begins is refused there."""
    place, config = tmp_path / "checkpoints", {"listen": "127.0.0.1:0", "checkpoint_dir": str(tmp_path / "checkpoints")}
    shard = ShardServer(ServerConfig(0, 1, state_dir=str(tmp_path / "state"), **config))
    shard.start()
    with connected(shard.address, 0, 1, "sync"):
        shard.stop()
    shutil.rmtree(place)
    place.write_text("no directory")

    with pytest.raises(ConfigError, match=f"--checkpoint-dir: cannot list {place}: Not a directory"):
        ShardServer(ServerConfig(0, 1, **config))
    successor = ShardServer(ServerConfig(0, 1, state_dir=str(tmp_path / "state"), **config))
    successor.start()
    assert successor.shard.is_recovered
    successor.stop()


def test_a_shard_whose_store_takes_no_more_says_so_and_keeps_what_it_has(tmp_path: Path) -> None:
    """Also when all workers have left: nothing else has their job's parameters."""
    is_full = threading.Event()

    def crash_point(step: str) -> None:
        if is_full.is_set() and step.startswith("write shard-"):
            raise OSError(errno.ENOSPC, "No space left on device")

    state, url = tmp_path / "state", tmp_path / "checkpoints"
    config = ServerConfig(0, 1, listen="127.0.0.1:0", state_dir=str(state), checkpoint_dir=str(url))
    shard = ShardServer(config, crash_point=crash_point)
    shard.start()
    with psd_client.connect(shard.address, 0, 1) as ps:
        ps.declare({"w": np.zeros(SIZE, np.float32)}, psd_client.SGD(lr=1.0))
        ps.push_pull({"w": np.ones(SIZE, np.float32)})
    assert shard.done.wait(100)
    is_full.set()

    shard.drain(30)

    assert shard.has_failed_to_store
    assert (state / "arena").exists()


def test_the_last_checkpoint_of_a_job_with_tables_waits_for_one_that_is_being_written(
    cluster: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables have one snapshot at a time. All workers have left, and then the shard forgets all that it holds."""
    running = cluster(1, checkpoint_dir=str(tmp_path), lease_s=600)
    (shard,) = running.shards
    checkpointer = shard._checkpointer
    is_writing, goes_on, write = threading.Event(), threading.Event(), checkpointer._directory.write_part

    def write_slowly(*args: Any, **beside: Any) -> int:
        is_writing.set()
        assert goes_on.wait(100)
        return write(*args, **beside)

    def stop(stop: Callable[[], None] = checkpointer.stop) -> None:
        with ThreadPoolExecutor() as pool:
            pool.submit(stop)
            checkpointer._threads[0].join(0.3)  # it would take no snapshot any more
            goes_on.set()

    monkeypatch.setattr(checkpointer._directory, "write_part", write_slowly)
    monkeypatch.setattr(checkpointer, "stop", stop)
    with psd_client.connect(running.servers, 0, 1) as ps:
        ps.declare({}, psd_client.SGD(lr=1.0), tables=[psd_client.Table("t", 3, psd_client.SGD(lr=1.0))])
        row = {"t": (np.array([5]), np.ones((1, 3), np.float32))}
        ps.push({}, tables=row)
        shard.shard.schedule.announce("early")
        while not is_writing.is_set():
            ps.push_pull({}, tables=row)
    running.finish()

    stored = CheckpointDirectory(str(tmp_path)).newest()
    assert stored is not None
    assert stored.name.endswith("-final")
    assert not shard.has_failed_to_store
