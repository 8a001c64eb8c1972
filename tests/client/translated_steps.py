"""A shard that takes steps before it can: what it receives and sends is translated, at its end of each connection."""

from __future__ import annotations

import random
import struct
from typing import Any

from psd.contract.wire import Kind, Stream
from psd.v1 import bulk_pb2, data_pb2

HEAD = struct.Struct("<QQQQdII")
DONE = struct.Struct("<QII")


def padded(n: int) -> int:
    return -(-n // 8) * 8


class TranslatedStream(Stream):
    layout: Any = None
    again = 0.0  # share of steps that are not taken
    late_again = 0.0  # of those that are taken, but answered AGAIN
    rng = random.Random(1)
    steps = 0
    offers = True
    dies_on_done: Any = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._queue: list[tuple[Kind, bytes, bytes]] = []
        self._payload = b""
        self._call: Any = None
        self._header: Any = None
        self._blocks: list[int] = []
        self._translating = False
        self._offered = 0
        self._versions: dict[int, int] = {}
        self._values: dict[int, bytes] = {}

    def receive(self) -> tuple[Kind, bytes, int]:
        if self._queue:
            kind, head, self._payload = self._queue.pop(0)
            return kind, head, len(self._payload)
        while True:
            kind, head, nbytes = super().receive()
            if kind is Kind.STEP:
                payload = bytearray(nbytes)
                super().read_into(memoryview(payload))
                if self._step(head, bytes(payload)):
                    return self.receive()
                continue
            if kind is Kind.CALL:
                call = bulk_pb2.BulkCall.FromString(head)
                self._call, self._blocks, self._offered = (call if call.wants_steps else None), [], 0
            elif kind is Kind.FRAME and self._call is not None:
                frame = data_pb2.PushFrame.FromString(head)
                if frame.HasField("push"):
                    self._header = frame.push
                self._blocks += list(frame.in_memory) or ([frame.block] if frame.HasField("block") else [])
            return kind, head, nbytes

    def read_into(self, *targets: memoryview) -> None:
        if self._payload:
            (target,) = targets
            target[:] = self._payload
            self._payload = b""
            return
        super().read_into(*targets)

    def skip(self, count: int) -> None:
        if self._payload:
            assert count == len(self._payload)
            self._payload = b""
            return
        super().skip(count)

    def _step(self, head: bytes, payload: bytes) -> bool:
        cls = type(self)
        cls.steps += 1
        epoch, session, clock, since, weight, flags, _ = HEAD.unpack_from(head)
        if epoch != self._offered or cls.rng.random() < cls.again:
            self._offered = 0
            super().send(Kind.AGAIN, struct.pack("<II", 1, 0))
            return False
        header, at = data_pb2.PushHeader(), HEAD.size
        header.CopyFrom(self._header)
        header.session, header.clock, header.since, header.weight = session, clock, since, weight
        del header.versions[:]
        del header.cuts[:]
        header.ClearField("first_gradient")
        versions = struct.unpack_from(f"<{len(self._blocks)}Q", head, at)
        at += 8 * len(versions)
        if flags & 1:
            header.versions.extend(versions)
        for group in header.scalars:
            group.values[:] = struct.unpack_from(f"<{len(group.values)}d", head, at)
            at += 8 * len(group.values)
        call = bulk_pb2.BulkCall()
        call.CopyFrom(self._call)
        blocks = [self.layout.blocks[index] for index in self._blocks]
        bits = []
        for block in blocks:
            count = (len(block.segment_tensors) + 7) // 8
            bits.append(head[at : at + count] if flags & 2 else b"")
            at += count
        if call.into_memory:
            frame = data_pb2.PushFrame(push=header, in_memory=self._blocks, last=True)
            if flags & 2:
                frame.in_memory_present.extend(bits)
            self._queue.append((Kind.FRAME, frame.SerializeToString(), b""))
        else:
            offset = 0
            for block, mask in zip(blocks, bits, strict=True):
                nbytes = block.gradient_nbytes
                values = payload[offset : offset + nbytes]
                offset += padded(nbytes)
                if mask and not any(mask):
                    values = b""
                frame = data_pb2.PushFrame(block=block.index, present=mask, last=block is blocks[-1])
                if block is blocks[0]:
                    frame.push.CopyFrom(header)
                self._queue.append((Kind.FRAME, frame.SerializeToString(), values))
        self._queue.insert(0, (Kind.CALL, call.SerializeToString(), b""))
        self._translating, self._versions, self._values = True, {}, {}
        return True

    def send(self, kind: Kind, head: bytes = b"", *payload: Any, more: bool = False) -> None:
        if not self._translating:
            if kind is Kind.REPLY and self._call is not None and self.offers:
                head = self._offer(head)
            super().send(kind, head, *payload, more=more)
            return
        if kind is Kind.ANSWER:
            frame = data_pb2.PullFrame.FromString(head)
            self._versions[frame.block] = frame.version
            self._values[frame.block] = b"".join([bytes(memoryview(piece).cast("B")) for piece in payload])
            return
        if kind is Kind.ALIVE:
            return
        self._translating = False
        if kind is Kind.ERROR or type(self).rng.random() < type(self).late_again:
            self._offered = 0
            super().send(Kind.AGAIN, struct.pack("<II", 2, 0))
            return
        assert kind is Kind.REPLY, kind
        reply = bulk_pb2.BulkReply.FromString(head)
        self._versions |= dict(zip(reply.blocks, reply.versions, strict=True))
        told = reply.push
        if told.blocks_late or told.cuts or told.HasField("orders"):
            self._offered = 0
            super().send(Kind.AGAIN, struct.pack("<II", 2, 0))
            return
        done = DONE.pack(told.clock, told.blocks_counted, told.blocks_duplicate)
        done += struct.pack(f"<{len(self._blocks)}Q", *[self._versions[index] for index in self._blocks])
        values = (
            b""
            if self._call.into_memory
            else b"".join([self._values[index].ljust(padded(len(self._values[index])), b"\1") for index in self._blocks])
        )
        if type(self).dies_on_done is self:
            type(self).dies_on_done = None
            self.shut_down(2)
            return
        if random.random() < 0.3:
            super().send(Kind.ALIVE)
        super().send(Kind.DONE, done, values)

    def _offer(self, head: bytes) -> bytes:
        reply = bulk_pb2.BulkReply.FromString(head)
        header = self._header
        if reply.push.cuts or reply.push.HasField("orders") or reply.push.wants_buffers or header is None:
            return head
        shard = [self.layout.blocks[index] for index in self._blocks]
        masks = sum((len(block.segment_tensors) + 7) // 8 for block in shard)
        scalars = sum(len(group.values) for group in header.scalars)
        self._offered = type(self).rng.randrange(1, 1 << 60)
        in_memory = self._call.into_memory
        reply.step.CopyFrom(
            bulk_pb2.StepOffer(
                epoch=self._offered,
                blocks=self._blocks,
                scalars=scalars,
                in_memory=in_memory,
                head_bytes=HEAD.size + 8 * len(shard) + 8 * scalars + padded(masks),
                gradient_bytes=0 if in_memory else sum(padded(block.gradient_nbytes) for block in shard),
                parameter_bytes=0 if in_memory else sum(padded(block.nbytes) for block in shard),
            )
        )
        return reply.SerializeToString()
