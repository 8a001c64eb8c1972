"""A web server of one page, /metrics, for Prometheus. One thread, a few connections, short deadlines; nothing else is served.

A connection is asked one question, answered, and closed. This side first says that there is no more, and reads on until the
other one has closed: a connection that is closed with unread bytes, such as a request's body, loses the end of what was sent.
Where more come than CONNECTIONS_MAX, the oldest one goes: a scraper asks at once, what only holds a connection does not. The
page is made anew at most every CACHE_S, so that a flood of questions costs the shard no more than some. prometheus_client's
own server has a thread for each connection, for as long as its client likes, and renders the page for each question
(tests/rim/test_rim_libraries.py). Must not know what is on the page.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

PATH = "/metrics"
CONNECTIONS_MAX = 16
BACKLOG = 128
HEAD_BYTES_MAX = 8 << 10
BODY_BYTES_MAX = 1 << 20
"""Bytes of a request's body, which nobody wants, that are read after the answer."""
DEADLINE_S = 10.0
"""Seconds from a connection's start to its end, whatever it does."""
CACHE_S = 0.2
PAUSE_S = 0.002
"""Pause after each accepted connection: at most 500 a second."""


@dataclass(eq=False)
class _Connection:
    """One connection.

    Attributes:
        answer: what of it is unsent; None before, empty once all was sent. passed_over: bytes read after that.
    """

    sock: socket.socket
    deadline: float
    head: bytearray = field(default_factory=bytearray)
    answer: memoryview | None = None
    passed_over: int = 0


class MetricsServer:
    """Serves one page. Made, then `start`ed once, then `stop`ped.

    Args:
        host: to bind, without brackets. port: 0 for a free one.
        render: the page. content_type: of it.

    Attributes:
        port: once started.
    """

    def __init__(self, host: str, port: int, render: Callable[[], bytes], content_type: str) -> None:
        self.port = port
        self._host = host
        self._render = render
        self._content_type = content_type
        self._page = b""
        self._page_until = 0.0
        self._connections: dict[int, _Connection] = {}  # by descriptor, oldest first
        self._never = threading.Event()
        self._thread = threading.Thread(target=self._run, name="psd-metrics", daemon=True)

    def start(self) -> None:
        """Bind and serve.

        Raises:
            OSError: the port cannot be bound.
        """
        found = socket.getaddrinfo(self._host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(address)
            self._listener.listen(BACKLOG)
        except OSError as error:
            self._listener.close()
            raise OSError(
                f"--metrics-port: cannot bind {self._host}:{self.port}: {error.strerror}; is the port in use?"
            ) from error
        self.port = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for sock in (self._listener, self._woken):
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)
        self._thread.start()

    def stop(self) -> None:
        """Close everything. Idempotent."""
        if self._thread.is_alive():
            with contextlib.suppress(OSError):
                self._wake.send(b"x")
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            for connection in list(self._connections.values()):
                self._close(connection)
            for sock in (self._listener, self._wake, self._woken):
                sock.close()
            self._selector.close()

    def _turn(self) -> bool:
        """Handle pending events; False when it is time to end."""
        deadlines = [connection.deadline for connection in self._connections.values()]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._woken:
                return False
            if key.fileobj is self._listener:
                self._accept()
            elif key.fd in self._connections:  # it may have been closed a moment ago, for a newer one
                self._go_on(self._connections[key.fd])
        now = time.monotonic()
        for connection in [c for c in self._connections.values() if c.deadline <= now]:
            self._close(connection)
        return True

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it has gone again, or there are no descriptors left
            self._pause(0.1)
            return
        if len(self._connections) >= CONNECTIONS_MAX:
            self._close(next(iter(self._connections.values())))
        sock.setblocking(False)
        self._connections[sock.fileno()] = _Connection(sock, time.monotonic() + DEADLINE_S)
        self._selector.register(sock, selectors.EVENT_READ)
        self._pause(PAUSE_S)

    def _pause(self, seconds: float) -> None:
        """Let the shard work."""
        self._never.wait(seconds)

    def _go_on(self, connection: _Connection) -> None:
        try:
            if connection.answer is None:
                self._read(connection)
            elif connection.answer:
                self._write(connection)
            else:
                self._pass_over(connection)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._close(connection)

    def _read(self, connection: _Connection) -> None:
        data = connection.sock.recv(HEAD_BYTES_MAX)
        if not data:
            self._close(connection)
            return
        connection.head += data
        if b"\r\n\r\n" in connection.head or len(connection.head) > HEAD_BYTES_MAX:
            connection.answer = memoryview(self._answer(bytes(connection.head)))
            self._selector.modify(connection.sock, selectors.EVENT_WRITE)

    def _write(self, connection: _Connection) -> None:
        assert connection.answer is not None
        connection.answer = connection.answer[connection.sock.send(connection.answer) :]
        if not connection.answer:
            connection.sock.shutdown(socket.SHUT_WR)
            self._selector.modify(connection.sock, selectors.EVENT_READ)

    def _pass_over(self, connection: _Connection) -> None:
        data = connection.sock.recv(HEAD_BYTES_MAX)
        connection.passed_over += len(data)
        if not data or connection.passed_over > BODY_BYTES_MAX:
            self._close(connection)

    def _close(self, connection: _Connection) -> None:
        del self._connections[connection.sock.fileno()]
        self._selector.unregister(connection.sock)
        connection.sock.close()

    def _answer(self, head: bytes) -> bytes:
        words = head.partition(b"\r\n")[0].split(b" ")
        if len(head) > HEAD_BYTES_MAX or len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response("400 Bad Request", "text/plain", b"expected GET " + PATH.encode() + b" HTTP/1.1\n")
        if words[1].partition(b"?")[0] != PATH.encode():
            return _response("404 Not Found", "text/plain", b"there is only " + PATH.encode() + b" here\n")
        if words[0] != b"GET":
            return _response("405 Method Not Allowed", "text/plain", b"only GET\n", "Allow: GET\r\n")
        try:
            now = time.monotonic()
            if now >= self._page_until:
                self._page, self._page_until = self._render(), now + CACHE_S
        except Exception:
            logger.exception("the metrics could not be collected because of a defect in the shard")
            return _response("500 Internal Server Error", "text/plain", b"the shard's log has the traceback\n")
        return _response("200 OK", self._content_type, self._page)


def _response(status: str, content_type: str, body: bytes, more: str = "") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
    )
    return head.encode() + body
