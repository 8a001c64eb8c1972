"""Workers of psd whose pushes are made in C: a load that no interpreter limits, for one shard.

Each worker joins, and makes a few push_pulls by psd_client, over the bulk lane; the messages of the last one that was no step
are kept. Then, when told {"pushes": n}, they are sent n times on all connections at once, each time with the next clock, by a
loop in _calls.c; or as steps, where the shard offers these. {"verify": true} says what is wrong with the parameters: each push
must have counted, once.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import work
from turns import Turns

import psd_client
from psd.contract.wire import PREFIX, Kind, Stream
from psd.v1 import bulk_pb2, data_pb2

ORDINARY_STEPS = 4
"""Push_pulls before: the first ones carry more than those that follow."""
SAID_BYTES = 400
STEP_HEAD = struct.Struct("<QQQQdII")
DONE_BYTES = PREFIX.size + 16


class Message(NamedTuple):
    """A message that a worker has sent."""

    kind: Kind
    head: bytes
    payload: bytes


class Recorder:
    """Keeps what is sent on the process's streams, and the head of the last REPLY, while in a `with`."""

    def __init__(self) -> None:
        self.sent: dict[Stream, list[Message]] = {}
        self.replies: dict[Stream, bytes] = {}
        self._send, self._receive = Stream.send, Stream.receive

    def __enter__(self) -> Recorder:
        sent, send = self.sent, self._send

        def recorded(stream: Stream, kind: Kind, head: bytes = b"", *payload: Any, more: bool = False) -> None:
            whole = b"".join(bytes(memoryview(piece).cast("B")) for piece in payload)
            sent.setdefault(stream, []).append(Message(kind, head, whole))
            send(stream, kind, head, *payload, more=more)

        def received(stream: Stream) -> tuple[Kind, bytes, int]:
            kind, head, payload_bytes = self._receive(stream)
            if kind is Kind.REPLY:
                self.replies[stream] = head
            return kind, head, payload_bytes

        Stream.send, Stream.receive = recorded, received  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Stream.send, Stream.receive = self._send, self._receive  # type: ignore[method-assign]


class Connection:
    """One worker's connection, and its next push.

    Args:
        messages: of its last push that was no step. reply: the answer to that. clock: of the next push.
    """

    def __init__(self, stream: Stream, messages: list[Message], reply: bytes, clock: int) -> None:
        self._stream = stream
        self._fd = stream.fileno()
        self._messages = messages
        self._frame = data_pb2.PushFrame.FromString(messages[1].head)
        self._offer = _offer_in(reply)
        self.rank = self._frame.push.caller.rank
        self.clock = clock

    def made(self, pushes: int) -> tuple[bytes, Any]:
        """The messages of so many pushes, and where each begins; of none, if they are to be steps."""
        call, _, *others = self._messages
        parts, starts = [], [0]
        for _ in range(0 if self._offer is not None else pushes):
            self._frame.push.clock = self.clock
            self.clock += 1
            frame = self._messages[1]._replace(head=self._frame.SerializeToString())
            for kind, head, payload in (call, frame, *others):
                parts.append(PREFIX.pack(kind, len(head), len(payload)) + head + payload)
            starts.append(starts[-1] + sum(map(len, parts[-len(self._messages) :])))
        return b"".join(parts), np.array(starts, np.int64)

    def replay(self, library: ctypes.CDLL, made: tuple[bytes, Any], pushes: int) -> None:
        """Send them, each after the answer to the one before."""
        messages, starts = made
        until = self.clock + pushes
        while self._offer is not None and self.clock < until:
            self._make_steps(library, until - self.clock)
            if self.clock < until:
                self._push()
        said = ctypes.create_string_buffer(SAID_BYTES)
        count, where = ctypes.c_long(len(starts) - 1), ctypes.c_void_p(starts.ctypes.data)
        failed = library.replay_calls(self._fd, messages, where, count, said, ctypes.c_long(SAID_BYTES))
        if failed:
            raise OSError(failed, f"rank {self.rank}: {os.strerror(failed)} {said.raw.rstrip(bytes(1))!r}")

    def _make_steps(self, library: ctypes.CDLL, pushes: int) -> None:
        """Make so many steps, or fewer, if the shard does not take one."""
        offer, push = self._offer, self._frame.push
        assert offer is not None
        versions = list(push.versions) or [0] * len(offer.blocks)
        numbers = [value for group in push.scalars for value in group.values]
        flags = 1 if push.versions else 0
        head = STEP_HEAD.pack(offer.epoch, push.caller.session, self.clock, push.since, push.weight, flags, 0)
        head += struct.pack(f"<{len(versions)}Q{len(numbers)}d", *versions, *numbers)
        front = PREFIX.pack(Kind.STEP, offer.head_bytes, offer.gradient_bytes) + head.ljust(offer.head_bytes, b"\0")
        payload = b"" if offer.in_memory else b"".join(message.payload for message in self._messages[1:])
        message = ctypes.create_string_buffer(front + payload.ljust(offer.gradient_bytes, b"\0"))
        answer = ctypes.create_string_buffer(DONE_BYTES + 8 * len(versions) + offer.parameter_bytes)
        failed = ctypes.c_int()
        sizes = ctypes.c_long(len(message) - 1), answer, ctypes.c_long(len(answer)), ctypes.c_long(len(versions))
        self.clock += library.make_steps(self._fd, message, *sizes, ctypes.c_long(pushes), ctypes.byref(failed))
        if failed.value:
            raise OSError(failed.value, f"rank {self.rank}: {os.strerror(failed.value)}")

    def _push(self) -> None:
        """Push the long way, until steps are offered again."""
        call, _, *others = self._messages
        self._frame.push.clock = self.clock
        for kind, head, payload in (call, self._messages[1]._replace(head=self._frame.SerializeToString()), *others):
            self._stream.send(kind, head, payload)
        while True:
            kind, head, payload_bytes = self._stream.receive()
            self._stream.skip(payload_bytes)
            if kind is Kind.REPLY:
                break
            assert kind in (Kind.ANSWER, Kind.ALIVE), kind
        self.clock += 1
        if (offer := _offer_in(head)) is not None:
            self._offer = offer
        else:
            self._push()


