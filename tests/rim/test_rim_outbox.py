"""The second thread of a connection: order, what becomes of items that cannot be sent, and how many may wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from psd.rim.outbox import QUEUED_MAX, Outbox


class Wire:
    """Sends numbers once it is open; fails from a number on."""

    def __init__(self, fails_from: int = 1000) -> None:
        self.sent: list[int] = []
        self.discarded: list[int] = []
        self.put_count = 0
        self.waiting: list[int] = []  # at each sending: items whose put has returned, and which have not left
        self.is_open = threading.Event()
        self._fails_from = fails_from
        self.outbox = Outbox(self.send, self.discarded.append, "a test's outbox")

    def send(self, item: int) -> None:
        assert self.is_open.wait(100)
        if item >= self._fails_from:
            raise ConnectionError(item)
        self.waiting.append(self.put_count - len(self.sent))
        self.sent.append(item)


@pytest.fixture
def wires() -> Iterator[Any]:
    """Makes wires, and closes them."""
    made: list[Wire] = []

    def make(**options: int) -> Wire:
        made.append(Wire(**options))
        return made[-1]

    yield make
    for wire in made:
        wire.is_open.set()
        wire.outbox.close()


def test_items_leave_in_order_and_flush_waits_for_the_last(wires: Any) -> None:
    """Nothing overtakes, and whoever flushes waits until all has left."""
    wire = wires()
    for item in range(QUEUED_MAX - 1):
        wire.outbox.put(item)
    assert wire.sent == []

    wire.is_open.set()
    for item in range(QUEUED_MAX - 1, 50):
        wire.outbox.put(item)
    wire.outbox.flush()

    assert wire.sent == list(range(50))


def test_an_error_comes_to_whoever_puts_or_flushes_and_later_items_are_discarded(wires: Any) -> None:
    """Nothing is lost sight of: each item was sent, was the one that failed, or was discarded. Then it goes on."""
    wire = wires(fails_from=3)
    wire.is_open.set()

    with pytest.raises(ConnectionError, match="3"):
        for item in range(1000):
            wire.outbox.put(item)
    with pytest.raises(ConnectionError, match="3"):
        wire.outbox.flush()

    assert wire.sent == [0, 1, 2]
    assert sorted(wire.discarded) == list(range(4, 4 + len(wire.discarded)))
    wire.outbox.put(0)
    wire.outbox.flush()
    assert wire.sent == [0, 1, 2, 0]


def test_no_more_wait_than_may_be_pinned(wires: Any) -> None:
    """One that is being sent, and the others of QUEUED_MAX behind it: the next one waits for the first to leave."""
    wire = wires()
    count, is_full = 10 * QUEUED_MAX, threading.Event()

    def put() -> None:
        for item in range(count):
            wire.outbox.put(item)
            wire.put_count = item + 1
            if wire.put_count == QUEUED_MAX:
                is_full.set()

    putting = threading.Thread(target=put)
    putting.start()
    assert is_full.wait(100)
    assert wire.outbox._room.empty()

    wire.is_open.set()
    putting.join(100)
    wire.outbox.flush()

    assert wire.sent == list(range(count))
    assert max(wire.waiting) <= QUEUED_MAX
