"""What is published reaches readers by a relay as it does by the shards: versions, meta, precision, and all bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from test_relay import StartRelay, reading

import psd_client


def test_a_relay_serves_what_is_published(cluster: Callable[..., Any], relay: StartRelay) -> None:
    """All of it is equal, the digest of the shards included."""
    servers = cluster(3).servers
    values = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    with psd_client.publish(servers) as store:
        store.put({"w": values, "n": np.arange(5)}, meta={"step": 1})
        first, second = relay(servers), relay(servers)
        with reading(first.address) as near, reading(second.address) as other, reading(servers) as direct:
            for step in range(2, 5):
                values = values.copy()
                values[::100] += step
                version = store.put({"w": values, "n": np.arange(5) + step}, meta={"step": step})
                found, same, shards = (each.pull(newer_than=version - 1) for each in (near, other, direct))
                assert found.version == shards.version == version
                assert found.meta == {"step": step}
                assert found.digest == same.digest == shards.digest
                for name, array in shards.items():
                    assert found[name].tobytes() == array.tobytes()
            rounded = near.pull(dtype="bfloat16")
            np.testing.assert_array_equal(rounded["w"], direct.pull(dtype="bfloat16")["w"])


def test_a_relay_of_a_store_without_a_version_has_none(cluster: Callable[..., Any], relay: StartRelay) -> None:
    """A reader at it waits, and has the first version that is put."""
    servers = cluster(2).servers
    with psd_client.publish(servers) as store, reading(relay(servers).address) as reader:
        store.put({"w": np.ones(3, np.float32)})
        assert reader.pull().version == 1
