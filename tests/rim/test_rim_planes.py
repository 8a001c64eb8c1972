"""The planes of an arena at a shard's door: who is sent them, what can be done with them, and how long a version stays."""

from __future__ import annotations

import mmap
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from raw_bulk import BulkWorker, answer, sealed_memory, send
from raw_client import spec

from psd.contract.errors import PsdError
from psd.contract.wire import Disconnected, Kind, Stream
from psd.v1 import bulk_pb2, data_pb2

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is shared on Linux")

LENGTH = 200_000  # one block
SIZE = 4 << 20
STARTS = {"gradient_starts": (64,), "parameter_starts": (2 << 20,), "size": SIZE}
PUSH, PULL, PUSH_PULL = bulk_pb2.BULK_METHOD_PUSH, bulk_pb2.BULK_METHOD_PULL, bulk_pb2.BULK_METHOD_PUSH_PULL


class LargeWorker(BulkWorker):
    """A worker of a job of one large block."""

    def __init__(self, channel: grpc.Channel, mode: str = "sync") -> None:
        super().__init__(channel, job=spec(1, size=LENGTH, mode=mode))

    def ready(self, stream: Stream, fd: int, **fields: Any) -> bulk_pb2.BulkReady:
        return super().ready(stream, fd, **STARTS | {"wants_planes": True} | fields)

    def planes(self, stream: Stream) -> int:
        """The descriptor that SEND is answered by."""
        stream.send(Kind.SEND)
        _, (descriptor,), _, _ = socket.recv_fds(stream.socket, 1, 1)
        return descriptor

    def ask(self, stream: Stream, method: int, clock: int = 0, **fields: Any) -> bulk_pb2.BulkReply:
        """Make a call whose gradient, if it has one, is in memory."""
        stream.send(Kind.CALL, self.call(method, clock, **fields))
        if method != PULL:
            send(stream, [data_pb2.PushFrame(push=self.header(clock), in_memory=[0], last=True)])
        return bulk_pb2.BulkReply.FromString(answer(stream, Kind.REPLY))


@pytest.fixture
def memory() -> Iterator[int]:
    """A sealed memory file, with a gradient of minus ones."""
    fd = sealed_memory(SIZE)
    os.pwrite(fd, np.full(LENGTH, -1, np.float32).tobytes(), 64)
    yield fd
    os.close(fd)


@pytest.fixture
def join(cluster: Callable[..., Any], dial: Callable[..., grpc.Channel]) -> Iterator[Callable[..., LargeWorker]]:
    """join(mode) -> the worker of a job."""
    joined: list[LargeWorker] = []

    def enter(mode: str = "sync") -> LargeWorker:
        joined.append(LargeWorker(dial(cluster(1).servers), mode))
        return joined[-1]

    yield enter
    for worker in joined:
        for stream in worker.streams:
            stream.close()


def values(ready: bulk_pb2.BulkReady, planes: mmap.mmap, in_plane: int) -> Any:
    """What lies in a plane now."""
    (start,) = ready.plane_starts
    at = (in_plane - 1) * ready.plane_bytes + start - 1
    return np.frombuffer(planes[at : at + 4 * LENGTH], np.float32)


def in_memory(fd: int) -> set[float]:
    return set(np.frombuffer(os.pread(fd, 4 * LENGTH, 2 << 20), np.float32).tolist())


def test_a_lent_version_stays_until_the_next_call_that_asks_for_planes(join: Callable[..., LargeWorker], memory: int) -> None:
    """Pushes of its own, too, leave it alone."""
    worker = join("async")
    stream = worker.connect(local=True)
    ready = worker.ready(stream, memory)
    descriptor = worker.planes(stream)
    planes = mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    os.close(descriptor)

    assert len(planes) == ready.planes * ready.plane_bytes
    reply = worker.ask(stream, PUSH_PULL, into_memory=True, by_plane=True)
    (lent,) = reply.in_planes
    assert lent
    assert (reply.blocks, reply.versions) == ([0], [1])
    for clock in range(1, 8):
        worker.ask(stream, PUSH, clock)
        assert (values(ready, planes, lent) == 1).all()
    reply = worker.ask(stream, PULL, 8, into_memory=True, by_plane=True)
    assert (values(ready, planes, reply.in_planes[0]) == 8).all()
    assert in_memory(memory) == {0.0}
    for clock in range(8, 12):
        reply = worker.ask(stream, PUSH_PULL, clock, into_memory=True, by_plane=True)
        assert (values(ready, planes, reply.in_planes[0]) == clock + 1).all()


