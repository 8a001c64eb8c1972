"""A reader's connection of the bulk lane, as a stranger makes one: raw sockets and messages. No psd_client reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from raw_bulk import open_stream
from waiting import wait_until

import psd_client
from psd.contract.wire import Kind
from psd.rim import bulk_connection
from psd.v1 import bulk_pb2, control_pb2, control_pb2_grpc, data_pb2


def held(server: Any) -> int:
    """Bytes of old versions that somebody holds."""
    nbytes: int = server.shard._core.declared().arena.held_bytes
    return nbytes


def readers_at(server: Any) -> list[Any]:
    """The readers' connections."""
    return [each for each in list(server._bulk._connections.values()) if each.rank == bulk_connection.READER]


def call_of(described: control_pb2.DescribeReply, timeout_s: float) -> bytes:
    """A call for all parameters of one shard."""
    request = data_pb2.ReadRequest(
        run_id=described.run_id, layout_digest=described.layout_digest, cut=data_pb2.Cut(id="a", step=described.progress)
    )
    return bulk_pb2.BulkCall(method=bulk_pb2.BULK_METHOD_READ, timeout_s=timeout_s, read=request).SerializeToString()


@pytest.mark.parametrize("way", ["closes", "takes nothing"])
@pytest.mark.parametrize("local", [True, False], ids=["local", "tcp"])
def test_a_reader_that_takes_nothing_holds_no_page_for_long(
    cluster: Callable[..., Any], dial: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, local: bool, way: str
) -> None:
    """It is cut off after its own deadline, if it does not go before."""
    monkeypatch.setattr(bulk_connection, "OVERDUE_S", 0.0)
    running = cluster(1)
    (server,) = running.shards
    with psd_client.publish(running.servers) as opened:
        opened.put({"w": np.zeros(8_000_000, np.float32)})
        stub = control_pb2_grpc.ControlServiceStub(dial(server.address))
        described = stub.Describe(control_pb2.DescribeRequest(shard_count=1), timeout=100)
        reply = stub.OpenReads(control_pb2.OpenReadsRequest(reader=data_pb2.ReaderNote(id=3)), timeout=100)
        stream = open_stream(reply, local=local)
        stream.send(Kind.HELLO, bulk_pb2.BulkHello(ticket=reply.ticket).SerializeToString())
        assert stream.receive()[0] is Kind.WELCOME
        stream.send(Kind.CALL, call_of(described, 100 if way == "closes" else 0.5))
        assert stream.receive()[0] is Kind.ANSWER
        opened.put({"w": np.ones(8_000_000, np.float32)})
        assert held(server) > 0
        if way == "closes":
            stream.close()
        else:
            look = server._bulk._watch.look
            wait_until(lambda: look() or not readers_at(server), "it is cut off")
        wait_until(lambda: held(server) == 0, "its pages are let go")
        stream.close()
