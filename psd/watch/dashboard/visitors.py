"""The connections of the dashboard, limited to a number that it can bear.

If there are more, the oldest one that has not been let in is closed, as at a shard's ports: an honest visitor sends its request
at once, so the oldest is one that only holds the connection. Must not know pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

STRANGERS_MAX = 64
"""Connections that have not been let in,"""
CONNECTIONS_MAX = 256
"""and all of them; a browser has up to six."""

ACCEPT_PAUSE_S = 0.002
"""Pause after each accepted connection: at most 500 a second, so that a flood costs little."""
_NO_DESCRIPTORS_PAUSE_S = 0.1
HANDSHAKE_S = 10.0


@dataclass(eq=False)
class _Visitor:
    """A connection. It has a transport only after the TLS handshake."""

    sock: socket.socket
    is_let_in: bool = False
    has_begun: bool = False
    transport: asyncio.BaseTransport | None = None
    task: asyncio.Task[None] | None = None

    @property
    def has_gone(self) -> bool:
        if self.task is not None and not self.task.done():
            return False
        return self.transport is None or self.transport.is_closing()

    def hang_up(self) -> None:
        if self.task is not None and not self.task.done():
            self.task.cancel()
            if not self.has_begun:
                self.sock.close()
        elif isinstance(self.transport, asyncio.Transport):
            self.transport.abort()


class Visitors:
    """Accepts connections until `close`.

    Args:
        listener: a socket that listens; closed by `close`. protocol: makes the protocol for a connection. tls: None: no TLS.
    """

    def __init__(self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None) -> None:
        self._listener, self._protocol, self._tls = listener, protocol, tls
        self._loop = asyncio.get_running_loop()
        self._found: list[_Visitor] = []  # oldest first
        self._is_closed = False
        listener.setblocking(False)
        self._listen()

    def let_in(self, transport: asyncio.BaseTransport | None) -> None:
        """Note that the visitor on this connection may see the job."""
        for visitor in self._found:
            if visitor.transport is transport:
                visitor.is_let_in = True

    def close(self) -> None:
        """Accept no more connections. Existing ones are ended by their protocols."""
        self._is_closed = True
        self._loop.remove_reader(self._listener)
        for visitor in self._found:
            if visitor.task is not None and not visitor.task.done():
                visitor.hang_up()
        self._listener.close()

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        self._loop.remove_reader(self._listener)
        pause_s = ACCEPT_PAUSE_S
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # it has gone again, or there are no descriptors left
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                pause_s = _NO_DESCRIPTORS_PAUSE_S
        else:
            self._make_room()
            sock.setblocking(False)
            visitor = _Visitor(sock)
            self._found.append(visitor)
            visitor.task = self._loop.create_task(self._welcome(visitor))
        self._loop.call_later(pause_s, self._listen)

    def _make_room(self) -> None:
        self._found = [visitor for visitor in self._found if not visitor.has_gone]
        strangers = [visitor for visitor in self._found if not visitor.is_let_in]
        if len(strangers) >= STRANGERS_MAX:
            self._turn_away(strangers[0])
        elif len(self._found) >= CONNECTIONS_MAX:
            self._turn_away((strangers or self._found)[0])

    def _turn_away(self, visitor: _Visitor) -> None:
        self._found.remove(visitor)
        visitor.hang_up()

    async def _welcome(self, visitor: _Visitor) -> None:
        visitor.has_begun = True
        timeout_s = HANDSHAKE_S if self._tls is not None else None
        with contextlib.suppress(OSError, asyncio.TimeoutError):  # it ends in the handshake, or sends no handshake
            visitor.transport, _ = await self._loop.connect_accepted_socket(
                self._protocol, visitor.sock, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
