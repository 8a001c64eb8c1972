"""A hostile peer for benchmarks/abuse.py: it knows where a shard listens, and no more.

Told {"attack": name, "seconds": s} it attacks for that long and answers how often it has tried what.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from turns import Turns

HELD = 1500
"""Connections or streams held at once."""
RATE = 200
"""New connections or calls per second; a flood from a machine of its own."""
HELLO = struct.Struct("<IIQ")
DATA, CONTROL = "/psd.v1.DataService/", "/psd.v1.ControlService/"

Connect = Callable[[], socket.socket]


class Attacker:
    """Attacks by name. `connect`: by lane."""

    def __init__(self, told: dict[str, Any]) -> None:
        host, _, port = told["grpc"].rpartition(":")
        self.address = told["grpc"]
        self.connect: dict[str, Connect] = {
            "grpc": lambda: socket.create_connection((host, int(port)), timeout=5),
            "tcp": lambda: socket.create_connection((host, told["bulk_port"]), timeout=5),
            "metrics": lambda: socket.create_connection((host, told["metrics_port"]), timeout=5),
            "local": lambda: _local(told["local_name"]),
        }

    def run(self, attack: str, until: float) -> int:
        """Attack; return the number of attempts."""
        kind, _, where = attack.partition(" ")
        return int(getattr(self, kind)(where, until))

    def bystander(self, where: str, until: float) -> int:
        """Touch nobody, and keep a processor busy."""
        del where
        while time.monotonic() < until:
            pass
        return 0

    # -- connections ---------------------------------------------------------------------------------------------------

    def silence(self, where: str, until: float) -> int:
        """Hold connections and say nothing; open another one for each that is closed."""
        return self._hold(where, until, b"")

    def promise(self, where: str, until: float) -> int:
        """Announce 4 GiB, send a little, and hold."""
        sent = {"grpc": _PREFACE + b"\0\xff\xff\x04\0\0\0\0\0" + b"x" * 4096, "metrics": b"GET /metrics HTTP/1.1\r\nX: "}
        return self._hold(where, until, sent.get(where, HELLO.pack(1, (1 << 32) - 1, 1 << 60) + b"x" * 64))

    def drip(self, where: str, until: float) -> int:
        """Send a good beginning, a byte at a time."""
        return self._hold(where, until, HELLO.pack(1, 900, 0), drip=True)

    def garbage(self, where: str, until: float) -> int:
        """Send garbage and hang up, again and again."""
        tried = 0
        for _ in _paced(RATE, until):
            tried += 1
            with contextlib.suppress(OSError), self.connect[where]() as sock:
                sock.sendall(random.randbytes(1 << 16))
        return tried

    def scrapes(self, where: str, until: float) -> int:
        """Ask for the metrics, again and again."""
        tried = 0
        for _ in _paced(RATE, until):
            tried += 1
            with contextlib.suppress(OSError), self.connect[where]() as sock:
                sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
                while sock.recv(1 << 16):
                    pass
        return tried

    def _hold(self, where: str, until: float, first: bytes, *, drip: bool = False) -> int:
        held: list[socket.socket] = []
        tried = 0
        poll = select.poll()
        by_fd: dict[int, socket.socket] = {}
        for _ in _paced(RATE, until):
            if len(held) < HELD:
                tried += 1
                with contextlib.suppress(OSError):
                    sock = self.connect[where]()
                    held.append(sock)
                    by_fd[sock.fileno()] = sock
                    poll.register(sock, select.POLLIN)
                    sock.setblocking(False)
                    sock.send(first) if first else None
            for fd, _ in poll.poll(0):
                sock = by_fd[fd]
                with contextlib.suppress(BlockingIOError):
                    try:
                        gone = not sock.recv(1 << 16)
                    except ConnectionError:
                        gone = True
                    if gone:
                        poll.unregister(fd)
                        held.remove(by_fd.pop(fd))
                        sock.close()
            if drip and tried % 20 == 0:
                for sock in held:
                    with contextlib.suppress(OSError):
                        sock.send(b"x")
        for sock in held:
            sock.close()
        return tried

    # -- calls ---------------------------------------------------------------------------------------------------------

    def streams(self, where: str, until: float) -> int:
        """Open streams of calls on a few connections and send nothing on them; another one for each that ends."""
        return self._streams(where, until, 4)

    def crowds(self, where: str, until: float) -> int:
        """Open streams on so many connections that a shard's limit for each does not hold them back."""
        return self._streams(where, until, 64)

    def _streams(self, where: str, until: float, connections: int) -> int:
        method = {
            "push": DATA + "PushPull",
            "watch": "/grpc.health.v1.Health/Watch",
            "reflection": "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        }[where]
        over = threading.Event()
        channels = [self._channel() for _ in range(connections)]
        held: list[Any] = []
        tried = 0
        for _ in _paced(RATE, until):
            held = [call for call in held if not call.done()]
            if len(held) >= HELD:
                continue
            tried += 1
            channel = channels[tried % len(channels)]
            if where == "watch":
                held.append(channel.unary_stream(method)(b""))
            else:
                held.append(channel.stream_stream(method)(_silent(over)))
        over.set()
        for call in held:
            call.cancel()
        for channel in channels:
            channel.close()
        return tried

    def calls(self, where: str, until: float) -> int:
        """Make refused or harmless calls, again and again."""
        method = {"status": CONTROL + "Status", "join": CONTROL + "Join", "nothing": "/nothing/Nothing"}[where]
        message = b"\xff" * 1000 if where == "join" else b""
        tried = 0
        with self._channel() as channel:
            call = channel.unary_unary(method)
            for _ in _paced(RATE, until):
                tried += 1
                with contextlib.suppress(grpc.RpcError):
                    call(message, timeout=5)
        return tried

    def oversize(self, where: str, until: float) -> int:
        """Send messages beyond every limit."""
        message = bytes(64 << 20)
        tried = 0
        while time.monotonic() < until:
            tried += 1
            with contextlib.suppress(grpc.RpcError), self._channel() as channel:
                channel.stream_unary(DATA + where)(iter([message] * 4), timeout=5)
            time.sleep(0.2)
        return tried

    def _channel(self) -> grpc.Channel:
        options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        return grpc.insecure_channel(self.address, options)


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"


def _local(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(5)
    try:
        sock.connect("\0" + name)
    except OSError:
        sock.close()
        raise
    return sock


def _silent(over: threading.Event) -> Iterator[bytes]:
    over.wait()
    yield from ()


def _paced(rate: float, until: float) -> Iterator[None]:
    """Yield at this rate per second, late ones at once."""
    due = time.monotonic()
    while due < until:
        time.sleep(max(0.0, due - time.monotonic()))
        yield
        due = max(due + 1 / rate, time.monotonic() - 1)


def _give_way() -> None:
    """Lower this process's priority: it stands for another machine and must not take the workers' processors."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


def main() -> None:
    """Attack when told."""
    turns = Turns()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 14)), hard))
    _give_way()
    attacker = Attacker(turns.arguments)
    turns.answer(lambda request: {"tried": attacker.run(request["attack"], time.monotonic() + request["seconds"])})


if __name__ == "__main__":
    sys.exit(main())
