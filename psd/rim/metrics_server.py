"""A web server of one page, /metrics, for Prometheus. One thread, a few connections, short deadlines; nothing else is served.

A connection is closed after the answer to one request. This side first half-closes it, and reads until the other one has
closed: if unread bytes are left, such as a request's body, closing loses the end of the answer. If more come than
CONNECTIONS_MAX, the oldest is closed: a scraper sends its request at once, an idle client does not. The page is rendered at
most every CACHE_S, so that a flood of requests costs the shard little. prometheus_client's own server has a thread for each
connection, for as long as its client likes, and renders the page for each request (tests/rim/test_rim_libraries.py). Must not
know what is on the page.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

PATH = "/metrics"
CONNECTIONS_MAX = 16
BACKLOG = 128
HEAD_BYTES_MAX = 8 << 10
BODY_BYTES_MAX = 1 << 20
"""Most bytes of a request's body that are read, and ignored, after the answer."""
DEADLINE_S = 10.0
"""Most seconds from a connection's start to its end."""
CACHE_S = 0.2
PAUSE_S = 0.002
"""Pause after each accepted connection: at most 500 a second."""
FULL_S = 0.1
"""Pause if no descriptors are left."""


class MetricsServer:
    """Serves one page. Made, then `start`ed once, then `stop`ped.

    Args:
        host: the address to bind, without brackets. port: 0 for a free one.
        render: returns the page. content_type: the page's.

    Attributes:
        port: the bound port, once started.
    """

    def __init__(self, host: str, port: int, render: Callable[[], bytes], content_type: str) -> None:
        self.port = port
        self._host = host
        self._render = render
        self._content_type = content_type
        self._page = b""
        self._page_until = 0.0
        self._connections: dict[asyncio.Task[None], socket.socket] = {}  # oldest first
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
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve())
        self._thread.start()

    def stop(self) -> None:
        """Close everything. Idempotent."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._serving.cancel)
            self._thread.join()

    def _run(self) -> None:
        with contextlib.closing(self._loop), self._listener, contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serving)

    async def _serve(self) -> None:
        try:
            while True:
                try:
                    sock, _ = await self._loop.sock_accept(self._listener)
                except OSError:  # the client has gone already, or no descriptors are left
                    await asyncio.sleep(FULL_S)
                    continue
                if len(self._connections) >= CONNECTIONS_MAX:
                    oldest = next(iter(self._connections))
                    oldest.cancel()
                    await asyncio.wait([oldest])
                connection = self._loop.create_task(self._attend(sock))
                self._connections[connection] = sock
                connection.add_done_callback(self._forget)
                await asyncio.sleep(PAUSE_S)
        finally:
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            await asyncio.sleep(0)  # let the displaced connection close

    def _forget(self, connection: asyncio.Task[None]) -> None:
        self._connections.pop(connection).close()

    async def _attend(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError):
            await asyncio.wait_for(self._converse(sock), DEADLINE_S)

    async def _converse(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock, limit=HEAD_BYTES_MAX)
        writer.transport.set_write_buffer_limits(0)  # so that drained bytes have been sent
        try:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.LimitOverrunError:
                head = b""
            writer.write(self._answer(head))
            await writer.drain()
            writer.write_eof()
            passed_over = 0
            while passed_over <= BODY_BYTES_MAX and (data := await reader.read(HEAD_BYTES_MAX)):
                passed_over += len(data)
        finally:
            writer.transport.abort()

    def _answer(self, head: bytes) -> bytes:
        words = head.partition(b"\r\n")[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
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
