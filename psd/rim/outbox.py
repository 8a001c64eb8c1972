"""The second thread of a call: sends answers while the first one still receives.

On a connection that moves many blocks, receiving and applying takes one core and answering the other. What is queued is
bounded, since each answer pins a page. Must not know what sending an answer means.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

QUEUED_MAX = 8

ItemT = TypeVar("ItemT")


class Outbox(Generic[ItemT]):
    """A thread that sends the items given to `put`, in order. It ends with `close`; between calls it sleeps.

    Args:
        send: sends one item. discard: gives up one that will not be sent, because sending failed.
    """

    def __init__(self, send: Callable[[ItemT], None], discard: Callable[[ItemT], None], name: str) -> None:
        self._send = send
        self._discard = discard
        self._queue: deque[ItemT] = deque()
        self._changed = threading.Condition()
        self._pending = 0  # queued, or being sent
        self._error: BaseException | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: ItemT) -> None:
        """Queue an item; waits while QUEUED_MAX are queued. It is sent or discarded in any case.

        Raises:
            the error with which sending has failed.
        """
        with self._changed:
            while self._pending >= QUEUED_MAX and self._error is None:
                self._changed.wait()
            if self._error is None:
                self._queue.append(item)
                self._pending += 1
                self._changed.notify_all()
                return
            error = self._error
        self._discard(item)
        raise error

    def flush(self) -> None:
        """Wait until everything is sent; raise the error that sending ended with."""
        with self._changed:
            while self._pending:
                self._changed.wait()
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Send what is queued, and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._is_closed:
                    self._changed.wait()
                if not self._queue:
                    return
                item = self._queue.popleft()
                has_failed = self._error is not None
            error = None
            try:
                (self._discard if has_failed else self._send)(item)
            except BaseException as caught:  # noqa: BLE001 - raised in the thread that put the item
                error = caught
            with self._changed:
                self._pending -= 1
                self._error = self._error or error
                self._changed.notify_all()
