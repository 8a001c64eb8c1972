"""A pace for answers that anybody may request without end, so that workers are served first.

It is for refusals, the status, watchers, reflection and unknown methods: if more of them come than a rate, each waits for its
turn, at most a second. Further calls on the same connection wait at the caller, because gRPC limits the calls of a connection
(--max-streams). A waiting call has a thread, so only a few wait, and others are answered at once. Calls of workers and probes
never wait.

Libraries for rates either refuse and do not wait (limits), or sleep in each caller's thread, where nobody can wake them
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
"""beyond this many at once: when all workers are refused or started at the same moment, they do not wait."""
WAIT_S = 1.0
WAITING_MAX = 128


class Caller(Protocol):
    """The caller of an RPC; a gRPC context is one."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Have `callback` called when the caller hangs up; False if it has already."""
        ...

    def time_remaining(self) -> float | None:
        """Seconds until the caller's deadline; None if there is none."""
        ...


class Pace:
    """Gives turns to waiting callers. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last = -math.inf  # when the last turn would have been, had all come at the rate
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
        """Seconds until the caller's turn; 0 if too many wait. Counts a caller that must wait."""
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
