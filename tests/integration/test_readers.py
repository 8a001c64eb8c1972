"""Readers: consistent copies of the parameters while others train."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import psd_client
from psd_client.lanes.shard_lane import ShardLane


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
            found.append((reader.version, params))
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

        assert reader.version == 1
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
        assert reader.pull()["w"].tolist() == [-1.0] * 20_000
        assert (reader.version, steps_asked) == (1, [0, 0, 1, 1])


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
