"""One connection that breaks in the middle of a frame: the client sends again, the shard does not even complain."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from proxy import Fault, Proxy

import psd_client


@pytest.mark.parametrize("transport", ["grpc", "tcp"])
@pytest.mark.parametrize("consistency", ["sync", "async"])
@pytest.mark.parametrize("method", ["push", "push_pull"])
@pytest.mark.parametrize(
    "fault",
    [Fault("cut", "up"), Fault("cut", "down"), Fault("drop", "up", seconds=0.1), Fault("delay", "down", seconds=0.1)],
    ids=lambda fault: f"{fault.kind} {fault.direction}",
)
def test_when_a_connection_breaks_in_mid_frame_then_each_push_counts_once(
    cluster: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    consistency: str,
    method: str,
    fault: Fault,
    transport: str,
) -> None:
    """Also where the shard has counted it, and only the answer was lost. Nothing of it is an error of the shard's."""
    running = cluster(1)
    proxy = Proxy(running.servers, running.shards[0]._bulk.tcp_port)

    with psd_client.connect(proxy.address, 0, 1, transport=transport) as ps:
        ps.declare({"w": np.zeros((64, 5000), np.float32)}, psd_client.SGD(lr=1), consistency=consistency)
        proxy.arm(fault)
        for step in range(1, 4):
            getattr(ps, method)({"w": np.full((64, 5000), step, np.float32)})
            pulled = ps.pull()["w"]
        proxy.wait_until_all_fired(10)
    proxy.close()

    np.testing.assert_array_equal(pulled, -6)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
