"""Looks after the bulk lane's connections while their own threads are busy: one thread for all of them.

It notices that a worker has closed its side while its call waits for others, where nobody reads the socket. It says to those
whose call is under way that the shard is there, so that they know of one that has vanished. And it ends connections whose
worker has ended, or is another process now, and has not closed them: its machine may have vanished. Must not know tickets,
blocks or messages.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from psd.rim.bulk_connection import BulkConnection

LOOK_S = 5.0
"""From one look at all connections to the next. A worker takes a silence of three of them for the end."""


class Watch:
    """The thread.

    Args:
        connections: those that are open, by descriptor; may change at any time.
        is_current: whether a connection's worker takes part in the job, as the session that uses it.
    """

    def __init__(
        self, connections: dict[int, BulkConnection], is_current: Callable[[BulkConnection], bool], look_s: float = LOOK_S
    ) -> None:
        self._connections = connections
        self._is_current = is_current
        self._look_s = look_s
        self._forsaken: set[BulkConnection] = set()
        self._poll = select.epoll() if hasattr(select, "epoll") else None  # elsewhere a wait ends at its deadline
        self._ends: tuple[socket.socket, socket.socket] | None = None  # what is sent at one stops the thread at the other
        self._thread = threading.Thread(target=self._run, name="psd-bulk-watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._ends = socket.socketpair()
        if self._poll is not None:
            self._poll.register(self._ends[0], select.EPOLLIN)
        self._thread.start()

    def add(self, descriptor: int) -> None:
        """A connection is open."""
        if self._poll is not None:
            self._poll.register(descriptor, select.EPOLLRDHUP | select.EPOLLONESHOT)

    def forget(self, descriptor: int) -> None:
        """A connection is about to be closed."""
        if self._poll is not None:
            with suppress(OSError):
                self._poll.unregister(descriptor)

    def stop(self) -> None:
        """End the thread."""
        if self._ends is not None:
            self._ends[1].send(b"x")
            self._thread.join()
            for end in self._ends:
                end.close()
        if self._poll is not None:
            self._poll.close()

    def look(self) -> None:
        """At all connections."""
        connections = list(self._connections.values())
        for connection in connections:
            connection.say_alive()
        forsaken = {connection for connection in connections if not self._is_current(connection)}
        for connection in forsaken & self._forsaken:  # the other look's, too: what it has under way has had time to end
            connection.hang_up()
        self._forsaken = forsaken

    def _run(self) -> None:
        assert self._ends is not None
        stopping = self._ends[0]
        next_look = time.monotonic() + self._look_s
        while True:
            for descriptor in self._hung_up(stopping, max(0.0, next_look - time.monotonic())):
                if descriptor == stopping.fileno():
                    return
                connection = self._connections.get(descriptor)
                if connection is not None:
                    connection.hang_up()
            if time.monotonic() >= next_look:
                self.look()
                next_look = time.monotonic() + self._look_s

    def _hung_up(self, stopping: socket.socket, timeout_s: float) -> Collection[int]:
        if self._poll is not None:
            return [descriptor for descriptor, _ in self._poll.poll(timeout_s)]
        readable, _, _ = select.select([stopping], [], [], timeout_s)
        return [each.fileno() for each in readable]
