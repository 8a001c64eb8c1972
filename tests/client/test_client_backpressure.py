"""A shard that does not read yet: the worker waits with what it has, and the shard does not pile it up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from client_faults import Thread, until

import psd_client
from psd.contract.frames import WINDOW_BYTES
from psd.contract.layout import PIPELINED_BLOCKS
from psd.contract.wire import BUFFER_BYTES
from psd.state.tickets import WaitKind

ELEMENTS = 4 << 20
"""float32: 16 MiB."""
BLOCK_BYTES = 4 * ELEMENTS // PIPELINED_BLOCKS
"""Less than the sockets' buffers hold, so that one is under way."""

UNDER_WAY_MAX = {
    "grpc": WINDOW_BYTES + 4 * BLOCK_BYTES,
    # Linux takes twice what is asked for, at each side.
    "tcp": 4 * BUFFER_BYTES + BLOCK_BYTES,
}
STALL_S = 0.5


@pytest.mark.parametrize("transport", ["grpc", "tcp"])
def test_push_when_the_shard_makes_it_wait_then_little_is_under_way(cluster: Callable[..., Any], transport: str) -> None:
    """Windows and sockets' buffers hold some blocks; the rest of the gradient stays where it is. Whole processes over longer
    times are benchmarks/backpressure.py's."""
    running = cluster(1)

    def connected(rank: int) -> psd_client.ParameterServer:
        ps = psd_client.connect(running.servers, rank, 2, transport=transport, wait_timeout=60)
        ps.declare({"w": np.zeros(ELEMENTS, np.float32)}, psd_client.SGD(lr=1.0), consistency="ssp:2")
        return ps

    workers = [Thread(lambda rank=rank: connected(rank)) for rank in range(2)]
    with workers[0].result() as ps, workers[1].result() as other:
        lane: Any = ps._worker._shards.lanes[0]
        ones = {"w": np.ones(ELEMENTS, np.float32)}
        for _ in range(3):
            ps.push(ones)
        before = lane.traffic.sent_bytes

        waiting = Thread(lambda: ps.push(ones))
        until(lambda: [wait.kind for wait in running.shards[0].shard._core.waiting.open(0)] == [WaitKind.STALENESS])
        threading.Event().wait(STALL_S)

        assert 0 < lane.traffic.sent_bytes - before <= UNDER_WAY_MAX[transport]
        other.push(ones)
        waiting.result()
