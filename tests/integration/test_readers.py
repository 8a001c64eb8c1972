"""Readers: consistent copies of the parameters while others train."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import psd_client
from psd.state.shard import Shard
from psd_client.lanes.shard_lane import ShardLane


@pytest.fixture(params=["shm", "tcp", "grpc"], autouse=True)
def _transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane of all workers and readers."""
    monkeypatch.setenv("PSD_TRANSPORT", request.param)


@pytest.fixture
def steps_asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The version of each cut that a shard is asked for."""
    asked: list[int] = []
    read = ShardLane.read

    def note(self: ShardLane, request: Any, *arguments: Any) -> Any:
        asked.append(request.cut.step)
        return read(self, request, *arguments)

    monkeypatch.setattr(ShardLane, "read", note)
    return asked


def train(
    servers: str, rank: int, world_size: int, stop: threading.Event, started: threading.Barrier, **declaration: Any
) -> None:
    """Pushes ones: with lr 1 and the sum of the gradients, every parameter is minus the number of updates x workers."""
    initial = {"a": np.zeros(300_000, np.float32), "b": np.zeros((5, 3)), "c": np.zeros((), np.float32)}
    ones = {name: np.ones_like(value) for name, value in initial.items()}
    with psd_client.connect(servers, rank, world_size, wait_timeout=60) as ps:
        ps.declare(initial, psd_client.SGD(lr=1.0), reduce="sum", **declaration)
        started.wait(100)
        while not stop.is_set():
            ps.push_pull(ones)


@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_a_reader_sees_one_version_while_others_train(cluster: Callable[..., Any], consistency: str) -> None:
    """Synchronous: the same number of updates in every element of every shard. Else: in every block, and never going back."""
    running = cluster(3)
    stop, started = threading.Event(), threading.Barrier(3)
    workers = [
        threading.Thread(target=train, args=(running.servers, rank, 2, stop, started), kwargs={"consistency": consistency})
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()

    started.wait(100)
    found = []
    with psd_client.connect(running.servers, role="reader", wait_timeout=60) as reader:
        for _ in range(5):
            params = reader.pull()
            found.append((params.version, params))
    stop.set()
    for worker in workers:
        worker.join()

    versions = [version for version, _ in found]
    assert versions == sorted(versions)
    assert all({name: value.shape for name, value in p.items()} == {"a": (300_000,), "b": (5, 3), "c": ()} for _, p in found)
    if consistency == "sync":
        for version, params in found:
            assert {float(x) for value in params.values() for x in np.unique(value)} == {-2.0 * version}
    # The job did not wait for the reader, nor count it.
    assert all(len(shard.shard._core.members.workers) == 2 for shard in running.shards)


def test_a_reader_reads_a_job_that_rests(cluster: Callable[..., Any], steps_asked: list[int]) -> None:
    """No round closes; the reader takes what is there, at the first attempt."""
    running = cluster(2)
    with (
        psd_client.connect(running.servers, 0, 1) as ps,
        psd_client.connect(running.servers, role="reader", wait_timeout=60) as reader,
    ):
        ps.declare({"w": np.arange(20_000, dtype=np.float32)}, psd_client.SGD(lr=1.0))
        ps.push_pull({"w": np.ones(20_000, np.float32)})

        params = reader.pull()

        assert params.version == 1
        np.testing.assert_array_equal(params["w"], np.arange(20_000, dtype=np.float32) - 1)
        assert steps_asked == [1, 1]


def test_a_reader_in_the_midst_of_a_round_takes_the_version_before(cluster: Callable[..., Any], steps_asked: list[int]) -> None:
    """However long the round takes: one worker has pushed, the other one computes. Rounds of 0.6 s once starved a reader."""
    running = cluster(2)
    initial, ones = {"w": np.zeros(20_000, np.float32)}, {"w": np.ones(20_000, np.float32)}
    with (
        psd_client.connect(running.servers, 0, 2) as ps,
        psd_client.connect(running.servers, 1, 2) as other,
        psd_client.connect(running.servers, role="reader", wait_timeout=60) as reader,
    ):
        joining = threading.Thread(target=other.declare, args=(initial, psd_client.SGD(lr=1.0)))
        joining.start()
        ps.declare(initial, psd_client.SGD(lr=1.0))
        joining.join()
        ps.push(ones)

        assert reader.pull()["w"].tolist() == [0.0] * 20_000

        other.push(ones)
        ps.pull()
        params = reader.pull()
        assert params["w"].tolist() == [-1.0] * 20_000
        assert (params.version, steps_asked) == (1, [0, 0, 1, 1])


def test_a_reader_that_is_overtaken_asks_for_a_version_ahead(
    cluster: Callable[..., Any], steps_asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round closes between its two questions, each time; the more often that happens, the further ahead it asks."""
    running = cluster(1)
    ones = {"w": np.ones(20_000, np.float32)}
    with (
        psd_client.connect(running.servers, 0, 1) as ps,
        psd_client.connect(running.servers, role="reader", wait_timeout=60) as reader,
    ):
        ps.declare({"w": np.zeros(20_000, np.float32)}, psd_client.SGD(lr=1.0))
        rounds = iter([1, 2, 2])
        describe = ShardLane.describe

        def overtake(self: ShardLane, *arguments: Any) -> Any:
            reply = describe(self, *arguments)
            for _ in range(next(rounds)):
                ps.push_pull(ones)
            return reply

        monkeypatch.setattr(ShardLane, "describe", overtake)

        assert reader.pull()["w"].tolist() == [-5.0] * 20_000
        assert steps_asked == [0, 2, 5]


