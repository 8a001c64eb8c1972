"""Rates at which counters have grown in the last seconds. Must not know what they count."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable


class Rates:
    """Counters by name, and their growth per second over a window.

    Args:
        window_s: length of the window in seconds; the window is shorter if a counter has been known for less time.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: dict[Hashable, deque[tuple[float, float]]] = {}

    def of(self, name: Hashable, now: float, value: float, slack: float = 0.0) -> float:
        """Note a counter's current value; return its growth per second. A counter that has shrunk starts anew.

        Args:
            slack: a counter that has shrunk by at most this counts as unchanged.
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
        """Forget all counters whose names are tuples that begin with these items."""
        for name in [n for n in self._seen if isinstance(n, tuple) and n[: len(prefix)] == prefix]:
            del self._seen[name]
