"""A worker that makes steps, of a few lines: raw sockets and structures, as csrc/step_frames.h has them. No psd_client."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc
import numpy as np
from numpy.typing import NDArray
from raw_bulk import BulkWorker, error_in, sealed_memory, send
from raw_client import SGD, spec

from psd.contract.jobspec import JobSpec
from psd.contract.layout import Layout
from psd.contract.wire import PREFIX, Kind
from psd.v1 import bulk_pb2, data_pb2, job_pb2

HEAD = struct.Struct("<QQQQdII")
DONE = struct.Struct("<QII")
AGAIN = struct.Struct("<II")
HAS_VERSIONS, HAS_PRESENT = 1, 2
REVOKED, CASE, LONG_WAIT, CUT = 1, 2, 3, 4
PLACES = 2
LANES = ["tcp", "local", "memory"]


class Done(NamedTuple):
    """The answer to a push, by whatever way it came."""

    clock: int
    counted: int
    duplicate: int
    versions: list[int]
    parameters: list[list[float]]


Values = float | NDArray[Any]
"""A block's gradient, or the number that each of its elements is."""


class Again(NamedTuple):
    """The answer to a step that was not taken."""

    reason: int


def eights(nbytes: int) -> int:
    return (nbytes + 7) // 8 * 8


class StepWorker(BulkWorker):
    """A worker of a job of small blocks.

    Args:
        lane: "tcp"; "local", a local socket; or "memory", one with memory attached, which has extra_bytes behind the spaces.
        job: which; else one of `blocks` groups, of one tensor each.
    """

    extra_bytes = 0

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
        self.job = job = job or spec(world_size, blocks=blocks, size=size, **how)
        self.plans = Layout(JobSpec.from_message(job), 1).blocks
        super().__init__(channel, rank, world_size, job=job, payloads=[bytes(plan.nbytes) for plan in self.plans])
        self.scalars = [SGD for _ in job.groups]
        self.blocks, self.lane = len(self.plans), lane
        self.memory = -1
        self.open()

    def open(self) -> None:
        """Connect, anew if it has been: nothing is offered yet."""
        self.offer: bulk_pb2.StepOffer | None = None
        self.stream = self.connect(local=self.lane != "tcp")
        if self.lane == "memory":
            self._close_memory()
            self.apart = (max([plan.nbytes for plan in self.plans], default=0) + 63) // 64 * 64
            self.starts = [64 + self.apart * i for i in range(self.blocks * (1 + PLACES))]
            size = (self.starts or [64])[-1] + self.apart + self.extra_bytes
            self.memory = sealed_memory(size)
            starts = {"gradient_starts": self.starts[: self.blocks], "parameter_starts": self.starts[self.blocks :]}
            self.ready(self.stream, self.memory, size=size, **starts)

    def close(self) -> None:
        self.stream.close()
        self._close_memory()

    def _close_memory(self) -> None:
        if self.memory >= 0:
            os.close(self.memory)
            self.memory = -1

    def _gradients(self, values: Sequence[Values]) -> list[NDArray[Any]]:
        return [np.full(plan.length, value).astype(plan.gradient_dtype) for plan, value in zip(self.plans, values, strict=True)]

    def _remember(self, gradients: Sequence[NDArray[Any]]) -> None:
        for at, gradient in zip(self.starts, gradients, strict=False):
            os.pwrite(self.memory, gradient.tobytes(), at)

    def _parameters(self, place: int) -> list[list[float]]:
        starts = self.starts[self.blocks * (1 + place) :][: self.blocks]
        return [
            np.frombuffer(os.pread(self.memory, plan.nbytes, at), plan.dtype).tolist()
            for plan, at in zip(self.plans, starts, strict=True)
        ]

    # -- the long way --------------------------------------------------------------------------------------------------

    def begin_call(
        self,
        values: Sequence[Values],
        clock: int,
        *,
        wants: bool = True,
        place: int = 0,
        weight: float = 1.0,
        scalars: Sequence[float] = (),
        present: Sequence[bytes] = (),
        **more: Any,
    ) -> None:
        """Send a push_pull. more: further fields of the header."""
        in_memory = self.lane == "memory"
        header = data_pb2.PushHeader(
            caller=self.caller,
            clock=clock,
            weight=weight,
            layout_digest=self.digest,
            scalars=[data_pb2.GroupScalars(values=scalars or own) for own in self.scalars],
            **more,
        )
        call = bulk_pb2.BulkCall(
            method=bulk_pb2.BULK_METHOD_PUSH_PULL, timeout_s=30, wants_steps=wants, into_memory=in_memory, place=place
        )
        self.stream.send(Kind.CALL, call.SerializeToString())
        gradients, bits = self._gradients(values), list(present) or [b""] * self.blocks
        if in_memory:
            self._remember(gradients)
            frames = [data_pb2.PushFrame(in_memory=range(self.blocks), in_memory_present=present, last=True)]
        else:
            frames = [
                data_pb2.PushFrame(
                    block=i, present=bits[i], payload=gradients[i].tobytes() if any(bits[i]) or not bits[i] else b""
                )
                for i in range(self.blocks)
            ]
        frames[0].push.CopyFrom(header)
        frames[-1].last = True
        send(self.stream, frames)
        self.place = place

    def end_call(self) -> Done:
        """Receive its answer, and the offer."""
        versions, parameters = [0] * self.blocks, [[0.0]] * self.blocks
        while True:
            kind, head, nbytes = self.stream.receive()
            if kind is Kind.ANSWER:
                frame = data_pb2.PullFrame.FromString(head)
                numbers = np.empty(self.plans[frame.block].length, self.plans[frame.block].dtype)
                self.stream.read_into(numbers.data.cast("B"))
                versions[frame.block], parameters[frame.block] = frame.version, numbers.tolist()
                continue
            assert nbytes == 0
            if kind is Kind.ALIVE:
                continue
            if kind is Kind.ERROR:
                raise error_in(head)
            assert kind is Kind.REPLY
            reply = bulk_pb2.BulkReply.FromString(head)
            self.offer = reply.step if reply.HasField("step") else None
            self.reply = reply.push
            if self.lane == "memory":
                parameters = self._parameters(self.place)
                versions = [dict(zip(reply.blocks, reply.versions, strict=True))[i] for i in range(self.blocks)]
            push = reply.push
            return Done(push.clock, push.blocks_counted, push.blocks_duplicate, versions, parameters)

    def push_pull(self, values: Sequence[Values], clock: int, **named: Any) -> Done:
        self.begin_call(values, clock, **named)
        return self.end_call()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def packed(
        self,
        values: Sequence[Values],
        clock: int,
        *,
        scalars: Sequence[float] = (),
        weight: float = 1.0,
        versions: Sequence[int] = (),
        present: Sequence[bytes] = (),
        place: int = 0,
        since: int = 0,
        **head: int,
    ) -> bytes:
        """The bytes of a step, whose gradient is put into memory if the lane has it. head: epoch, session, flags."""
        offer = self.offer
        assert offer is not None
        flags = head.get("flags", HAS_VERSIONS * bool(versions) | HAS_PRESENT * bool(present))
        front = HEAD.pack(head.get("epoch", offer.epoch), head.get("session", self.session), clock, since, weight, flags, place)
        front += struct.pack(f"<{self.blocks}Q", *(versions or [0] * self.blocks))
        front += struct.pack(f"<{offer.scalars}d", *[each for own in self.scalars for each in scalars or own])
        front = (front + b"".join(present)).ljust(offer.head_bytes, b"\0")
        payload = b""
        gradients = self._gradients(values)
        if self.lane == "memory":
            self._remember(gradients)
        else:
            payload = b"".join([each.tobytes().ljust(eights(each.nbytes), b"\0") for each in gradients])
        assert (len(front), len(payload)) == (offer.head_bytes, offer.gradient_bytes)
        self.place = place
        return PREFIX.pack(Kind.STEP, len(front), len(payload)) + front + payload

    def begin_step(self, values: Sequence[Values], clock: int, **named: Any) -> None:
        """Send a step; named: as in `packed`."""
        self.stream.socket.sendall(self.packed(values, clock, **named))

    def receive_done(self) -> tuple[bytes, bytearray] | Again:
        """Receive the answer to a step: head and payload of DONE."""
        while (found := self.stream.receive())[0] is Kind.ALIVE:
            pass
        kind, head, nbytes = found
        payload = bytearray(nbytes)
        self.stream.read_into(memoryview(payload))
        if kind is Kind.ERROR:
            raise error_in(head)
        if kind is Kind.AGAIN:
            assert (len(head), nbytes) == (AGAIN.size, 0)
            self.offer = None
            return Again(AGAIN.unpack(head)[0])
        assert kind is Kind.DONE
        return head, payload

    def parameters_in(self, payload: bytearray, place: int) -> tuple[list[list[float]], int]:
        """The parameters that come with DONE, and where they end in its payload."""
        if self.lane == "memory":
            return self._parameters(place), 0
        parameters, at = [], 0
        for plan in self.plans:
            parameters.append(np.frombuffer(payload, plan.dtype, plan.length, at).tolist())
            at += eights(plan.nbytes)
        return parameters, at

    def end_step(self) -> Done | Again:
        """Receive its answer."""
        if isinstance(found := self.receive_done(), Again):
            return found
        head, payload = found
        assert self.offer is not None
        clock, counted, duplicate = DONE.unpack_from(head)
        versions = list(struct.unpack_from(f"<{self.blocks}Q", head, DONE.size))
        assert (len(head), len(payload)) == (DONE.size + 8 * self.blocks, self.offer.parameter_bytes)
        return Done(clock, counted, duplicate, versions, self.parameters_in(payload, self.place)[0])

    def is_answered(self, wait_s: float) -> bool:
        """True if an answer has come, within so long. That the shard lives is none."""
        sock = self.stream.socket
        if not select.select([sock], [], [], wait_s)[0]:
            return False
        front = sock.recv(PREFIX.size, socket.MSG_PEEK)
        if len(front) < PREFIX.size or PREFIX.unpack(front)[0] != Kind.ALIVE:
            return True
        sock.recv(PREFIX.size)
        return False

    def step(self, values: Sequence[Values], clock: int, **named: Any) -> Done | Again:
        self.begin_step(values, clock, **named)
        return self.end_step()

    def train(self, values: Sequence[Values], clock: int, **named: Any) -> Done:
        """A step if that is offered and taken, else the long way, under the same name."""
        if self.offer is not None and isinstance(found := self.step(values, clock, **named), Done):
            return found
        return self.push_pull(values, clock, **named)


