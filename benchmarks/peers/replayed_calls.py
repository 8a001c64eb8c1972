"""Workers of psd whose pushes are made in C: a load that no interpreter limits, for one shard.

Each worker joins, and makes a few push_pulls by psd_client, over the bulk lane; the messages of the last one are kept. Then,
when told {"pushes": n}, they are sent n times on all connections at once, each time with the next clock, by a loop in _calls.c.
{"verify": true} says what is wrong with the parameters: each push must have counted, once.
"""

from __future__ import annotations

import ctypes
import os
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


class Message(NamedTuple):
    """A message that a worker has sent."""

    kind: Kind
    head: bytes
    payload: bytes


class Recorder:
    """Keeps what is sent on the process's streams while in a `with`."""

    def __init__(self) -> None:
        self.sent: dict[Stream, list[Message]] = {}
        self._send = Stream.send

    def __enter__(self) -> Recorder:
        sent, send = self.sent, self._send

        def recorded(stream: Stream, kind: Kind, head: bytes = b"", *payload: Any, more: bool = False) -> None:
            whole = b"".join(bytes(memoryview(piece).cast("B")) for piece in payload)
            sent.setdefault(stream, []).append(Message(kind, head, whole))
            send(stream, kind, head, *payload, more=more)

        Stream.send = recorded  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Stream.send = self._send  # type: ignore[method-assign]


class Connection:
    """One worker's connection, and its next push."""

    def __init__(self, stream: Stream, messages: list[Message]) -> None:
        self._fd = stream.socket.fileno()
        self._messages = messages
        self._frame = data_pb2.PushFrame.FromString(messages[1].head)
        self.rank = self._frame.push.caller.rank
        self.clock = self._frame.push.clock + 1

    def made(self, pushes: int) -> tuple[bytes, Any]:
        """The messages of so many pushes, and where each begins."""
        call, _, *others = self._messages
        parts, starts = [], [0]
        for _ in range(pushes):
            self._frame.push.clock = self.clock
            self.clock += 1
            frame = self._messages[1]._replace(head=self._frame.SerializeToString())
            for kind, head, payload in (call, frame, *others):
                parts.append(PREFIX.pack(kind, len(head), len(payload)) + head + payload)
            starts.append(starts[-1] + sum(map(len, parts[-len(self._messages) :])))
        return b"".join(parts), np.array(starts, np.int64)

    def replay(self, library: ctypes.CDLL, made: tuple[bytes, Any]) -> None:
        """Send them, each after the answer to the one before."""
        messages, starts = made
        said = ctypes.create_string_buffer(SAID_BYTES)
        count, where = ctypes.c_long(len(starts) - 1), ctypes.c_void_p(starts.ctypes.data)
        failed = library.replay_calls(self._fd, messages, where, count, said, ctypes.c_long(SAID_BYTES))
        if failed:
            raise OSError(failed, f"rank {self.rank}: {os.strerror(failed)} {said.raw.rstrip(bytes(1))!r}")


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
            connections.append(Connection(stream, messages[last:]))
        connections.sort(key=lambda connection: connection.rank)
        assert [connection.rank for connection in connections] == list(range(workers))

        def answered(request: dict[str, Any]) -> dict[str, Any]:
            if "verify" in request:
                found = servers[0].pull()["t"]
                return {"wrong": work.difference(found, [connection.clock for connection in connections])}
            made = [connection.made(request["pushes"]) for connection in connections]
            begun = time.monotonic()
            list(pool.map(lambda connection, its: connection.replay(library, its), connections, made))
            return {"seconds": time.monotonic() - begun}

        turns.answer(answered)
        os._exit(0)  # their clients know nothing of these pushes, and would say so


if __name__ == "__main__":
    main()
