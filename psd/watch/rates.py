"""Rates at which counters have grown in the last seconds. Must not know what they count."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable


class Rates:
    """Counters by name, and their growth per second over a window.

    Args:
        window_s: growth is measured over so many seconds, or over fewer if the counter has not been known for longer.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: dict[Hashable, deque[tuple[float, float]]] = {}

    def of(self, name: Hashable, now: float, value: float, slack: float = 0.0) -> float:
        """The growth of a counter per second, given its present value; one that has shrunk begins anew.

        Args:
            slack: one that has shrunk by no more than this is taken as unchanged.
        """
        seen = self._seen.setdefault(name, deque())
        if seen and value < seen[-1][1]:
            if value < seen[-1][1] - slack:
                seen.clear()
            else:
                value = seen[-1][1]
        seen.append((now, value))
        while len(seen) > 2 and seen[1][0] <= now - self._window_s:
            seen.popleft()
        (then, before) = seen[0]
        return (value - before) / (now - then) if now > then else 0.0

    def forget(self, *prefix: Hashable) -> None:
        """Forget the counters whose names are tuples that begin so."""
        for name in [n for n in self._seen if isinstance(n, tuple) and n[: len(prefix)] == prefix]:
            del self._seen[name]
