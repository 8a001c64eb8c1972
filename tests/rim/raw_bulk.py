"""A worker on the bulk lane, of a few lines: raw sockets and messages. No psd_client."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any

import grpc
from raw_client import RawWorker, spec

from psd.contract.errors import error_from
from psd.contract.wire import Kind, Stream
from psd.v1 import bulk_pb2, control_pb2, data_pb2, job_pb2

ELEMENTS = 3
SIZE = 4096
STARTS = {"gradient_starts": (64, 128), "parameter_starts": (192, 256)}
BLOCKS = 2


def open_stream(reply: control_pb2.OpenBulkReply, *, local: bool) -> Stream:
    """A connection to the bulk lane, without its ticket yet."""
    if local:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"\0{reply.local_name}")
    else:
        sock = socket.create_connection(("127.0.0.1", reply.tcp_port))
    stream = Stream(sock, 1 << 20)
    stream.set_timeout(30)
    return stream


def sealed_memory(size: int) -> int:
    """The descriptor of a memory file that cannot shrink."""
    fd = os.memfd_create("psd-test", os.MFD_ALLOW_SEALING)
    os.truncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


class BulkWorker(RawWorker):
    """A worker of a declared job, with bulk connections.

    Args:
        job: which; else one of two blocks.
        payloads: initial values of its blocks; else zeros, in a job whose blocks are its groups.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        rank: int = 0,
        world_size: int = 1,
        *,
        job: job_pb2.JobSpec | None = None,
        payloads: Sequence[bytes] | None = None,
    ) -> None:
        super().__init__(channel, rank, world_size)
        self.declare(job or spec(world_size, blocks=BLOCKS, size=ELEMENTS), payloads=payloads)
        self.streams: list[Stream] = []

    def connect(self, *, local: bool = False, ticket: bytes | None = None, greet: bool = True) -> Stream:
        reply = self.control.OpenBulk(control_pb2.OpenBulkRequest(caller=self.caller), timeout=100)
        stream = open_stream(reply, local=local)
        self.streams.append(stream)
        if greet:
            hello = bulk_pb2.BulkHello(ticket=reply.ticket if ticket is None else ticket)
            stream.send(Kind.HELLO, hello.SerializeToString())
            answer(stream, Kind.WELCOME)
        return stream

    def call(self, method: int, clock: int = 0, **fields: Any) -> bytes:
        message = bulk_pb2.BulkCall(method=method, pull=self.pull_request(clock), timeout_s=30, **fields)
        return message.SerializeToString()

    def header(self, clock: int = 0) -> data_pb2.PushHeader:
        return self.frames(clock, [[]])[0].push

    def ready(self, stream: Stream, fd: int, **fields: Any) -> bulk_pb2.BulkReady:
        """Attach memory; the answer."""
        given = {"layout_digest": self.digest, "size": SIZE, **STARTS} | fields
        stream.send(Kind.ATTACH, bulk_pb2.BulkAttach(**given).SerializeToString())
        answer(stream, Kind.SEND)
        socket.send_fds(stream.socket, [b"\0"], [fd])
        return bulk_pb2.BulkReady.FromString(answer(stream, Kind.READY))

    def attach(self, stream: Stream, fd: int, **fields: Any) -> bytes:
        """Attach memory; the nonce that lies in it."""
        return self.ready(stream, fd, **fields).nonce


def error_in(head: bytes) -> Exception:
    """What an ERROR says."""
    message = bulk_pb2.BulkError.FromString(head)
    return error_from(message.reason, message.message, {})


def answer(stream: Stream, expected: Kind) -> bytes:
    """The head of the next message, which must be of that kind; an ERROR is raised."""
    kind, head, payload_bytes = stream.receive()
    stream.skip(payload_bytes)
    if kind is Kind.ERROR:
        raise error_in(head)
    assert kind is expected
    return head


def send(stream: Stream, frames: Iterable[Any]) -> None:
    """Frames as gRPC's stream would have them; of copies, payload and head apart."""
    for frame in frames:
        head = type(frame).FromString(frame.SerializeToString())
        head.ClearField("payload")
        stream.send(Kind.FRAME, head.SerializeToString(), frame.payload)


def push(stream: Stream, worker: BulkWorker, method: int, clock: int, values: Sequence[float]) -> None:
    """A call with both blocks in messages."""
    stream.send(Kind.CALL, worker.call(method, clock))
    send(stream, worker.frames(clock, [[value] * ELEMENTS for value in values]))
