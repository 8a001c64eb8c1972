"""How slow the machine is just now: bounds of time are stretched by that, since a busy machine is no defect."""

from __future__ import annotations

import threading
import time

PROBE_S = 0.004
EVERY_S = 0.25
NAP_S = 0.01
FACTOR_MAX = 8.0


class Busyness:
    """A thread that takes a little processor time now and then, and looks how long that takes."""

    def __init__(self) -> None:
        self._ratios: list[float] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="busyness", daemon=True)
        self._thread.start()

    @property
    def factor(self) -> float:
        """At least 1: the mean of the worse half."""
        worse = sorted(self._ratios)[len(self._ratios) // 2 :]
        return min(max(sum(worse) / len(worse), 1.0), FACTOR_MAX) if worse else 1.0

    def close(self) -> float:
        """The factor at last."""
        self._closed.set()
        self._thread.join()
        return self.factor

    def _run(self) -> None:
        while not self._closed.wait(EVERY_S):
            begun, own = time.monotonic(), time.thread_time()
            self._closed.wait(NAP_S)
            while time.thread_time() - own < PROBE_S:
                pass
            self._ratios.append((time.monotonic() - begun) / (NAP_S + PROBE_S))