def test_announced_blocks_say_their_plane(join: Callable[..., LargeWorker], memory: int) -> None:
    """So that a worker can copy one while others are still being made."""
    worker = join()
    stream = worker.connect(local=True)
    worker.ready(stream, memory)
    stream.send(Kind.CALL, worker.call(PUSH_PULL, into_memory=True, by_plane=True, announce=True))
    send(stream, [data_pb2.PushFrame(push=worker.header(), in_memory=[0], last=True)])

    frame = data_pb2.PullFrame.FromString(answer(stream, Kind.ANSWER))
    assert frame.in_plane == bulk_pb2.BulkReply.FromString(answer(stream, Kind.REPLY)).in_planes[0] > 0


def test_the_descriptor_shows_parameters_alone_and_writes_nothing(join: Callable[..., LargeWorker], memory: int) -> None:
    """Not by a map, a write or a truncation."""
    worker = join()
    stream = worker.connect(local=True)
    worker.ready(stream, memory)
    worker.ask(stream, PUSH_PULL, into_memory=True, by_plane=True)
    descriptor = worker.planes(stream)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(OSError, match=r"Invalid argument|Bad file descriptor"):
            os.ftruncate(descriptor, 0)
        held = np.frombuffer(os.pread(descriptor, 1 << 30, 0), np.float32)
        assert set(np.unique(held).tolist()) == {0.0, 1.0}
    finally:
        os.close(descriptor)


def test_a_worker_that_does_not_ask_for_planes_gets_copies(join: Callable[..., LargeWorker], memory: int) -> None:
    """As those of earlier releases do; others that have mapped them, too, if a call does not ask."""
    for wants in (False, True):
        worker = join()
        stream = worker.connect(local=True)
        ready = worker.ready(stream, memory, wants_planes=wants)
        assert bool(ready.planes) == wants
        reply = worker.ask(stream, PUSH_PULL, into_memory=True)
        assert list(reply.in_planes) == []
        assert in_memory(memory) == {1.0}
        os.pwrite(memory, bytes(4 * LENGTH), 2 << 20)


def test_a_call_by_plane_where_none_were_offered_is_answered_by_a_copy(join: Callable[..., LargeWorker], memory: int) -> None:
    """And the worker is told that it could attach its memory again."""
    worker = join()
    stream = worker.connect(local=True)
    worker.ready(stream, memory, wants_planes=False)
    reply = worker.ask(stream, PUSH_PULL, into_memory=True, by_plane=True)
    assert (reply.attach_again, sum(reply.in_planes)) == (True, 0)
    assert in_memory(memory) == {1.0}

    ready = worker.ready(stream, memory)
    assert ready.planes
    assert worker.ask(stream, PUSH_PULL, 1, into_memory=True, by_plane=True).in_planes[0]


def test_without_attached_memory_blocks_travel_whatever_a_call_asks(join: Callable[..., LargeWorker]) -> None:
    """Over TCP, and over a local socket."""
    worker = join()
    for local in (False, True):
        stream = worker.connect(local=local)
        stream.send(Kind.CALL, worker.call(PULL, by_plane=True))
        kind, head, payload_bytes = stream.receive()
        assert (kind, payload_bytes, data_pb2.PullFrame.FromString(head).in_plane) == (Kind.ANSWER, 4 * LENGTH, 0)
        stream.skip(payload_bytes)
        answer(stream, Kind.REPLY)


def test_send_is_refused_where_no_planes_were_offered(join: Callable[..., LargeWorker], memory: int) -> None:
    """Before memory is attached, without asking for planes, and over TCP."""
    worker = join()
    for local, wants in ((False, None), (True, None), (True, False)):
        stream = worker.connect(local=local)
        if wants is not None:
            worker.ready(stream, memory, wants_planes=wants)
        stream.send(Kind.SEND)
        with pytest.raises(PsdError, match="no planes were offered") as caught:
            answer(stream, Kind.READY)
        assert caught.value.reason == "InvalidRequest"
        with pytest.raises(Disconnected):
            stream.receive()
