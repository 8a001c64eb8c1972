"""A reader that comes again gets what has changed alone, and has the bits of a reader that comes for the first time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import psd_client
from psd.contract.config import Limits
from psd_client.reader import Reader

SIZE = 300_000
NBYTES = 4 * SIZE


@pytest.fixture(params=["tcp", "grpc"], autouse=True)
def _transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane of all readers; in shared memory nothing travels."""
    monkeypatch.setenv("PSD_TRANSPORT", request.param)


@contextmanager
def store_and_reader(servers: str) -> Iterator[tuple[Any, Reader]]:
    with psd_client.publish(servers) as store, psd_client.connect(servers, role="reader") as reader:
        yield store, reader


def fetched(reader: Reader, **options: Any) -> tuple[psd_client.Weights, int]:
    """The weights of a pull, and the bytes of payload that it has received."""
    before = reader.received_bytes
    weights = reader.pull(**options)
    return weights, reader.received_bytes - before


def fresh(servers: str, **options: Any) -> psd_client.Weights:
    with psd_client.connect(servers, role="reader") as reader:
        return reader.pull(**options)


def changed(values: np.ndarray, every: int) -> np.ndarray:
    copy = values.copy()
    copy[::every] += 1
    return copy


@pytest.mark.parametrize("shards", [1, 3])
def test_what_has_changed_travels_alone(cluster: Callable[..., Any], shards: int) -> None:
    servers = cluster(shards).servers
    values = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    sizes = []
    with store_and_reader(servers) as (store, reader):
        version = 0
        for _ in range(4):
            store.put({"w": values, "b": np.ones(3, np.float64)})
            weights, nbytes = fetched(reader, newer_than=version)
            version = weights.version
            sizes.append(nbytes)
            np.testing.assert_array_equal(weights["w"], values)
            assert weights.digest == fresh(servers).digest
            values = changed(values, 50)

    assert sizes[0] >= NBYTES
    assert max(sizes[1:]) <= 0.08 * NBYTES  # 2 % have changed


def test_nothing_travels_where_nothing_has_changed(cluster: Callable[..., Any]) -> None:
    servers = cluster(1).servers
    values = np.arange(SIZE, dtype=np.float32)
    with store_and_reader(servers) as (store, reader):
        for _ in range(2):
            store.put({"w": values})
            weights, nbytes = fetched(reader)
        again, repeated = fetched(reader)

    np.testing.assert_array_equal(weights["w"], values)
    np.testing.assert_array_equal(again["w"], values)
    assert max(nbytes, repeated) < 2000


def test_a_precision_has_differences_of_its_own(cluster: Callable[..., Any]) -> None:
    """A reader that changes the dtype gets all of it again; the bits are those of a first pull in that dtype."""
    servers = cluster(2).servers
    values = np.random.default_rng(1).normal(size=SIZE).astype(np.float32)
    with store_and_reader(servers) as (store, reader):
        for dtype, is_whole in ((None, True), ("bfloat16", True), ("bfloat16", False), (None, True), (None, False)):
            store.put({"w": values})
            weights, nbytes = fetched(reader, dtype=dtype, newer_than=0)
            expected = fresh(servers, dtype=dtype)
            assert weights["w"].tobytes() == expected["w"].tobytes(), dtype
            assert (nbytes >= NBYTES / 2) == is_whole, (dtype, nbytes)
            values = changed(values, 500)


def test_a_version_that_is_not_kept_any_more_is_no_base(cluster: Callable[..., Any]) -> None:
    servers = cluster(1).servers
    values = np.zeros(SIZE, np.float32)
    with store_and_reader(servers) as (store, slow), psd_client.connect(servers, role="reader") as quick:
        store.put({"w": values})
        slow.pull(newer_than=0)
        for _ in range(4):
            values = changed(values, 100)
            version = store.put({"w": values})
            quick.pull(newer_than=version - 1)
        weights, nbytes = fetched(slow)

    np.testing.assert_array_equal(weights["w"], values)
    assert nbytes >= NBYTES


def test_shards_keep_no_version_if_told_so(cluster: Callable[..., Any]) -> None:
    servers = cluster(1, limits=Limits(keep_versions=0)).servers
    values = np.zeros(SIZE, np.float32)
    with store_and_reader(servers) as (store, reader):
        for _ in range(3):
            values = changed(values, 100)
            store.put({"w": values})
            weights, nbytes = fetched(reader)
            assert nbytes >= NBYTES
            np.testing.assert_array_equal(weights["w"], values)


def test_some_tensors_alone_have_bases_of_their_own(cluster: Callable[..., Any]) -> None:
    servers = cluster(2).servers
    with store_and_reader(servers) as (store, reader):
        for step in range(5):
            store.put({name: np.full(SIZE, step, np.float32) for name in ("a.x", "b.x")})
            names = [["a.*"], None, ["b.*"], ["a.*"], None][step]
            weights = reader.pull(names=names, newer_than=step)
            assert {float(values[0]) for values in weights.values()} == {step}
            assert all(np.all(values == step) for values in weights.values())


def test_a_job_that_trains_tells_its_readers_what_changed(cluster: Callable[..., Any]) -> None:
    """One tensor of two is trained."""
    servers = cluster(1).servers
    declared = {"a": np.zeros(SIZE, np.float32), "b": np.zeros(SIZE, np.float32)}
    with psd_client.connect(servers, 0, 1) as ps, psd_client.connect(servers, role="reader") as reader:
        ps.declare(declared, psd_client.Adam(lr=0.1))
        sizes = []
        for _ in range(4):
            ps.push_pull({"a": np.ones(SIZE, np.float32)})
            weights, nbytes = fetched(reader)
            sizes.append(nbytes)
            np.testing.assert_array_equal(weights["a"], ps.pull()["a"])
            assert not weights["b"].any()

    assert sizes[0] >= 2 * NBYTES
    assert sizes[3] <= 1.1 * NBYTES


def test_a_base_that_is_not_what_the_shard_thinks_is_found_and_mended(
    cluster: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    servers = cluster(1).servers
    values = np.zeros(SIZE, np.float32)
    with store_and_reader(servers) as (store, reader):
        for _ in range(2):
            values = changed(values, 100)
            store.put({"w": values})
            weights = reader.pull(newer_than=0)
        weights["w"][7] = 99  # the program may do so: the array is its own
        values = changed(values, 100)
        store.put({"w": values})
        weights, nbytes = fetched(reader)

    np.testing.assert_array_equal(weights["w"], values)
    assert nbytes >= NBYTES
    assert "changed by what it was sent it is not what it should be; all of it is fetched anew" in caplog.text
