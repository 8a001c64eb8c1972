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

from psd.rim.bulk_connection import ServedConnection

LOOK_S = 5.0
"""Seconds between two looks at all connections. A worker takes a silence of three of them for the end."""


class Watch:
    """The thread.

    Args:
        connections: those that are open, by descriptor; may change at any time.
        is_current: whether a connection's worker takes part in the job, as the session that uses it.
    """

    def __init__(
        self, connections: dict[int, ServedConnection], is_current: Callable[[ServedConnection], bool], look_s: float = LOOK_S
    ) -> None:
        self._connections = connections
        self._is_current = is_current
        self._look_s = look_s
        self._forsaken: set[ServedConnection] = set()
        self._poll: select.epoll | None = None  # elsewhere than on Linux a wait ends at its deadline
        self._pair: tuple[socket.socket, socket.socket] | None = None  # to end the thread: read from the first
        self._thread = threading.Thread(target=self._run, name="psd-bulk-watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._pair = socket.socketpair()
        if hasattr(select, "epoll"):
            self._poll = select.epoll()
            self._poll.register(self._pair[0], select.EPOLLIN)
        self._thread.start()

    def add(self, descriptor: int) -> None:
        """Watch a connection that has opened."""
        if self._poll is not None:
            self._poll.register(descriptor, select.EPOLLRDHUP | select.EPOLLONESHOT)

    def forget(self, descriptor: int) -> None:
        """Stop watching a connection, which is about to be closed."""
        if self._poll is not None:
            with suppress(OSError, ValueError):  # not there any more; or `stop` was called before
                self._poll.unregister(descriptor)

    def stop(self) -> None:
        """End the thread."""
        if self._pair is None:
            return
        self._pair[1].send(b"x")
        self._thread.join()
        if self._poll is not None:
            self._poll.close()
        for end in self._pair:
            end.close()
        self._pair = None

    def look(self) -> None:
        """Look at all connections."""
        connections = list(self._connections.values())
        for connection in connections:
            connection.say_alive()
        forsaken = {connection for connection in connections if not self._is_current(connection)}
        for connection in forsaken & self._forsaken:  # the other look's, too: what it has under way has had time to end
            connection.hang_up()
        self._forsaken = forsaken

    def _run(self) -> None:
        assert self._pair is not None
        stopping = self._pair[0]
        next_look = time.monotonic() + self._look_s
        while True:
            for descriptor in self._hung_up(stopping, max(0.0, next_look - time.monotonic())):
                if descriptor == stopping.fileno():
                    return
                connection = self._connections.get(descriptor)
                # Its number may have gone to another connection since.
                if connection is not None and _has_hung_up(descriptor):
                    connection.hang_up()
            if time.monotonic() >= next_look:
                self.look()
                next_look = time.monotonic() + self._look_s

    def _hung_up(self, stopping: socket.socket, timeout_s: float) -> Collection[int]:
        if self._poll is not None:
            return [descriptor for descriptor, _ in self._poll.poll(timeout_s)]
        readable, _, _ = select.select([stopping], [], [], timeout_s)
        return [each.fileno() for each in readable]


def _has_hung_up(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    return bool(poll.poll(0))
