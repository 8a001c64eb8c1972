"""A pace for answers that anybody may request without end, so that workers are served first.

Refusals, the status, watchers, reflection, methods that there are not: where more of them come than a rate, each waits for its
turn, a second at most. What the same connection asks for meanwhile waits where it is made, because gRPC lets a connection have
few calls at a time (--max-streams). A call that waits has a thread, so that only so many wait, and others are answered at once.
Never on a worker's way, nor on a probe's.

Libraries for rates either refuse and do not wait (limits), or sleep in the thread of each who comes, where nobody can wake it
(pyrate-limiter); here a wait ends when its caller hangs up, and few may wait. Must not know what is asked for.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

PER_S = 20.0
"""Answers a second, each of which costs about a millisecond,"""
BURST = 100
"""beyond this many at once: a world of workers that are all refused or started in the same moment does not wait."""
WAIT_S = 1.0
WAITING_MAX = 128


class Caller(Protocol):
    """The caller of an RPC; a gRPC context is one."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Have `callback` called when the caller hangs up; False if it has."""
        ...

    def time_remaining(self) -> float | None:
        """Seconds until the caller's deadline; None if there is none."""
        ...


class Pace:
    """Gives turns to waiting callers. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last = -math.inf  # the turn that was given out last, had all come at the rate
        self._waiting = 0

    def wait(self, caller: Caller) -> None:
        """Wait for the caller's turn, until half of its time has passed or it has hung up."""
        wait_s = self._take_turn()
        if wait_s == 0:
            return
        try:
            remaining = caller.time_remaining()
            hung_up = threading.Event()
            if caller.add_callback(hung_up.set):
                hung_up.wait(wait_s if remaining is None else min(wait_s, remaining / 2))
        finally:
            with self._lock:
                self._waiting -= 1

    def _take_turn(self) -> float:
        """Seconds until the caller's turn; a caller that has to wait is counted, unless too many do."""
        with self._lock:
            now = self._clock()
            turn = max(self._last, now - BURST / PER_S) + 1 / PER_S
            if turn <= now:
                self._last = turn
                return 0.0
            if self._waiting >= WAITING_MAX:
                return 0.0
            self._waiting += 1
            self._last = min(turn, now + WAIT_S)
            return self._last - now
