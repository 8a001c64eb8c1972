"""Time as the clock of a table whose rows expire by seconds: it never goes back, also where the machine's clock is set back.

Must not know rows or rounds.
"""

from __future__ import annotations

from collections.abc import Callable

MICROSECONDS = 1_000_000
"""In a second."""


class Elapsed:
    """Microseconds since 1970, and as many more as the machine's clock was set back while this shard looked at it.

    May be asked from any thread: who finds that the clock was set back replaces what was seen before, whole. It then
    stands still for a second at most, since another thread may have looked a moment later and be through first.

    Args:
        wall: seconds since 1970. seen: what a process before has come to, below which this does not begin.
    """

    def __init__(self, wall: Callable[[], float], seen: int) -> None:
        self._wall = wall
        now = int(wall() * MICROSECONDS)
        self._latest = now, max(0, seen - now)

    def now(self) -> int:
        """Microseconds."""
        now = int(self._wall() * MICROSECONDS)
        before, ahead = self._latest
        if before - MICROSECONDS < now < before:
            return before + ahead
        ahead += max(0, before - now)
        self._latest = now, ahead
        return now + ahead
