"""Limits how long a thread waits for the other end of a bulk connection. The waiting thread checks them every PAUSE_S.

It waits no longer than the call's deadline; not for long once the call was cancelled; and over TCP no longer than SILENT_S if
nothing moves, because a shard that lives says so. Must not know messages.
"""

from __future__ import annotations

import math
import time

from psd.contract.wire import Disconnected, Stream
from psd_client.lanes.transport import CANCEL_S

PAUSE_S = 0.5
SILENT_S = 16.0
"""Longest silence on a connection during a call: more than three times the longest pause of a shard that lives."""


class Patience:
    """The patience of one connection, for one call after another. Any thread may call `cancel`."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._deadline = math.inf
        self._cancelled_at = math.inf
        self._progress: tuple[int, int] | None = None
        self._moved_at = 0.0
        stream.set_patience(PAUSE_S, self.check)

    def begin(self, timeout_s: float) -> None:
        """Note that a call begins."""
        self._moved_at = time.monotonic()
        self._deadline = self._moved_at + timeout_s

    def cancel(self) -> None:
        """End the call CANCEL_S after this was called first."""
        self._cancelled_at = min(self._cancelled_at, time.monotonic())
        self._deadline = math.inf

    def check(self) -> None:
        """Raise the error that ends the call, if its time is up or nothing has moved for too long.

        Raises:
            TimeoutError: the call's time is up. Disconnected: the other end has vanished.
        """
        now = time.monotonic()
        if now >= self._deadline or now - self._cancelled_at >= CANCEL_S:
            raise TimeoutError
        progress = self._stream.progress()
        if progress is None or progress != self._progress:
            self._progress, self._moved_at = progress, now
        elif now - self._moved_at >= SILENT_S:
            raise Disconnected(f"nothing has come for {now - self._moved_at:.0f} s, not even word that the shard is there")
