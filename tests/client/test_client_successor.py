"""A worker that takes the place of one whose connection is dead gets in, whatever the shard was doing with that one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from client_faults import until

import psd_client
from psd.contract.wire import Kind
from psd.v1 import bulk_pb2, data_pb2
from psd_client.worker.exchange import exchange

SIZE = 4_000_000
"""float32: what no buffers of sockets hold."""


def connected(servers: str, transport: str) -> psd_client.ParameterServer:
    ps = psd_client.connect(servers, 0, 1, transport=transport, retry_timeout=20)
    ps.declare({"w": np.zeros(SIZE, np.float32)}, psd_client.SGD(lr=1.0))
    return ps


@pytest.mark.parametrize("method", [bulk_pb2.BULK_METHOD_PULL, bulk_pb2.BULK_METHOD_PUSH_PULL], ids=["pull", "push_pull"])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_connect_when_the_shard_is_blocked_sending_to_the_one_before_then_gets_in(
    cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, transport: str, method: int
) -> None:
    """That one was killed with its machine, or is suspended: it does not read, and does not close."""
    if transport == "shm":  # the numbers themselves travel over the local socket
        monkeypatch.setattr(exchange, "share_memory", lambda *_: None)
    running = cluster(1)
    before = connected(running.servers, transport)
    lane: Any = before._worker._shards.lanes[0]
    caller, gradients = before._worker._session.caller(0), before._worker.gradients
    digest = gradients.layout.digest
    scalars = [data_pb2.GroupScalars(values=(1, 0, 0, 0))]
    header = data_pb2.PushHeader(caller=caller, weight=1, layout_digest=digest, scalars=scalars)
    pull = data_pb2.PullRequest(caller=caller, layout_digest=digest)
    stream = lane._bulk._open._stream
    stream.send(Kind.CALL, bulk_pb2.BulkCall(method=method, pull=pull, timeout_s=1000).SerializeToString())
    ours = running.shards[0]._bulk._by_rank[0]
    for block in gradients.layout.blocks if method == bulk_pb2.BULK_METHOD_PUSH_PULL else ():
        if ours._stream._sending.locked():
            break
        message = data_pb2.PushFrame(block=block.index, last=block.index == len(gradients.layout.blocks) - 1)
        if block.index == 0:
            message.push.CopyFrom(header)
        stream.send(Kind.FRAME, message.SerializeToString(), gradients.block(block.index))
    until(ours._stream._sending.locked)

    with connected(running.servers, transport) as ps:
        ps.push_pull({"w": np.ones(SIZE, np.float32)})

    assert ours.ended.is_set()
    before.close()