def _offer_in(reply: bytes) -> bulk_pb2.StepOffer | None:
    """The offer of steps in a reply; None if there is none."""
    read = bulk_pb2.BulkReply.FromString(reply)
    return read.step if read.HasField("step") else None


def main() -> None:
    """Join, and push when told."""
    turns = Turns()
    told = turns.arguments
    workers = told["connections"]
    size = work.size_of(told["model"])
    library = ctypes.CDLL(told["library"])

    def joined(rank: int) -> psd_client.ParameterServer:
        ps = psd_client.connect(told["servers"], rank, workers, transport=told["transport"], wait_timeout=120)
        ps.declare({"t": np.zeros(size, np.float32)}, psd_client.SGD(lr=work.LR), consistency=told["consistency"], reduce="sum")
        return ps

    def push(ps: psd_client.ParameterServer) -> None:
        for _ in range(ORDINARY_STEPS):
            ps.push_pull({"t": work.gradient(ps.rank, size)})

    with ThreadPoolExecutor(workers) as pool:
        servers = list(pool.map(joined, range(workers)))
        with Recorder() as recorder:
            list(pool.map(push, servers))
        connections = []
        for stream, messages in recorder.sent.items():
            last = max(index for index, message in enumerate(messages) if message.kind is Kind.CALL)
            assert bulk_pb2.BulkCall.FromString(messages[last].head).method == bulk_pb2.BULK_METHOD_PUSH_PULL
            rank = data_pb2.PushFrame.FromString(messages[last + 1].head).push.caller.rank
            connections.append(Connection(stream, messages[last:], recorder.replies[stream], servers[rank].clock))
        connections.sort(key=lambda connection: connection.rank)
        assert [connection.rank for connection in connections] == list(range(workers))

        def answered(request: dict[str, Any]) -> dict[str, Any]:
            if "verify" in request:
                found = servers[0].pull()["t"]
                return {"wrong": work.difference(found, [connection.clock for connection in connections])}
            made = [connection.made(request["pushes"]) for connection in connections]
            begun = time.monotonic()
            list(pool.map(lambda connection, its: connection.replay(library, its, request["pushes"]), connections, made))
            return {"seconds": time.monotonic() - begun}

        turns.answer(answered)
        os._exit(0)  # their clients know nothing of these pushes, and would say so


if __name__ == "__main__":
    main()
