"""The network between workers and shards: a proxy for each pair, whose connections break one by one, control and bulk apart.

    network = Network()
    link = network.link(("127.0.0.1", 7000), 7001)      # before one shard's gRPC port and its bulk port, for one worker
    link.address                                        # for that worker
    link.begin(fault); link.end(fault)

refuse      connections are reset, and new ones refused
reset       connections are reset; new ones work
delay       each piece of data in a direction is held back
truncate    of the next piece in a direction only a part passes; then the connection is reset
half-open   connections are reset for one side, and dead for the `side` that does not hear of it: nothing it sends is even
            acknowledged, for ever. New ones work
black-hole  no packet passes, nor is any acknowledged, new connections included; afterwards all goes on

What is not acknowledged is dropped by a socket filter, before TCP has seen it: so the peer's keep-alive notices it, too, as
when a machine has vanished. A link has an address of its own on the loopback network, because clients connect to the bulk port
that the shard has named, on the host where they have found it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import random
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from plan import Fault

PIECE_BYTES = 1 << 16
CONNECT_S = 1.0

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # one instruction: keep 0 bytes


class Network:
    """All links of a trial, served by one thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._waking, self._woken = socket.socketpair()
        self._waking.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._pairs: set[_Pair] = set()
        self._ways: list[_Way] = []
        self._is_closed = False
        self._source = random.Random(os.urandom(8))
        self._thread = threading.Thread(target=self._run, name="network", daemon=True)
        self._thread.start()

    def link(self, control: tuple[str, int], bulk_port: int) -> Link:
        """A link to the shard at `control`."""
        while True:
            host = f"127.{self._source.randrange(1, 255)}.{self._source.randrange(256)}.{self._source.randrange(1, 255)}"
            made: list[_Way] = []
            try:
                made.append(_Way(host, 0, control))
                made.append(_Way(host, bulk_port, (control[0], bulk_port)))
            except OSError:  # somebody has that port on this address
                for way in made:
                    way.close()
                continue
            self.call(lambda made=made: [self._add(way) for way in made])
            return Link(self, *made)

    def call(self, command: Callable[[], Any]) -> Any:
        """Have the network's thread do something between two events; what it returns."""
        done: Future[Any] = Future()
        self._commands.put((command, done))
        with contextlib.suppress(BlockingIOError):
            self._waking.send(b"\0")
        return done.result(30)

    def close(self) -> None:
        """Reset everything."""
        self.call(self._close)
        self._thread.join(30)
        self._selector.close()
        self._waking.close()
        self._woken.close()

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _add(self, way: _Way) -> None:
        self._ways.append(way)
        self.listen(way)

    def listen(self, way: _Way) -> None:
        """Look for its new connections."""
        assert way.listener is not None
        self._selector.register(way.listener, selectors.EVENT_READ, way)

    def refuse(self, way: _Way) -> None:
        """Take no connections until `listen`."""
        if way.listener is not None:
            self._selector.unregister(way.listener)
            way.close()

    def pairs(self, way: _Way) -> list[_Pair]:
        """Its connections."""
        return [pair for pair in self._pairs if pair.way is way]

    def reset(self, pair: _Pair, only: str = "") -> None:
        """End a connection without TCP's farewell; `only`: for that side."""
        for side in (only,) if only else ("worker", "shard"):
            sock = pair.sockets.pop(side, None)
            if sock is not None:
                self._watch(sock, 0, pair)
                _reset(sock)
        if not pair.sockets:
            self._pairs.discard(pair)

    def _close(self) -> None:
        for pair in list(self._pairs):
            self.reset(pair)
        for way in self._ways:
            self.refuse(way)
        self._is_closed = True

    def _run(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select(self._pause_s()):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        while self._woken.recv(1 << 10):
                            pass
                elif isinstance(key.data, _Way):
                    self._accept(key.data)
            with contextlib.suppress(queue.Empty):
                while True:
                    command, done = self._commands.get_nowait()
                    try:
                        done.set_result(command())
                    except Exception as error:  # noqa: BLE001 - the caller's
                        done.set_exception(error)
            for pair in list(self._pairs):
                self._advance(pair)

    def _pause_s(self) -> float | None:
        now = time.monotonic()
        waits = [flow.due - now for pair in self._pairs for flow in pair.flows if flow.pending and flow.due > now]
        return max(0.001, min(waits)) if waits else None

    def _accept(self, way: _Way) -> None:
        assert way.listener is not None
        try:
            worker, _ = way.listener.accept()
        except OSError:
            return
        try:
            shard = socket.create_connection(way.target, CONNECT_S)
        except OSError:  # the shard is down: so it looks from the other side, too
            _reset(worker)
            return
        for sock in (worker, shard):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if way.is_hole:
                drop_all(sock)
        self._pairs.add(_Pair(way, worker, shard))

    def _advance(self, pair: _Pair) -> None:
        """Move what can be moved, and wait for what cannot."""
        if pair.is_dead or pair.way.is_hole:
            for sock in pair.sockets.values():
                self._watch(sock, 0, pair)
            return
        try:
            for flow in pair.flows:
                if pair in self._pairs:  # it may have been reset just now
                    self._move(pair, flow)
        except OSError:
            self.reset(pair)
        if pair not in self._pairs:
            return
        if all(flow.has_ended for flow in pair.flows):
            for sock in pair.sockets.values():
                self._watch(sock, 0, pair)
                sock.close()
            self._pairs.discard(pair)
            return
        now = time.monotonic()
        for side, sock in pair.sockets.items():
            mask = 0
            for flow in pair.flows:
                if flow.source == side and not flow.pending and not flow.has_ended:
                    mask |= selectors.EVENT_READ
                if flow.sink == side and flow.pending and flow.due <= now:
                    mask |= selectors.EVENT_WRITE
            self._watch(sock, mask, pair)

    def _move(self, pair: _Pair, flow: _Flow) -> None:
        source, sink = pair.sockets[flow.source], pair.sockets[flow.sink]
        while not flow.has_ended:
            if not flow.pending:
                try:
                    piece = source.recv(PIECE_BYTES)
                except BlockingIOError:
                    return
                if not piece:
                    flow.has_ended = True
                    sink.shutdown(socket.SHUT_WR)
                    return
                if pair.way.truncation is not None and pair.way.truncation.direction == flow.direction:
                    truncation, pair.way.truncation = pair.way.truncation, None
                    with contextlib.suppress(OSError):
                        sink.send(piece[: int(truncation.part * len(piece))])
                    self.reset(pair)
                    return
                flow.pending = memoryview(piece)
                flow.due = time.monotonic() + pair.way.delays.get(flow.direction, 0.0)
            if flow.due > time.monotonic():
                return
            try:
                flow.pending = flow.pending[sink.send(flow.pending) :]
            except BlockingIOError:
                return

    def _watch(self, sock: socket.socket, mask: int, pair: _Pair) -> None:
        known = self._selector.get_map().get(sock.fileno())
        if known is None:
            if mask:
                self._selector.register(sock, mask, pair)
        elif not mask:
            self._selector.unregister(sock)
        elif known.events != mask:
            self._selector.modify(sock, mask, pair)


class Link:
    """Between one worker and one shard."""

    def __init__(self, network: Network, control: _Way, bulk: _Way) -> None:
        self.address = f"{control.host}:{control.port}"
        self._network = network
        self._ways = {"control": (control,), "bulk": (bulk,), "both": (control, bulk)}

    def begin(self, fault: Fault) -> int:
        """Let it strike; how many connections it has broken at once."""
        return sum(self._network.call(lambda way=way: self._begin(way, fault)) for way in self._ways[fault.way])

    def end(self, fault: Fault) -> None:
        """Heal what heals."""
        for way in self._ways[fault.way]:
            self._network.call(lambda way=way: self._end(way, fault))

    def _begin(self, way: _Way, fault: Fault) -> int:
        network, pairs = self._network, [pair for pair in self._network.pairs(way) if not pair.is_dead]
        match fault.kind:
            case "link-refuse":
                network.refuse(way)
                for pair in pairs:
                    network.reset(pair)
            case "link-reset":
                for pair in pairs:
                    network.reset(pair)
            case "link-delay":
                way.delays[fault.direction] = fault.part
                return 0
            case "link-truncate":
                way.truncation = fault
            case "link-half-open":
                for pair in pairs:
                    pair.is_dead = True
                    if fault.side in pair.sockets:
                        drop_all(pair.sockets[fault.side])
                    network.reset(pair, only="shard" if fault.side == "worker" else "worker")
            case "link-black-hole":
                way.is_hole = True
                if way.listener is not None:
                    drop_all(way.listener)
                for pair in pairs:
                    for sock in pair.sockets.values():
                        drop_all(sock)
        return len(pairs)

    def _end(self, way: _Way, fault: Fault) -> None:
        match fault.kind:
            case "link-refuse" if way.listener is None:
                way.open()
                self._network.listen(way)
            case "link-delay":
                way.delays.pop(fault.direction, None)
            case "link-truncate":
                way.truncation = None
            case "link-black-hole":
                way.is_hole = False
                if way.listener is not None:
                    _drop_nothing(way.listener)
                for pair in self._network.pairs(way):
                    for sock in () if pair.is_dead else pair.sockets.values():
                        _drop_nothing(sock)


class _Way:
    """A port on a link's address, and where it leads."""

    def __init__(self, host: str, port: int, target: tuple[str, int]) -> None:
        self.host, self.port, self.target = host, port, target
        self.listener: socket.socket | None = None
        self.is_hole = False
        self.delays: dict[str, float] = {}
        self.truncation: Fault | None = None
        self.open()

    def open(self) -> None:
        self.listener = socket.create_server((self.host, self.port), backlog=64)
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
            self.listener = None


class _Flow:
    """One direction of a connection."""

    def __init__(self, source: str, sink: str, direction: str) -> None:
        self.source, self.sink, self.direction = source, sink, direction
        self.pending: memoryview | bytes = b""
        self.due = 0.0
        self.has_ended = False


class _Pair:
    """A worker's connection, and the one that the proxy has opened for it. is_dead: one of them hears nothing any more."""

    def __init__(self, way: _Way, worker: socket.socket, shard: socket.socket) -> None:
        self.way = way
        self.sockets = {"worker": worker, "shard": shard}
        self.flows = (_Flow("worker", "shard", "up"), _Flow("shard", "worker", "down"))
        self.is_dead = False


def drop_all(sock: socket.socket) -> None:
    """Lose every packet that arrives for a socket, before TCP has seen it."""
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(_DROP_ALL))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _drop_nothing(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it had no filter
        sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def _reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
