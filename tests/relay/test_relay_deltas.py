"""What changes travels alone, from shards to relays, between relays, and to readers; the bits are those of a full pull."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from relayed_job import StartRelay, declare, step
from waiting import wait_until

import psd_client
from psd.contract.config import Limits
from psd.relay.server import RelayServer

SIZE = 300_000
NBYTES = 4 * SIZE
WAIT_S = 100.0


def reading(servers: str) -> psd_client.Reader:
    return psd_client.connect(servers, role="reader", wait_timeout=WAIT_S)


def fetched(reader: psd_client.Reader, **options: Any) -> tuple[psd_client.Weights, int]:
    """The weights of a pull, and the bytes of payload that it has received."""
    before = reader.received_bytes
    weights = reader.pull(**options)
    return weights, reader.received_bytes - before


def received(relay: RelayServer) -> int:
    return relay.holding.counters.received_bytes


class Publisher:
    """Puts versions of which each changes one of a hundred numbers, more or less."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._random = np.random.default_rng(3)
        self.values = self._random.normal(size=SIZE).astype(np.float32)

    def put(self) -> int:
        self.values = self.values.copy()
        self.values[self._random.integers(0, SIZE, SIZE // 100)] += 1
        version: int = self._store.put({"w": self.values, "n": self.values[:7].astype(np.float64)})
        return version


@pytest.fixture
def publisher(cluster: Callable[..., Any]) -> Iterator[tuple[Publisher, str]]:
    """A publisher of a store on three shards, and their addresses."""
    servers = cluster(3).servers
    with psd_client.publish(servers) as store:
        yield Publisher(store), servers


def assert_equal(found: psd_client.Weights, expected: psd_client.Weights) -> None:
    assert (found.version, found.meta, found.digest) == (expected.version, expected.meta, expected.digest)
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }


def test_a_chain_of_relays_is_told_and_tells_what_has_changed(publisher: tuple[Publisher, str], relay: StartRelay) -> None:
    """Each version is a twentieth of the first one, on each link; two precisions have differences of their own."""
    published, servers = publisher
    published.put()
    upper = relay(servers)
    lower = relay(upper.address)
    with reading(lower.address) as reader, reading(lower.address) as rounded, reading(servers) as direct:
        first, nbytes = fetched(reader, newer_than=0)
        assert nbytes >= NBYTES
        rounded.pull(dtype="bfloat16", newer_than=0)
        assert min(received(upper), received(lower)) >= NBYTES
        for _ in range(4):
            at_upper, at_lower = received(upper), received(lower)
            version = published.put()
            weights, nbytes = fetched(reader, newer_than=version - 1)
            assert_equal(weights, direct.pull(newer_than=version - 1))
            halves, rounded_bytes = fetched(rounded, newer_than=version - 1, dtype="bfloat16")
            assert_equal(halves, direct.pull(dtype="bfloat16"))
            assert nbytes < 0.06 * NBYTES
            assert rounded_bytes < 0.06 * NBYTES
            wait_until(lambda before=at_upper: received(upper) > before, "the upper relay has counted")
            assert max(received(upper) - at_upper, received(lower) - at_lower) < 0.06 * NBYTES
    assert weights.version > first.version


def test_a_relay_pulls_changes_while_a_slow_reader_keeps_its_memory(
    publisher: tuple[Publisher, str], relay: StartRelay
) -> None:
    """The base is the version that it has, whatever memory the next one gets."""
    published, servers = publisher
    published.put()
    server = relay(servers)
    with reading(server.address) as reader:
        reader.pull()
        held = server.holding.held
        assert held is not None
        held.pin()  # as a reader that takes for ever
        for _ in range(3):
            before = received(server)
            version = published.put()
            weights = reader.pull(newer_than=version - 1)
            np.testing.assert_array_equal(weights["w"], published.values)
            wait_until(lambda before=before: received(server) > before, "the relay has counted")
            assert received(server) - before < 0.06 * NBYTES
    assert held.buffers.base is None


def test_a_relay_that_begins_anew_serves_whole_versions(publisher: tuple[Publisher, str], relay: StartRelay) -> None:
    """A reader that has had an earlier version elsewhere gets all of the first one; then what has changed."""
    published, servers = publisher
    published.put()
    first = relay(servers)
    second = relay(servers)
    with reading(f"{first.address}|{second.address}") as reader:
        reader.pull()
        first.stop()
        published.put()
        weights, nbytes = fetched(reader, newer_than=1)
        assert nbytes >= NBYTES
        np.testing.assert_array_equal(weights["w"], published.values)
        published.put()
        weights, nbytes = fetched(reader, newer_than=2)
        assert nbytes < 0.06 * NBYTES
        np.testing.assert_array_equal(weights["w"], published.values)


def test_what_has_not_changed_is_not_sent_by_a_relay_that_has_begun_anew(
    publisher: tuple[Publisher, str], relay: StartRelay
) -> None:
    published, servers = publisher
    published.put()
    first, second = relay(servers), relay(servers)
    with reading(f"{first.address}|{second.address}") as reader:
        reader.pull()
        first.stop()
        weights, nbytes = fetched(reader)
        np.testing.assert_array_equal(weights["w"], published.values)
        assert nbytes < 5000


@pytest.mark.parametrize("kept", [0, 1])
def test_memory_for_earlier_versions_is_bounded(publisher: tuple[Publisher, str], relay: StartRelay, kept: int) -> None:
    published, servers = publisher
    published.put()
    server = relay(servers, limits=Limits(keep_versions=kept))
    with reading(server.address) as reader, reading(server.address) as late:
        late.pull()
        late.pull(newer_than=0)
        for _ in range(3):
            version = published.put()
            weights, nbytes = fetched(reader, newer_than=version - 1)
            np.testing.assert_array_equal(weights["w"], published.values)
        assert (nbytes < 0.06 * NBYTES) == bool(kept)
        assert server.holding.held is not None
        versions = server.holding.held.kept._kept.values()
        assert {len(of_block) for of_block in versions} == {kept}
        weights, nbytes = fetched(late)
        assert nbytes >= NBYTES
        np.testing.assert_array_equal(weights["w"], published.values)


def test_a_base_that_is_not_what_the_relay_thinks_is_found_and_mended(
    publisher: tuple[Publisher, str], relay: StartRelay, caplog: pytest.LogCaptureFixture
) -> None:
    """At the relay, whose memory has gone wrong, before its readers get it."""
    published, servers = publisher
    published.put()
    server = relay(servers)
    with reading(server.address) as reader:
        reader.pull()
        held = server.holding.held
        assert held is not None
        held.buffers.views[0].reshape(-1)[7] = 99  # as if a bit had flipped
        version = published.put()
        weights = reader.pull(newer_than=version - 1)
    np.testing.assert_array_equal(weights["w"], published.values)
    assert "all of it is fetched anew" in caplog.text


def test_a_reader_of_a_training_job_has_the_digest_that_the_shards_tell(cluster: Callable[..., Any], relay: StartRelay) -> None:
    servers = cluster(2).servers
    with psd_client.connect(servers, 0, 1, wait_timeout=WAIT_S) as ps:
        declare(ps)
        step(ps)
        with reading(relay(servers).address) as reader, reading(servers) as direct:
            for names in (None, ["head"]):
                assert_equal(reader.pull(names=names), direct.pull(names=names))
