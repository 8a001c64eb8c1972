"""Bytes that browsers, and others, send to the dashboard: an answer of HTTP's or a hang-up, and nothing on its log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Iterator

import pytest
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st

from psd.watch.dashboard.admission import Doorkeeper
from psd.watch.dashboard.pages import Pages, Streams
from psd.watch.dashboard.server import server_of
from psd.watch.dashboard.visitors import Visitors

TIMEOUT_S = 30.0

words = st.sampled_from(
    [
        *(b"GET", b"POST", b"HTTP/1.1", b"/", b"/static/app.js"),
        *(b"/api/job", b"/api/stream", b"/api/enter", b"/api/runs", b"/api/run?name="),
    ]
)
headers = st.sampled_from(
    [
        *(b"Host: localhost", b"Host: elsewhere", b"Cookie: c=1", b"Content-Length: 5"),
        *(b"Transfer-Encoding: chunked", b"Expect: 100-continue", b"Upgrade: websocket", b"Connection: upgrade"),
    ]
)
requests = st.builds(
    lambda line, lines, body: b" ".join(line) + b"\r\n" + b"\r\n".join(lines) + b"\r\n\r\n" + body,
    st.lists(words | st.binary(max_size=8), min_size=1, max_size=4),
    st.lists(headers | st.binary(max_size=12), max_size=4),
    st.binary(max_size=20),
)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of a dashboard that asks for a token."""
    listener = socket.create_server(("127.0.0.1", 0))
    loop, ended = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async def whole() -> str:
            return "{}"

        async def run(name: str) -> str | None:
            return name or None

        pages = Pages(Doorkeeper("a-token-of-the-dashboard"), Streams(), whole, whole, run, is_https=False, cookie="c")
        async with server_of(pages) as protocols:
            visitors = Visitors(listener, protocols, None)
            await ended.wait()
            visitors.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    yield listener.getsockname()[1]
    loop.call_soon_threadsafe(ended.set)
    thread.join()
    loop.close()


@fuzzed
@given(st.lists(requests | st.binary(max_size=60), min_size=1, max_size=5))
def test_requests_to_the_dashboard(port: int, caplog: pytest.LogCaptureFixture, sent: list[bytes]) -> None:
    """Whoever asks properly afterwards is answered."""
    caplog.set_level(logging.DEBUG)
    for data in sent:
        _exchange(port, data, ends=True)

    assert _exchange(port, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    assert [record.getMessage() for record in caplog.records if record.name != "asyncio"] == []
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def _exchange(port: int, data: bytes, *, ends: bool = False) -> bytes:
    """What comes back until the end."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as browser, contextlib.suppress(ConnectionError):
        browser.sendall(data)
        if ends:
            browser.shutdown(socket.SHUT_WR)
        while more := browser.recv(1 << 16):
            found += more
    return found
