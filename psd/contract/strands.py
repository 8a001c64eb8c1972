"""Several sockets of one connection: large payloads are cut into as many parts, which travel at the same time.

One TCP stream carries no more than a window each round trip, and loses half of that with a lost packet; several carry as many
times as much. A payload's parts lie one after the other, the first on the connection's own socket, behind the message's head;
so both sides know from its size where each part travels. One thread moves all parts. Must not know messages.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Sequence
from itertools import pairwise

from psd.contract.tls_socket import TlsSocket

CUT_BYTES_MIN = 64 << 10
"""Bytes of a payload from which it is cut; a smaller one is as quick on one socket."""

STREAMS_MAX = 32
"""Most sockets of a connection."""

BUFFERS_MAX = 1024
"""Most buffers that Linux takes in one system call."""

AnySocket = socket.socket | TlsSocket
Step = Callable[[AnySocket, list[memoryview]], int]
"""Moves some bytes of buffers without waiting; returns how many; raises BlockingIOError if there is nothing to move."""


def beyond(views: list[memoryview], count: int) -> list[memoryview]:
    """The views without their first `count` bytes."""
    for i, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *views[i + 1 :]]
        count -= view.nbytes
    return []


def part_sizes(nbytes: int, count: int) -> list[int]:
    """Bytes of the parts of a payload of so many: alike, but for a byte."""
    ends = [nbytes * number // count for number in range(count + 1)]
    return [end - begin for begin, end in pairwise(ends)]


def cut(views: Sequence[memoryview], nbytes: int, count: int) -> list[list[memoryview]]:
    """The parts of a payload of so many bytes, as views of it."""
    parts: list[list[memoryview]] = []
    left = [view for view in views if view.nbytes]
    for room in part_sizes(nbytes, count):
        part = []
        while room:
            piece = left[0][:room]
            part.append(piece)
            room -= piece.nbytes
            left = beyond(left, piece.nbytes)
        parts.append(part)
    return parts


def send_now(sock: AnySocket, views: list[memoryview]) -> int:
    """Send what fits into the socket's buffer; see Step."""
    if isinstance(sock, TlsSocket):
        return sock.send_now(views[0])
    return sock.sendmsg(views[:BUFFERS_MAX], (), socket.MSG_DONTWAIT)


def receive_now(sock: AnySocket, views: list[memoryview]) -> int:
    """Receive what is there; 0: the other side has closed its direction. See Step."""
    if isinstance(sock, TlsSocket):
        return sock.receive_now(views[0])
    return int(sock.recvmsg_into(views[:BUFFERS_MAX], 0, socket.MSG_DONTWAIT)[0])


def move(
    sockets: Sequence[AnySocket], parts: list[list[memoryview]], step: Step, event: int, wait: Callable[[select.poll], None]
) -> None:
    """Move all parts, each by its socket, whichever is ready.

    Args:
        step: send_now or receive_now. event: what to poll for: POLLOUT or POLLIN. wait: waits until the poll finds something.

    Raises:
        EOFError: the other side has closed its direction of a socket. OSError: a socket's. Also what `wait` raises.
    """
    while True:
        has_moved = False
        for number, (sock, part) in enumerate(zip(sockets, parts, strict=True)):
            if part:
                try:
                    count = step(sock, part)
                except BlockingIOError:
                    continue
                if count == 0:
                    raise EOFError
                parts[number], has_moved = beyond(part, count), True
        if not any(parts):
            return
        if not has_moved:
            poll = select.poll()
            for sock, part in zip(sockets, parts, strict=True):
                if part:
                    poll.register(sock.fileno(), event)
            wait(poll)
