"""Limits connections and calls that have sent nothing yet.

If more come than a limit, the oldest one is turned away: honest peers send something at once, so the oldest is the least likely
to. gRPC's own limits do the reverse: they keep the oldest and refuse newcomers (tests/rim/test_rim_libraries.py). Must not know
what the strangers are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

ItemT = TypeVar("ItemT")

CALLS_MAX = 128
"""Most calls that have sent no message, and most endless streams."""


class Strangers:
    """Connections or calls that have sent nothing yet. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._turn_away: dict[Hashable, Callable[[], object]] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._turn_away)

    def enter(self, stranger: Hashable, turn_away: Callable[[], object]) -> bool:
        """Admit a stranger; False if another one was turned away for it."""
        displaced = None
        with self._lock:
            if len(self._turn_away) >= self._limit:
                displaced = self._turn_away.pop(next(iter(self._turn_away)))
            self._turn_away[stranger] = turn_away
        if displaced is not None:
            displaced()
        return displaced is None

    def leave(self, stranger: Hashable) -> None:
        """Remove a stranger that has sent something, or has gone. Idempotent."""
        with self._lock:
            self._turn_away.pop(stranger, None)

    def first_of(self, items: Iterator[ItemT], turn_away: Callable[[], object]) -> Iterator[ItemT]:
        """Yield the items; until the first one arrives, the caller counts as a stranger."""
        stranger = object()
        self.enter(stranger, turn_away)
        try:
            for item in items:
                self.leave(stranger)
                yield item
        finally:
            self.leave(stranger)
