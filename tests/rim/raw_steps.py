"""A worker that makes steps, of a few lines: raw sockets and structures, as csrc/step_frames.h has them. No psd_client."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import grpc
import numpy as np
from numpy.typing import NDArray
from raw_bulk import answer, open_stream, send
from raw_client import SGD, RawWorker, spec

from psd.contract.errors import error_from
from psd.contract.wire import Kind, Stream
from psd.v1 import bulk_pb2, control_pb2, data_pb2, job_pb2

HEAD = struct.Struct("<QQQQdII")
DONE = struct.Struct("<QII")
AGAIN = struct.Struct("<II")
HAS_VERSIONS, HAS_PRESENT = 1, 2
REVOKED, CASE, LONG_WAIT = 1, 2, 3
PLACES = 2


class Done(NamedTuple):
    """The answer to a push, by whatever way it came."""

    clock: int
    counted: int
    duplicate: int
    versions: list[int]
    parameters: list[list[float]]


class Again(NamedTuple):
    """The answer to a step that was not taken."""

    reason: int


def eights(nbytes: int) -> int:
    return (nbytes + 7) // 8 * 8


class StepWorker(RawWorker):
    """A worker of a job of small blocks, of one group and one tensor each.

    Args:
        lane: "tcp"; "local", a local socket; or "memory", one with memory attached.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        rank: int = 0,
        world_size: int = 1,
        *,
        lane: str = "tcp",
        blocks: int = 2,
        size: int = 3,
        job: job_pb2.JobSpec | None = None,
        **how: Any,
    ) -> None:
        super().__init__(channel, rank, world_size)
        self.job = job or spec(world_size, blocks=blocks, size=size, **how)
        self.declare(self.job)
        self.blocks, self.size, self.lane = len(self.job.tensors), self.job.tensors[0].shape[0], lane
        self.offer: bulk_pb2.StepOffer | None = None
        self.memory = -1
        self.stream = self.connect()

    def connect(self) -> Stream:
        reply = self.control.OpenBulk(control_pb2.OpenBulkRequest(caller=self.caller), timeout=100)
        stream = open_stream(reply, local=self.lane != "tcp")
        stream.send(Kind.HELLO, bulk_pb2.BulkHello(ticket=reply.ticket).SerializeToString())
        answer(stream, Kind.WELCOME)
        if self.lane == "memory":
            self._attach(stream)
        return stream

    def _attach(self, stream: Stream) -> None:
        self.apart = (self.size * 4 + 63) // 64 * 64
        starts = [64 + self.apart * i for i in range(self.blocks * (1 + PLACES))]
        nbytes = starts[-1] + self.apart
        self.starts = starts
        self.memory = os.memfd_create("psd-test", os.MFD_ALLOW_SEALING)
        os.truncate(self.memory, nbytes)
        fcntl.fcntl(self.memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        attach = bulk_pb2.BulkAttach(
            layout_digest=self.digest,
            size=nbytes,
            gradient_starts=starts[: self.blocks],
            parameter_starts=starts[self.blocks :],
        )
        stream.send(Kind.ATTACH, attach.SerializeToString())
        answer(stream, Kind.SEND)
        socket.send_fds(stream.socket, [b"\0"], [self.memory])
        answer(stream, Kind.READY)

    def close(self) -> None:
        self.stream.close()
        if self.memory >= 0:
            os.close(self.memory)

    def _gradients(self, values: Sequence[float]) -> list[NDArray[np.float32]]:
        return [np.full(self.size, value, np.float32) for value in values]

    def _remember(self, gradients: Sequence[NDArray[np.float32]]) -> None:
        for at, gradient in zip(self.starts, gradients, strict=False):
            os.pwrite(self.memory, gradient.tobytes(), at)

    def _parameters(self, place: int) -> list[list[float]]:
        starts = self.starts[self.blocks * (1 + place) :][: self.blocks]
        return [np.frombuffer(os.pread(self.memory, 4 * self.size, at), np.float32).tolist() for at in starts]

    # -- the long way --------------------------------------------------------------------------------------------------

    def begin_call(self, values: Sequence[float], clock: int, *, wants: bool = True, place: int = 0, **named: Any) -> None:
        """Send a push_pull."""
        in_memory = self.lane == "memory"
        frames = self.frames(clock, self._gradients(values), **{k: v for k, v in named.items() if k in ("weight", "scalars")})
        header = frames[0].push
        for name in set(named) - {"weight", "scalars"}:
            value = named[name]
            if isinstance(value, (list, tuple)):
                getattr(header, name).extend(value)
            else:
                setattr(header, name, value)
        call = bulk_pb2.BulkCall(
            method=bulk_pb2.BULK_METHOD_PUSH_PULL, timeout_s=30, wants_steps=wants, into_memory=in_memory, place=place
        )
        self.stream.send(Kind.CALL, call.SerializeToString())
        if in_memory:
            self._remember(self._gradients(values))
            frames = [data_pb2.PushFrame(push=header, in_memory=range(self.blocks), last=True)]
        send(self.stream, frames)
        self.place = place

    def end_call(self) -> Done:
        """Receive its answer, and the offer."""
        versions, parameters = [0] * self.blocks, [[0.0]] * self.blocks
        while True:
            kind, head, nbytes = self.stream.receive()
            if kind is Kind.ANSWER:
                frame, numbers = data_pb2.PullFrame.FromString(head), np.empty(self.size, np.float32)
                self.stream.read_into(numbers.data.cast("B"))
                versions[frame.block], parameters[frame.block] = frame.version, numbers.tolist()
                continue
            assert nbytes == 0
            if kind is Kind.ALIVE:
                continue
            if kind is Kind.ERROR:
                raise _error(head)
            assert kind is Kind.REPLY
            reply = bulk_pb2.BulkReply.FromString(head)
            self.offer = reply.step if reply.HasField("step") else None
            self.reply = reply.push
            if self.lane == "memory":
                parameters = self._parameters(self.place)
                versions = [dict(zip(reply.blocks, reply.versions, strict=True))[i] for i in range(self.blocks)]
            push = reply.push
            return Done(push.clock, push.blocks_counted, push.blocks_duplicate, versions, parameters)

    def push_pull(self, values: Sequence[float], clock: int, **named: Any) -> Done:
        self.begin_call(values, clock, **named)
        return self.end_call()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def begin_step(
        self,
        values: Sequence[float],
        clock: int,
        *,
        scalars: Sequence[float] = SGD,
        weight: float = 1.0,
        versions: Sequence[int] = (),
        present: Sequence[int] = (),
        place: int = 0,
        since: int = 0,
        **head: int,
    ) -> None:
        """Send a step. head: epoch, session, flags."""
        offer = self.offer
        assert offer is not None
        flags = head.get("flags", HAS_VERSIONS * bool(versions) | HAS_PRESENT * bool(present))
        front = HEAD.pack(head.get("epoch", offer.epoch), head.get("session", self.session), clock, since, weight, flags, place)
        front += struct.pack(f"<{self.blocks}Q", *(versions or [0] * self.blocks))
        front += struct.pack(f"<{offer.scalars}d", *(list(scalars) * self.blocks))
        front = (front + bytes(present)).ljust(offer.head_bytes, b"\0")
        payload = b""
        gradients = self._gradients(values)
        if self.lane == "memory":
            self._remember(gradients)
        else:
            payload = b"".join([each.tobytes().ljust(eights(each.nbytes), b"\0") for each in gradients])
        assert (len(front), len(payload)) == (offer.head_bytes, offer.gradient_bytes)
        self.stream.send(Kind.STEP, front, payload)
        self.place = place

    def end_step(self) -> Done | Again:
        """Receive its answer."""
        while (found := self.stream.receive())[0] is Kind.ALIVE:
            pass
        kind, head, nbytes = found
        payload = bytearray(nbytes)
        self.stream.read_into(memoryview(payload))
        if kind is Kind.ERROR:
            raise _error(head)
        if kind is Kind.AGAIN:
            assert (len(head), nbytes) == (AGAIN.size, 0)
            self.offer = None
            return Again(AGAIN.unpack(head)[0])
        assert kind is Kind.DONE
        assert self.offer is not None
        clock, counted, duplicate = DONE.unpack_from(head)
        versions = list(struct.unpack_from(f"<{self.blocks}Q", head, DONE.size))
        assert (len(head), nbytes) == (DONE.size + 8 * self.blocks, self.offer.parameter_bytes)
        if self.lane == "memory":
            return Done(clock, counted, duplicate, versions, self._parameters(self.place))
        apart = eights(4 * self.size)
        parameters = [np.frombuffer(payload, np.float32, self.size, apart * i).tolist() for i in range(self.blocks)]
        return Done(clock, counted, duplicate, versions, parameters)

    def step(self, values: Sequence[float], clock: int, **named: Any) -> Done | Again:
        self.begin_step(values, clock, **named)
        return self.end_step()

    def train(self, values: Sequence[float], clock: int, **named: Any) -> Done:
        """A step if that is offered and taken, else the long way, under the same name."""
        if self.offer is not None and isinstance(found := self.step(values, clock, **named), Done):
            return found
        return self.push_pull(values, clock, **{k: v for k, v in named.items() if k in ("weight", "scalars")})


def _error(head: bytes) -> Exception:
    message = bulk_pb2.BulkError.FromString(head)
    return error_from(message.reason, message.message, {})
