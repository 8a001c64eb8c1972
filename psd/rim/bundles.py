"""Bulk connections of several sockets, while these come together: each further one shows the connection's ticket.

The first socket's ticket was checked when it was admitted. Must not know what tickets are worth, or what travels.
"""

from __future__ import annotations

import threading

from psd.contract.errors import InvalidRequest
from psd.contract.strands import STREAMS_MAX
from psd.contract.wire import Disconnected, Stream


class Bundle:
    """The further sockets of one connection.

    Args:
        rank: the worker's. count: of further sockets.

    Raises:
        InvalidRequest: there are too many.
    """

    def __init__(self, rank: int, count: int) -> None:
        if not 0 <= count < STREAMS_MAX:
            raise InvalidRequest(f"streams: expected 1 to {STREAMS_MAX}, got {count + 1}")
        self.rank = rank
        self._count = count
        self._changed = threading.Condition()
        self._arrived: dict[int, Stream] = {}
        self._is_over = False

    def check(self, strand: int) -> None:
        """Raise InvalidRequest if no socket of this number, from 1, is to come, or it is there already."""
        with self._changed:
            self._check(strand)

    def _check(self, strand: int) -> None:
        if not 1 <= strand <= self._count:
            raise InvalidRequest(f"strand: expected 1 to {self._count}, got {strand}")
        if strand in self._arrived:
            raise InvalidRequest(f"strand: {strand} is there already")

    def put(self, strand: int, stream: Stream) -> None:
        """Add a socket; it belongs to the bundle from now on.

        Raises:
            InvalidRequest: as from `check`. Disconnected: nobody waits for it any more.
        """
        with self._changed:
            self._check(strand)
            if self._is_over:
                raise Disconnected("the connection's first socket has ended")
            self._arrived[strand] = stream
            self._changed.notify_all()

    def take(self, timeout_s: float) -> list[Stream]:
        """Wait for all sockets, for so many seconds for each; return them in their order.

        Raises:
            Disconnected: they have not come in time. Those that have are closed.
        """
        with self._changed:
            before = -1
            while before < len(self._arrived) < self._count:
                before = len(self._arrived)
                self._changed.wait(timeout_s)  # until one comes, or the time is up
            self._is_over = True
            if len(self._arrived) < self._count:
                for stream in self._arrived.values():
                    stream.close()
                raise Disconnected(f"{len(self._arrived)} of {self._count} further sockets have come")
            return [self._arrived[strand] for strand in sorted(self._arrived)]
