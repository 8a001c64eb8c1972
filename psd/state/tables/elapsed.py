"""Time as the clock of a table whose rows expire by seconds: it never goes back, even if the machine's clock is set back.

Must not know rows or rounds.
"""

from __future__ import annotations

from collections.abc import Callable

MICROSECONDS = 1_000_000
"""Microseconds in a second."""


class Elapsed:
    """Microseconds since 1970, plus the time by which the machine's clock was set back since this shard began to look at it.

    Any thread may ask. If the clock seems to have gone back by less than a second, the time stands still: another thread may
    have looked a moment later and noted that first. If it has gone back further, it was set back, and the difference is added.

    Args:
        wall: returns seconds since 1970. seen: the time that an earlier process has reached; this one begins there or later.
    """

    def __init__(self, wall: Callable[[], float], seen: int) -> None:
        self._wall = wall
        now = int(wall() * MICROSECONDS)
        self._latest = now, max(0, seen - now)

    def now(self) -> int:
        """The time, in microseconds."""
        now = int(self._wall() * MICROSECONDS)
        before, ahead = self._latest
        if before - MICROSECONDS < now < before:
            return before + ahead
        ahead += max(0, before - now)
        self._latest = now, ahead
        return now + ahead
