"""A second thread that sends the items that a first one puts, so that answers are sent while requests arrive.

On a connection with many blocks, receiving and applying them takes one core, and answering another. The queue is bounded, since
each answer pins a page. Must not know what sending an answer means.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

QUEUED_MAX = 8
"""Most items that wait or are being sent."""

ItemT = TypeVar("ItemT")


class Outbox(Generic[ItemT]):
    """A thread that sends the items given to `put`, in order. It ends with `close`; between calls it sleeps. One other thread
    puts and flushes.

    Args:
        send: sends one item. discard: drops an item that is not sent, because sending failed.
    """

    def __init__(self, send: Callable[[ItemT], None], discard: Callable[[ItemT], None], name: str) -> None:
        self._send = send
        self._discard = discard
        # Queues in C, both: with Queue's locks and conditions an item cost both threads as much Python again.
        self._queue: SimpleQueue[ItemT | None] = SimpleQueue()
        self._room: SimpleQueue[None] = SimpleQueue()  # one entry for each item that may be put before another one has left
        self._let_in(QUEUED_MAX)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: ItemT) -> None:
        """Queue an item; waits while there are QUEUED_MAX. The item is sent or discarded in any case.

        Raises:
            the error with which sending has failed.
        """
        if self._error is not None:
            self._discard(item)
            raise self._error
        self._room.get()
        self._queue.put(item)

    def flush(self) -> None:
        """Wait until all items are sent; raise the error of a failed sending."""
        for _ in range(QUEUED_MAX):
            self._room.get()
        self._let_in(QUEUED_MAX)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Send what is queued, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _let_in(self, count: int) -> None:
        for _ in range(count):
            self._room.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                (self._send if self._error is None else self._discard)(item)
            except BaseException as error:  # noqa: BLE001 - raised in the thread that puts the items
                self._error = self._error or error
            finally:
                del item  # else it is kept until the next one comes
                self._room.put(None)
