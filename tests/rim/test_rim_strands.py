"""Further sockets of a bulk connection, as a stranger sees them: raw sockets, right and wrong greetings. No psd_client."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from raw_bulk import BulkWorker, answer, open_stream
from raw_client import spec

from psd.contract.errors import InvalidRequest, PsdError
from psd.contract.strands import STREAMS_MAX
from psd.contract.wire import Disconnected, Kind, Stream
from psd.rim.bundles import Bundle
from psd.v1 import bulk_pb2, control_pb2, data_pb2

ELEMENTS = 40_000  # a block's payload is above the size from which it is cut


class WideWorker(BulkWorker):
    """A worker of a job of one block, which opens connections of several sockets."""

    def __init__(self, channel: grpc.Channel) -> None:
        super(BulkWorker, self).__init__(channel, 0, 1)
        self.declare(spec(1, blocks=1, size=ELEMENTS))
        self.streams = []

    def ticket(self) -> control_pb2.OpenBulkReply:
        return self.control.OpenBulk(control_pb2.OpenBulkRequest(caller=self.caller), timeout=100)

    def greet(self, reply: control_pb2.OpenBulkReply, *, local: bool = False, **fields: Any) -> Stream:
        stream = open_stream(reply, local=local)
        self.streams.append(stream)
        hello = bulk_pb2.BulkHello(**{"ticket": reply.ticket, **fields})
        stream.send(Kind.HELLO, hello.SerializeToString())
        answer(stream, Kind.WELCOME)
        return stream

    def wide(self, count: int) -> Stream:
        reply = self.ticket()
        first = self.greet(reply, streams=count)
        first.join([self.greet(reply, strand=strand) for strand in range(1, count)])
        return first


@pytest.fixture
def worker(cluster: Callable[..., Any], dial: Callable[..., grpc.Channel]) -> Iterator[WideWorker]:
    joined = WideWorker(dial(cluster(1).servers))
    yield joined
    for stream in joined.streams:
        stream.close()


def push_pulled(worker: WideWorker, stream: Stream, clock: int) -> set[float]:
    """The parameters that answer a push_pull of ones."""
    stream.send(Kind.CALL, worker.call(bulk_pb2.BULK_METHOD_PUSH_PULL, clock))
    (frame,) = worker.frames(clock, [[1.0] * ELEMENTS])
    payload = frame.payload
    frame.ClearField("payload")
    stream.send(Kind.FRAME, frame.SerializeToString(), payload)
    kind, _, nbytes = stream.receive()
    assert (kind, nbytes) == (Kind.ANSWER, 4 * ELEMENTS)
    values = np.empty(ELEMENTS, np.float32)
    stream.read_into(values.data.cast("B"))
    assert bulk_pb2.BulkReply.FromString(answer(stream, Kind.REPLY)).push.blocks_counted == 1
    return set(values.tolist())


@pytest.mark.parametrize("count", [1, 2, STREAMS_MAX])
def test_blocks_travel_in_parts_both_ways(worker: WideWorker, count: int) -> None:
    """As over one socket, which is a connection of one."""
    stream = worker.wide(count)
    assert push_pulled(worker, stream, 0) == {-1.0}
    assert push_pulled(worker, stream, 1) == {-2.0}


def test_a_new_connection_takes_the_place_of_one_of_several_sockets(worker: WideWorker) -> None:
    """All of the old one's sockets end; the rank has one connection, of any number of them."""
    old = worker.wide(3)
    assert push_pulled(worker, old, 0) == {-1.0}
    new = worker.wide(2)
    for stream in [old, *worker.streams[1:3]]:
        with pytest.raises(Disconnected):
            stream._receive_into([memoryview(bytearray(1))], 0)
    assert push_pulled(worker, new, 1) == {-2.0}


def test_a_refused_block_is_read_to_its_end(worker: WideWorker) -> None:
    """Its parts, too: the next call begins where it should."""
    stream = worker.wide(3)
    for payload in (np.ones(ELEMENTS + 1, np.float32), np.ones(8 << 20, np.float32)):  # by the state, and by its size alone
        stream.send(Kind.CALL, worker.call(bulk_pb2.BULK_METHOD_PUSH_PULL, 0))
        head = data_pb2.PushFrame(push=worker.header(), block=0, last=True)
        stream.send(Kind.FRAME, head.SerializeToString(), payload)
        with pytest.raises(PsdError, match=r"payload|bytes"):
            answer(stream, Kind.REPLY)
    assert push_pulled(worker, stream, 0) == {-1.0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"streams": STREAMS_MAX + 1}, "streams: expected 1 to 32, got 33"),
        ({"streams": 2, "local": True}, "streams: expected 1 over a local socket, got 2"),
        ({"strand": 1}, "ticket: of no connection"),
        ({"strand": 1, "ticket": b""}, "ticket: of no connection"),
    ],
)
def test_a_wrong_greeting_is_refused(worker: WideWorker, fields: dict[str, Any], message: str) -> None:
    """By the field, before anything else is read."""
    with pytest.raises(PsdError, match=message):
        worker.greet(worker.ticket(), **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strand": 3}, "strand: expected 1 to 2, got 3"),
        ({"strand": 1}, "strand: 1 is there already"),
        ({"strand": 2, "ticket": bytes(32)}, "ticket: of no connection"),
        ({"strand": 2, "local": True}, "ticket: of no connection"),
        ({"streams": 3}, "ticket: unknown to this shard, already used, or too old"),
    ],
)
def test_a_wrong_further_socket_is_refused_and_the_right_one_welcomed(
    worker: WideWorker, fields: dict[str, Any], message: str
) -> None:
    """Nothing is lost by it: the connection still waits for the one that lacks."""
    reply = worker.ticket()
    first = worker.greet(reply, streams=3)
    joined = [worker.greet(reply, strand=1)]
    with pytest.raises(PsdError, match=message):
        worker.greet(reply, **fields)
    first.join([*joined, worker.greet(reply, strand=2)])
    assert push_pulled(worker, first, 0) == {-1.0}


def test_a_connection_whose_other_sockets_do_not_come_in_time_is_closed_with_those_that_have() -> None:
    """Else a client could leave sockets behind."""
    bundle = Bundle(0, 3)
    here, there = socket.socketpair()
    stream = Stream(here, 1 << 10)
    bundle.put(2, stream)

    with pytest.raises(Disconnected, match="1 of 3 further sockets have come"):
        bundle.take(0.01)

    assert there.recv(1) == b""
    there.close()
    with pytest.raises(Disconnected):
        bundle.put(1, stream)
    with pytest.raises(InvalidRequest):
        bundle.put(4, stream)


def test_sockets_are_taken_in_the_order_of_their_numbers() -> None:
    """Both sides have to agree which part travels where, whichever comes first."""
    bundle = Bundle(0, 3)
    streams = [object(), object(), object()]
    for strand in (3, 1, 2):
        bundle.put(strand, streams[strand - 1])  # type: ignore[arg-type]  # which they are does not matter here
    assert bundle.take(100) == streams
