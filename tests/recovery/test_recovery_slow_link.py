"""A slow link: control messages do not wait behind a gradient that takes longer than a lease, and the log says how far."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from proxy import Proxy
from shard_processes import ShardProcess

import psd_client

pytestmark = [pytest.mark.process, pytest.mark.slow]

SIZE = 2_000_000
"""float32: twice what buffers on the way hold, and 8 s at this speed, each way."""

BYTES_PER_S = 1e6
LEASE_S = 3


@pytest.fixture
def proxy(shard_processes: Callable[..., list[ShardProcess]]) -> Iterator[Proxy]:
    shard = shard_processes(1, "--lease", str(LEASE_S))[0]
    made = Proxy(shard.address, shard.bulk_port)
    yield made
    made.close()


@pytest.mark.parametrize("transport", ["grpc", "tcp"])
def test_worker_when_a_push_takes_longer_than_its_lease_then_its_session_goes_on(
    proxy: Proxy, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "psd_client")
    with psd_client.connect(proxy.address, 0, 1, transport=transport, retry_timeout=60, report_after=1) as ps:
        ps.declare({"w": np.zeros(SIZE, np.float32)}, psd_client.SGD(lr=1.0))
        proxy.bytes_per_s = BYTES_PER_S
        found = ps.push_pull({"w": np.full(SIZE, -1, np.float32)})
        proxy.bytes_per_s = 0.0

    assert set(found["w"].tolist()) == {1.0}
    assert [record.message for record in caplog.records if "lease" in record.message or "heartbeat" in record.message] == []
    told = [
        re.search(r"has had a call for (\d+) s: sent (\S+) of 8\.0 MB, received (\S+) of 8\.0 MB, \S+ MB/s, \d+ s left$", each)
        for each in caplog.messages
    ]
    assert [found for found in told if found is not None and float(found[2]) + float(found[3]) < 16], caplog.messages
