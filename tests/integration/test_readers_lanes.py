"""Readers on the lanes of the bulk data: the same bits on each, and connections, memory and pages that are let go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from waiting import wait_until

import psd_client
from psd.contract.config import Limits
from psd.rim.bulk_connection import READER
from psd_client.lanes.transport import Cancelled
from psd_client.reader import Reader

SIZE = 600_000
BULK = ["shm", "tcp"]
LANES = [*BULK, "grpc"]


def state_of(step: int) -> dict[str, Any]:
    """Large and small tensors, a scalar, one without elements, and one whose first number is not finite."""
    values = np.random.default_rng(step).standard_normal(SIZE).astype(np.float32)
    return {
        "w": values,
        "odd": np.concatenate([[np.float32(np.inf)], values[:9]]),
        "double": values[:5].astype(np.float64),
        "is_set": values[:7] > 0,
        "scalar": np.float32(step),
        "none": np.zeros((0, 3), np.float32),
    }


@contextmanager
def reading(servers: str, transport: str, **options: Any) -> Iterator[Reader]:
    with psd_client.connect(servers, role="reader", wait_timeout=60, transport=transport, **options) as reader:
        yield reader


@pytest.fixture
def store(cluster: Callable[..., Any]) -> Iterator[tuple[Any, str, Any]]:
    """A store on two shards, its servers, and these."""
    running = cluster(2)
    with psd_client.publish(running.servers, nan_policy="allow") as opened:
        yield opened, running.servers, running.shards


def connections(shards: Any) -> list[Any]:
    """The readers' connections on these shards."""
    return [each for shard in shards for each in list(shard._bulk._connections.values()) if each.rank == READER]


def held(shards: Any) -> list[int]:
    """Bytes of old versions that somebody holds, on each shard."""
    return [shard.shard._core.declared().arena.held_bytes for shard in shards]


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_the_bits_are_the_same_on_every_lane(store: tuple[Any, str, Any], dtype: str | None) -> None:
    """Of all tensors, of some, into arrays that are given, and after a version that has changed a little."""
    opened, servers, _ = store
    found: dict[str, list[Any]] = {}
    for step in (1, 2):
        values = state_of(1)
        values["w"][::50] += step
        opened.put(values, {"step": step})
        for lane in LANES:
            with reading(servers, lane) as reader:
                out = {"w": np.zeros(SIZE, np.float32), "is_set": np.zeros(7, np.bool_)}
                for weights in (
                    reader.pull(dtype=dtype),
                    reader.pull(names=["double", "odd", "scalar"], dtype=dtype),
                    reader.pull(out=out, dtype=dtype),
                    reader.pull(dtype=dtype, newer_than=0),
                ):
                    bits = {name: (value.dtype, value.shape, value.tobytes()) for name, value in weights.items()}
                    found.setdefault(lane, []).append((bits, weights.version, weights.meta, weights.digest))
                assert out["w"] is not weights["w"]
                assert [transport.split()[0] for transport in reader.transports] == [lane] * 2

    assert found["shm"] == found["tcp"] == found["grpc"]
    if dtype is None:
        assert found["shm"][-1][0]["w"][2] == values["w"].tobytes()


@pytest.mark.parametrize("lane", LANES)
def test_what_was_pulled_is_the_programs_own(store: tuple[Any, str, Any], lane: str) -> None:
    """It does not change with later pulls, however many are kept, and what the program writes there harms no later one."""
    opened, servers, _ = store
    kept = []
    with reading(servers, lane) as reader:
        for step in range(7):
            values = {"w": np.full(SIZE, step, np.float32), "b": np.arange(3) + step}
            opened.put(values)
            weights = reader.pull(newer_than=step)
            kept.append((step, weights, weights["w"]))
            assert all(array.flags.writeable for array in weights.values())
            if step % 2:
                weights["w"][5] = 1000
            if step == 3:
                kept = kept[2:]

    for step, weights, array in kept:
        expected = np.full(SIZE, step, np.float32)
        expected[5] = 1000 if step % 2 else step
        np.testing.assert_array_equal(array, expected)
        assert weights["b"].tolist() == [step, step + 1, step + 2]