@pytest.fixture
def trained(cluster: Callable[..., Any]) -> Iterator[tuple[psd_client.ParameterServer, psd_client.Reader]]:
    """A worker of a job of three tensors in several blocks on two shards, and a reader."""
    running = cluster(2)
    with (
        psd_client.connect(running.servers, 0, 1) as ps,
        psd_client.connect(running.servers, role="reader", wait_timeout=60) as reader,
    ):
        ps.declare(
            {"encoder.w": np.zeros(500_000, np.float32), "encoder.b": np.zeros(3), "head": np.zeros((2, 3), np.float32)},
            psd_client.SGD(lr=1.0),
        )
        yield ps, reader


def step(ps: psd_client.ParameterServer) -> None:
    """Take 1 from every element."""
    ps.push_pull({"encoder.w": np.ones(500_000, np.float32), "encoder.b": np.ones(3), "head": np.ones((2, 3), np.float32)})


def test_a_reader_fetches_the_tensors_that_it_names(trained: tuple[psd_client.ParameterServer, psd_client.Reader]) -> None:
    """By name or pattern; blocks without them do not travel."""
    ps, reader = trained
    step(ps)

    assert {name: value.tolist() for name, value in reader.pull(names=["head"]).items()} == {"head": [[-1.0] * 3] * 2}
    assert 0 < reader.received_bytes < 600_000  # of two million: the block that has the last of "encoder.w", too
    assert list(reader.pull(names=["encoder.*", "head"])) == ["encoder.w", "encoder.b", "head"]
    with pytest.raises(psd_client.InvalidRequest, match=r"names: no tensor is called 'decoder\.\*'; there are \['encoder\.w'"):
        reader.pull(names=["head", "decoder.*"])
    with pytest.raises(psd_client.InvalidRequest, match="names: expected a list of names or patterns, got 'head'"):
        reader.pull(names="head")
    with pytest.raises(psd_client.InvalidRequest, match="names: is empty"):
        reader.pull(names=[])


def test_a_reader_of_an_asynchronous_job_fetches_the_tensors_that_it_names(cluster: Callable[..., Any]) -> None:
    """All shards take part in the cut, also those that have none of them; and a worker that pushes nothing says at once where
    it is, however long its lease."""
    running = cluster(3, lease_s=1000)
    with (
        psd_client.connect(running.servers, 0, 1) as ps,
        psd_client.connect(running.servers, role="reader", wait_timeout=60) as reader,
    ):
        ps.declare({"a": np.zeros(500_000, np.float32), "b": np.zeros(3)}, psd_client.SGD(lr=1.0), consistency="async")
        ps.push({"a": np.ones(500_000, np.float32), "b": np.ones(3)})

        assert reader.pull(names=["b"])["b"].tolist() == [-1.0] * 3
        with pytest.raises(psd_client.WaitTimeout, match="newer_than: the newest version is 1"):
            reader.pull(newer_than=1, timeout=0.2)
        pushed = threading.Thread(target=ps.push, args=({"a": np.ones(500_000, np.float32), "b": np.ones(3)},))
        pushed.start()
        assert reader.pull(names=["b"], newer_than=1)["b"].tolist() == [-2.0] * 3
        pushed.join()


def test_a_reader_fills_the_arrays_that_it_is_given(trained: tuple[psd_client.ParameterServer, psd_client.Reader]) -> None:
    """In place, and not at all if one of them does not fit."""
    ps, reader = trained
    step(ps)
    out = {"head": np.zeros((2, 3), np.float32), "encoder.b": np.zeros(3)}

    assert reader.pull(out=out) is not None
    assert (out["head"].tolist(), out["encoder.b"].tolist()) == ([[-1.0] * 3] * 2, [-1.0] * 3)

    step(ps)
    with pytest.raises(
        psd_client.InvalidTensor, match=r"out\['encoder.b'\]: expected float64 of shape \(3,\), got float32 of \(3,\)"
    ):
        reader.pull(out={"head": out["head"], "encoder.b": np.zeros(3, np.float32)})
    fixed = np.zeros((2, 3), np.float32)
    fixed.flags.writeable = False
    with pytest.raises(psd_client.InvalidTensor, match=r"out\['head'\]: the array is read-only"):
        reader.pull(out={"encoder.b": out["encoder.b"], "head": fixed})
    with pytest.raises(psd_client.InvalidRequest, match="out: no tensor is called 'tail'"):
        reader.pull(out={"tail": np.zeros(3)})
    with pytest.raises(psd_client.InvalidRequest, match="names: the arrays in `out` say already"):
        reader.pull(names=["head"], out=out)
    assert (out["head"].tolist(), out["encoder.b"].tolist()) == ([[-1.0] * 3] * 2, [-1.0] * 3)


