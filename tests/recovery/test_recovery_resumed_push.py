"""A large push whose connection breaks off goes on where the shard's counted blocks end, and counts once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from proxy import Fault, Proxy

import psd_client

TENSORS, TENSOR_BYTES = 16, 2 << 20
PUSH_BYTES = TENSORS * TENSOR_BYTES
CUT_AFTER = PUSH_BYTES * 3 // 4
LOST_BYTES_MAX = 14 << 20
"""Most bytes that had passed the proxy, and were in the buffers of sockets and of gRPC, or in a block that was not whole."""

MEANWHILE_BYTES_MAX = 12 << 20
"""Most bytes that pass the proxy on other connections, until their worker knows that one has broken."""


def parameters(value: float = 0) -> dict[str, Any]:
    return {f"w{i}": np.full(TENSOR_BYTES // 4, value, np.float32) for i in range(TENSORS)}


LINKS: dict[str, dict[str, Any]] = {
    "grpc": {"transport": "grpc"},
    "tcp": {"transport": "tcp"},
    "tcp, 4 streams": {"transport": "tcp", "streams": 4},
}


@pytest.mark.parametrize(
    ("consistency", "method", "aggregation", "link"),
    [
        ("sync", "push", "exact", "grpc"),
        ("async", "push_pull", "fast", "grpc"),
        ("sync", "push_pull", "fast", "tcp"),
        ("async", "push", "fast", "tcp"),
        ("sync", "push_pull", "exact", "tcp, 4 streams"),
    ],
)
def test_a_large_push_goes_on_where_it_broke_off(
    cluster: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    consistency: str,
    method: str,
    aggregation: str,
    link: str,
) -> None:
    caplog.set_level(logging.INFO, "psd_client")
    running = cluster(1)
    proxy = Proxy(running.servers, running.shards[0]._bulk.tcp_port)

    with psd_client.connect(proxy.address, 0, 1, **LINKS[link]) as ps:
        ps.declare(parameters(), psd_client.SGD(lr=1), consistency=consistency, aggregation=aggregation)
        proxy.arm(Fault("cut", "up", after=CUT_AFTER))
        for step in (1, 2):
            getattr(ps, method)(parameters(step))
            if step == 1:
                sent = proxy.passed["up"]
            pulled = ps.pull()
    proxy.close()

    assert {float(value) for values in pulled.values() for value in np.unique(values)} == {-3}
    (message,) = [record.getMessage() for record in caplog.records if "broken off" in record.getMessage()]
    assert "the push of step 0 had broken off; shard 0 has " in message
    assert "of its 32.0 MiB, and gets the rest" in message
    lacking = PUSH_BYTES - int(float(message.split(" has ")[1].split()[0]) * (1 << 20))
    assert PUSH_BYTES <= sent <= CUT_AFTER + lacking + MEANWHILE_BYTES_MAX
    if "streams" not in link:
        assert sent <= PUSH_BYTES + LOST_BYTES_MAX


@pytest.mark.parametrize("link", ["grpc", "tcp, 4 streams"])
def test_compressed_gradients_go_on_with_the_same_bits(cluster: Callable[..., Any], link: str) -> None:
    """What is left of the push is encoded once, and its residual is taken once, as if nothing had broken."""
    found = []
    for fault in (None, Fault("cut", "up", after=PUSH_BYTES * 3 // 16)):
        running = cluster(1)
        proxy = Proxy(running.servers, running.shards[0]._bulk.tcp_port)
        with psd_client.connect(proxy.address, 0, 1, **LINKS[link]) as ps:
            ps.declare(parameters(), psd_client.SGD(lr=1), compress="int8")
            random = np.random.default_rng(0)
            for step in range(3):
                if step == 1 and fault is not None:
                    proxy.arm(fault)
                gradient = random.normal(size=TENSOR_BYTES // 4).astype(np.float32)
                ps.push_pull(dict.fromkeys(parameters(), gradient))
            found.append(ps.pull()["w9"])
        if fault is not None:
            assert proxy.fired == [fault]
        proxy.close()

    np.testing.assert_array_equal(*found)


def test_a_small_push_is_sent_again_as_it_is(cluster: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "psd_client")
    running = cluster(1)
    proxy = Proxy(running.servers, running.shards[0]._bulk.tcp_port)

    with psd_client.connect(proxy.address, 0, 1, transport="tcp") as ps:
        ps.declare({"w": np.zeros(100_000, np.float32)}, psd_client.SGD(lr=1))
        proxy.arm(Fault("cut", "up"))
        pulled = ps.push_pull({"w": np.ones(100_000, np.float32)})["w"]
    proxy.close()

    assert proxy.fired
    np.testing.assert_array_equal(pulled, -1)
    assert [record.getMessage() for record in caplog.records if "broken off" in record.getMessage()] == []
