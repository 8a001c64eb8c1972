"""A TLS connection with the methods of a socket that wire.Stream calls.

OpenSSL lets one thread at a time into a connection, and a worker's connection is used by two, one sending and one receiving.
So the socket does not block: each step takes a lock for as long as OpenSSL computes, and a thread waits for the network without
the lock. A connection ends like the socket below: half-closing means the same as without TLS.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

STEP_BYTES = 256 << 10
"""Bytes encrypted or decrypted in one step, during which the other direction waits: a tenth of a millisecond or two."""
RECORD_BYTES = 16 << 10

ResultT = TypeVar("ResultT")


class TlsSocket:
    """One side of a connection.

    Args:
        sock: connected; this object closes it. context: this side's.
        server_hostname: the name that the other side's certificate must have; None: this side is the server.

    Attributes:
        on_pause: called when a wait has reached its time-out, and may raise; None: TimeoutError.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_hostname: str | None = None) -> None:
        sock.setblocking(False)
        self.family = sock.family
        self._lock = threading.Lock()
        self._timeout_s: float | None = None
        self.on_pause: Callable[[], None] | None = None
        self._tls = context.wrap_socket(
            sock, server_side=server_hostname is None, server_hostname=server_hostname, do_handshake_on_connect=False
        )

    def handshake(self, timeout_s: float) -> None:
        """Agree on keys and check certificates; called before anything else.

        Raises:
            OSError: ssl's errors, or the connection broke. TimeoutError: it took longer than `timeout_s` in all.
        """
        self._run(self._tls.do_handshake, time.monotonic() + timeout_s)

    def sendmsg(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Send all of the buffers; return their size."""
        head, sent = b"", 0
        for buffer in buffers:
            view = memoryview(buffer)
            sent += view.nbytes
            room = RECORD_BYTES - len(head)
            head += view[:room]  # a small one shares its record with the next
            if view.nbytes > room:
                self.sendall(head)
                self.sendall(view[room:])
                head = b""
        self.sendall(head)
        return sent

    def sendall(self, data: bytes | memoryview) -> None:
        """Send the whole buffer."""
        view = memoryview(data)
        while view.nbytes:
            view = view[self.send(view) :]

    def send(self, view: memoryview) -> int:
        """Send a piece of the buffer; return the size of the piece."""
        chunk = view[:STEP_BYTES]
        return self._run(lambda: self._tls.send(chunk))

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        """Receive the bytes that are there; 0: the other side has closed its direction. The flags are ignored."""
        del nbytes, flags
        return self._run(lambda: self._receive(buffer[:STEP_BYTES]))

    def send_now(self, view: memoryview) -> int:
        """Send a piece of the buffer without waiting; return the size of the piece. BlockingIOError if there is no room. After
        that the same buffer must come again."""
        return self._now(lambda: self._tls.send(view[:STEP_BYTES]))

    def receive_now(self, buffer: memoryview) -> int:
        """Receive the bytes that are there, without waiting; 0: the other side has closed its direction. BlockingIOError if
        there are none."""
        return self._now(lambda: self._receive(buffer[:STEP_BYTES]))

    def _now(self, step: Callable[[], ResultT]) -> ResultT:
        with self._lock:
            try:
                return step()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

    def _receive(self, buffer: memoryview) -> int:
        """Receive records while there are some."""
        received = 0
        while received < len(buffer):
            try:
                count = self._tls.recv_into(buffer[received:])
            except ssl.SSLWantReadError:
                if not received:
                    raise
                break
            if count == 0:
                break  # the next call finds the end, too
            received += count
        return received

    def _run(self, step: Callable[[], ResultT], deadline: float | None = None) -> ResultT:
        while True:
            with self._lock:
                try:
                    return step()
                except ssl.SSLWantReadError:
                    event = select.POLLIN
                except ssl.SSLWantWriteError:
                    event = select.POLLOUT
            self._wait(event, deadline)

    def _wait(self, event: int, deadline: float | None) -> None:
        timeout_s = self._timeout_s if deadline is None else max(0.0, deadline - time.monotonic())
        poll = select.poll()
        poll.register(self._tls.fileno(), event)
        while not poll.poll(None if timeout_s is None else timeout_s * 1000):
            if deadline is not None or self.on_pause is None:
                raise TimeoutError
            self.on_pause()

    def set_timeout(self, seconds: float) -> None:
        """Set how long one wait for the network may take from now on; 0: for ever."""
        self._timeout_s = seconds or None

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Set an option of the socket below."""
        self._tls.setsockopt(level, option, value)

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """An option of the socket below."""
        return self._tls.getsockopt(level, option, size)

    def shutdown(self, how: int) -> None:
        """End one or both directions of the socket below; wakes waiting threads."""
        socket.socket.shutdown(self._tls, how)  # SSLSocket's own would go on without TLS

    def fileno(self) -> int:
        """Descriptor of the socket below."""
        return self._tls.fileno()

    def close(self) -> None:
        """Close the descriptor; nobody may be using it."""
        self._tls.close()