def test_a_reader_waits_for_a_newer_version(
    trained: tuple[psd_client.ParameterServer, psd_client.Reader], steps_asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one question to each shard, which answers when the round closes."""
    ps, reader = trained
    step(ps)
    version = reader.pull().version
    steps_asked.clear()
    found: list[psd_client.Weights] = []
    is_asked = threading.Event()
    begin = Shard.begin_read
    monkeypatch.setattr(Shard, "begin_read", lambda *arguments: (begin(*arguments), is_asked.set())[0])
    waiting = threading.Thread(target=lambda: found.append(reader.pull(names=["head"], newer_than=version)))
    waiting.start()
    assert is_asked.wait(100)

    step(ps)

    waiting.join()
    (newer,) = found
    assert (newer["head"][0, 0], newer.version, steps_asked) == (-2.0, 2, [2])
    assert reader.pull(newer_than=0)["head"][0, 0] == -2.0
    with pytest.raises(psd_client.WaitTimeout, match="newer_than: the newest version is 2, and there has come none above 5"):
        reader.pull(newer_than=5, timeout=0.1)
    with pytest.raises(psd_client.InvalidRequest, match="newer_than: must be from 0"):
        reader.pull(newer_than=-1)
    with pytest.raises(psd_client.InvalidRequest, match="timeout: expected 0 to"):
        reader.pull(timeout=-1)


def test_a_reader_mixes_no_two_timelines(cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard goes back to a checkpoint after it was asked how far it is, and gets to the same version with other values."""
    running = cluster(2)
    gone_back = running.shards[1].shard._core
    with (
        psd_client.connect(running.servers, 0, 1) as ps,
        psd_client.connect(running.servers, role="reader", wait_timeout=60) as reader,
    ):
        ps.declare({"w": np.zeros(500_000, np.float32)}, psd_client.SGD(lr=1.0))
        read = ShardLane.read

        def read_after(self: ShardLane, *arguments: Any) -> Any:
            if self.shard == 1:
                gone_back.timeline = 1
            return read(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(ShardLane, "read", read_after)
            with pytest.raises(psd_client.NotDeclared, match="the shards are going back to a checkpoint"):
                reader.pull(timeout=0.5)
        gone_back.timeline = 0
        assert reader.pull()["w"].tolist() == [0.0] * 500_000


@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_a_reader_that_waits_is_told_when_the_job_is_over(
    cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, consistency: str
) -> None:
    """By shards that end because all workers have left: it need not guess why they are gone. It does not hold them up."""
    running = cluster(2)
    found: list[Exception] = []
    are_asked = threading.Semaphore(0)
    call, shards = ("begin_read", 1) if consistency == "sync" else ("describe", 2)
    asked = getattr(Shard, call)
    monkeypatch.setattr(Shard, call, lambda *arguments: (asked(*arguments), are_asked.release())[0])

    def wait(reader: psd_client.Reader) -> None:
        try:
            reader.pull(newer_than=1, timeout=100)
        except psd_client.PsdError as error:
            found.append(error)

    with psd_client.connect(running.servers, role="reader", wait_timeout=60) as reader:
        with psd_client.connect(running.servers, 0, 1) as ps:
            ps.declare({"w": np.zeros(500_000, np.float32)}, psd_client.SGD(lr=1.0), consistency=consistency)
            ps.push_pull({"w": np.ones(500_000, np.float32)})
            waiting = threading.Thread(target=wait, args=(reader,))
            waiting.start()
            for _ in range(shards):  # a shard that has heard of no reader waits for none
                assert are_asked.acquire(timeout=100)
        for shard in running.shards:
            assert shard.done.wait(100)
        # The time in which readers that ask again and again hear of it: half a second is short on a busy machine.
        patient = SimpleNamespace(sleep=lambda _: waiting.join(100), monotonic=time.monotonic)
        monkeypatch.setattr("psd.rim.server.time", patient)
        for shard in running.shards:
            shard.drain(100)
        waiting.join(100)

    assert [type(error) for error in found] == [psd_client.JobOver]
    assert "the job is over: all workers have left" in str(found[0])


def test_a_reader_without_a_job_says_so(cluster: Callable[..., Any]) -> None:
    """Nothing is declared until the wait timeout."""
    with (
        psd_client.connect(cluster(1).servers, role="reader", wait_timeout=0.2) as reader,
        pytest.raises(psd_client.NotDeclared, match="no job has been declared"),
    ):
        reader.pull()


def test_a_reader_has_no_rank(cluster: Callable[..., Any]) -> None:
    """A rank with role="reader" is a mistake."""
    with pytest.raises(psd_client.ConfigError, match="a reader has none"):
        psd_client.connect(cluster(1).servers, 3, 4, role="reader")  # type: ignore[call-overload]