@pytest.mark.parametrize("lane", BULK)
def test_a_connection_that_breaks_while_the_reader_waits_is_opened_again(store: tuple[Any, str, Any], lane: str) -> None:
    """And the wait goes on."""
    opened, servers, shards = store
    opened.put(state_of(1))
    with reading(servers, lane) as reader, ThreadPoolExecutor(1) as pool:
        reader.pull()
        for cut in range(3):
            waiting = pool.submit(reader.pull, newer_than=1 + cut)
            for _ in range(2):
                wait_until(lambda: len(connections(shards)) == 2 and all(c._is_busy for c in connections(shards)), "it waits")
                before = connections(shards)
                for connection in before:
                    connection.hang_up()
                wait_until(lambda before=before: not set(before) & set(connections(shards)), "they end")
            opened.put(state_of(2 + cut), {"step": 2 + cut})
            weights = waiting.result(100)
            assert (weights.version, weights.meta) == (2 + cut, {"step": 2 + cut})
            np.testing.assert_array_equal(weights["w"], state_of(2 + cut)["w"])


@pytest.mark.parametrize("lane", LANES)
def test_a_wait_that_ends_leaves_nothing_behind(store: tuple[Any, str, Any], lane: str) -> None:
    """By its timeout, or because another thread closes the reader."""
    opened, servers, shards = store
    opened.put(state_of(1))
    with reading(servers, lane) as reader:
        reader.pull()
        with pytest.raises(psd_client.WaitTimeout, match="newer_than: the newest version is 1"):
            reader.pull(newer_than=1, timeout=0.3)
        assert reader.pull().version == 1
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(reader.pull, newer_than=1)
            wait_until(lambda: all(shard.shard.cuts.open for shard in shards), "it waits")
            reader.close()
            with pytest.raises(Cancelled):
                waiting.result(100)
    wait_until(lambda: not any(shard.shard.cuts.open for shard in shards), "its cuts are dropped")
    wait_until(lambda: connections(shards) == [], "its connections are closed")
    wait_until(lambda: held(shards) == [0, 0], "its pages are let go")


def test_readers_have_so_many_connections_and_no_more(cluster: Callable[..., Any]) -> None:
    """One that comes when all are taken is told so; workers have theirs all the same."""
    running = cluster(1, limits=Limits(readers_max=1))
    with psd_client.publish(running.servers) as opened, reading(running.servers, "tcp") as reader:
        opened.put({"w": np.ones(3, np.float32)})
        assert reader.pull()["w"].tolist() == [1] * 3
        says = r"\(the shard's --max-readers\)"
        with reading(running.servers, "tcp", retry_timeout=0) as other, pytest.raises(psd_client.ShardUnavailable, match=says):
            other.pull()
        with psd_client.publish(running.servers) as successor:
            assert successor.put({"w": np.full(3, 2, np.float32)}) == 2
        assert reader.pull(newer_than=1)["w"].tolist() == [2] * 3


def test_a_lane_that_does_not_work_here_is_an_error_if_it_was_asked_for(cluster: Callable[..., Any]) -> None:
    """Otherwise the next best one is used."""
    running = cluster(1, bulk_port=None)
    with psd_client.publish(running.servers) as opened:
        opened.put({"w": np.ones(3, np.float32)})
        with reading(running.servers, "tcp") as reader, pytest.raises(psd_client.ConfigError, match="--bulk-port off"):
            reader.pull()
        with reading(running.servers, "auto") as reader:
            assert reader.pull()["w"].tolist() == [1] * 3
            assert reader.transports == ["shm"]


@pytest.mark.parametrize("lane", BULK)
def test_readers_of_a_job_that_trains_hold_up_nobody(cluster: Callable[..., Any], lane: str) -> None:
    """Each copy is of one version, while rounds close as fast as they can."""
    running = cluster(2)
    over = threading.Event()
    with psd_client.connect(running.servers, 0, 1) as ps:
        ps.declare({"w": np.zeros(SIZE, np.float32), "b": np.zeros(3, np.float32)}, psd_client.SGD(lr=1.0))

        def follow() -> int:
            version = taken = 0
            with reading(running.servers, lane) as reader:
                while not over.is_set():
                    weights = reader.pull()
                    assert weights.version >= version
                    version = weights.version
                    assert set(weights["w"].tolist()) | set(weights["b"].tolist()) == {-float(version)}
                    taken += 1
            return taken

        with ThreadPoolExecutor(2) as pool:
            following = [pool.submit(follow) for _ in range(2)]
            for _ in range(60):
                ps.push_pull({"w": np.ones(SIZE, np.float32), "b": np.ones(3, np.float32)})
            over.set()
            assert min(each.result(100) for each in following) > 0
        for shard in running.shards:
            shard.shard._core.declared().kept.forget()
        wait_until(lambda: held(running.shards) == [0, 0], "their pages are let go")
