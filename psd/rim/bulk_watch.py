"""Looks after the bulk lane's connections while their own threads are busy: one thread for all of them.

It notices if a worker closes its side while its call waits for others, when nobody reads the socket. It tells workers whose
calls are in progress that the shard lives, so that they notice if one vanishes. And it ends connections whose worker has ended,
or is another process now, without closing them: its machine may have vanished. Must not know tickets, blocks or messages.
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
"""Seconds between two looks at all connections. After a silence three times as long a worker believes that the shard died."""


class Watch:
    """The thread.

    Args:
        connections: the open connections, by descriptor; may change at any time.
        is_current: returns True if the session that uses a connection takes part in the job.
    """

    def __init__(
        self, connections: dict[int, ServedConnection], is_current: Callable[[ServedConnection], bool], look_s: float = LOOK_S
    ) -> None:
        self._connections = connections
        self._is_current = is_current
        self._look_s = look_s
        self._forsaken: set[ServedConnection] = set()
        self._poll: select.epoll | None = None  # only on Linux; elsewhere a wait ends at its deadline
        self._pair: tuple[socket.socket, socket.socket] | None = None  # to end the thread, which reads from the first
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
            with suppress(OSError, ValueError):  # it is closed already, or `stop` was called before
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
        for connection in forsaken & self._forsaken:  # at the previous look, too: its calls have had time to end
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
                # Another connection may have this descriptor by now.
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