def pause(seconds: float = 0.001) -> None:
    """Let others go on."""
    threading.Event().wait(seconds)


def armed(start: Callable[..., StepWorker], rank: int = 0, world_size: int = 1, **how: Any) -> StepWorker:
    """A worker that has made its first push, and may make steps; alone in its job."""
    worker = start(rank, world_size, **how)
    worker.push_pull([1] * worker.blocks, 0)
    assert worker.offer is not None
    return worker


def make_first_round(*workers: StepWorker) -> None:
    """A round of zeros, the long way."""
    for worker in workers:
        worker.begin_call((0, 0), 0)
    for worker in workers:
        worker.end_call()


def two(start: Callable[..., StepWorker], **how: Any) -> tuple[StepWorker, StepWorker]:
    """Two workers that are armed, of a job whose first round is over."""
    workers = start(0, 2, **how), start(1, 2, **how)
    make_first_round(*workers)
    for worker in workers:
        assert worker.offer is not None
    return workers


def has_counted(shard: Any, worker: StepWorker, clock: int) -> bool:
    """True once all blocks of a shard have a push."""
    return all(block.has(worker.caller.rank, worker.session, clock) for block in shard.job.blocks.values())


def wait_until_counted(start: Callable[..., StepWorker], worker: StepWorker, clock: int) -> None:
    while not has_counted(start.shard, worker, clock):  # type: ignore[attr-defined]
        pause()
