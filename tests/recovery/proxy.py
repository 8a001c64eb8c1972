"""A TCP proxy in front of a shard that breaks connections on demand: where bulk data flows, so that a frame is torn.

proxy = Proxy(shard.address, shard.bulk_port)
proxy.arm(Fault("cut", "up"))       # strikes once, in the next large piece of data that a worker sends
proxy.wait_until_all_fired(60)

cut     forward a part of the piece, then reset the connection on both sides
drop    forward a part of the piece, lose everything after it for a while, then reset
delay   hold the piece, and what comes after it, back for a while

proxy.vanish() is another kind of fault: the connections that there are fall silent for good, at either end, as if the machines
between which they go, or the path, had gone without a word. Not even TCP has an answer any more. New ones work.

proxy.bytes_per_s is the speed of each connection, each way: what is sent faster lies in buffers on the way.

It stands before the gRPC port and, with `bulk_port`, before the bulk lane's too: on another loopback address, because clients
connect to the port that the shard has named, on the host where they have found it.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

PIECE_BYTES = 1 << 16
BULK_BYTES = 1 << 13
"""A piece at least this large is part of a gradient or of parameters, never a control message of the tests' small jobs."""

KINDS = ("cut", "drop", "delay")
DIRECTIONS = ("up", "down")


@dataclass(frozen=True)
class Fault:
    """A fault that strikes once.

    direction: "up" to the shard, "down" to the worker. part: of the piece that still passes. after: bytes of large pieces that
    pass before, in that direction.
    """

    kind: str
    direction: str
    part: float = 0.5
    seconds: float = 0.3
    after: int = 0

    @classmethod
    def drawn(cls, source: random.Random, directions: Sequence[str]) -> Fault:
        return cls(source.choice(KINDS), source.choice(directions), source.random(), 0.1 + 0.4 * source.random())


class Proxy:
    """Listens at `address`, and forwards to `target`, also when that was away for a time; and so at its bulk port."""

    def __init__(self, target: str, bulk_port: int | None = None) -> None:
        host, _, port = target.rpartition(":")
        # Where the shard's port is free; Linux has all of 127.0.0.0/8.
        own = f"127.{1 + secrets.randbelow(254)}.{secrets.randbelow(256)}.{1 + secrets.randbelow(254)}"
        self._ways = []
        if bulk_port is not None:
            self._ways.append((socket.create_server((own, bulk_port)), (host, bulk_port)))
        listener = socket.create_server((own, 0))
        self.address = f"{own}:{listener.getsockname()[1]}"
        self._ways.append((listener, (host, int(port))))
        self.bytes_per_s = 0.0  # no limit
        self.passed = dict.fromkeys(DIRECTIONS, 0)  # bytes of large pieces since the last fault was armed
        self.fired: list[Fault] = []
        self._armed: deque[Fault] = deque()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._sockets: dict[socket.socket, int] = {}  # and the shard's port to which they lead
        for way in self._ways:
            threading.Thread(target=self._accept, args=way, daemon=True).start()

    def arm(self, fault: Fault) -> None:
        """Faults strike one after the other."""
        with self._changed:
            self._armed.append(fault)
            self.passed = dict.fromkeys(DIRECTIONS, 0)

    def vanish(self, port: int | None = None) -> None:
        """Have the connections go silent that there are, or those to the shard's port of this number."""
        with self._changed:
            for each, to in self._sockets.items():
                if port in (None, to):
                    _mute(each)

    def own_ports(self) -> set[int]:
        """From which it is connected to the shard."""
        with self._changed:
            return {each.getsockname()[1] for each, to in self._sockets.items() if each.getpeername()[1] == to}

    def wait_until_all_fired(self, timeout_s: float) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: not self._armed, timeout_s), f"did not strike: {list(self._armed)}"

    def close(self) -> None:
        self._closing.set()
        for listener, _ in self._ways:
            _shut(listener)  # closing alone would not wake the thread that waits in accept()
            listener.close()
        with self._changed:
            sockets = list(self._sockets)
        for each in sockets:
            _reset(each)

    def _accept(self, listener: socket.socket, target: tuple[str, int]) -> None:
        while not self._closing.is_set():
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                shard = socket.create_connection(target, 5)
            except OSError:  # the shard is down: so it looks from the other side, too
                _reset(client)
                continue
            for each in (client, shard):
                each.settimeout(None)
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._changed:
                self._sockets |= dict.fromkeys((client, shard), target[1])
            for source, sink, direction in ((client, shard, "up"), (shard, client, "down")):
                threading.Thread(target=self._pump, args=(source, sink, direction), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                if self.bytes_per_s:
                    self._closing.wait(len(piece) / self.bytes_per_s)
                fault = self._strike(piece, direction)
                if fault is not None and fault.kind == "delay":
                    self._closing.wait(fault.seconds)
                elif fault is not None:
                    sink.sendall(piece[: int(fault.part * len(piece))])
                    if fault.kind == "drop":
                        self._swallow(source, fault.seconds)
                    break
                sink.sendall(piece)
        with self._changed:
            for each in (source, sink):
                self._sockets.pop(each, None)
        _reset(source)
        _reset(sink)

    def _strike(self, piece: bytes, direction: str) -> Fault | None:
        with self._changed:
            if len(piece) < BULK_BYTES:
                return None
            self.passed[direction] += len(piece)
            if not self._armed or self._armed[0].direction != direction or self.passed[direction] < self._armed[0].after:
                return None
            fault = self._armed.popleft()
            self.fired.append(fault)
            self._changed.notify_all()
            return fault

    def _swallow(self, source: socket.socket, seconds: float) -> None:
        timer = threading.Timer(seconds, _shut, [source])
        timer.daemon = True
        timer.start()
        while source.recv(PIECE_BYTES):
            pass


def _mute(each: socket.socket) -> None:
    """Drop, in the kernel, whatever arrives: it is neither acknowledged nor answered."""
    drop_all = ctypes.create_string_buffer(struct.pack("@HBBI", 6, 0, 0, 0))  # BPF: return 0
    program = struct.pack("@HP", 1, ctypes.addressof(drop_all))
    each.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_ATTACH_FILTER", 26), program)


def _shut(each: socket.socket) -> None:
    """Let a thread that waits in recv() go on; the other side may have done so already."""
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)


def _reset(each: socket.socket) -> None:
    """Close without the TCP farewell, as if the path had gone."""
    with contextlib.suppress(OSError):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    _shut(each)
    each.close()
