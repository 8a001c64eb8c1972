"""Hears of a job's end while its follower is busy, by a reader that waits at the shards for a version that never comes.

Shards that end with their job tell it to whoever waits, and are then gone: somebody must wait at any time. Must not know what
the follower is busy with.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from psd.contract.errors import CutMissed, JobOver, PsdError, WaitTimeout
from psd.contract.integers import INTEGER_MAX
from psd_client import Reader

ASK_S = 1.5
"""Seconds after which the reader asks again. Shards that have been asked in the last two wait a little before they end
(READERS_S in psd/state/shard.py), so that nothing is lost between two questions."""

PAUSE_S = 0.5
"""Seconds between two questions to shards that do not answer."""


class EndListener:
    """Listens while the follower is busy. A context manager.

    Args:
        reader: of the job; the follower's must be another one. Closed with this.

    Attributes:
        heard: what the shards have said of the job's end; empty: nothing.
    """

    def __init__(self, reader: Reader) -> None:
        self.heard = ""
        self._reader = reader
        self._is_busy = threading.Event()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="psd-follow-end", daemon=True)

    def __enter__(self) -> EndListener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()
        self._is_busy.set()
        self._thread.join()  # at most ASK_S, if shards answer
        self._reader.close()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Within: the follower asks nothing."""
        self._is_busy.set()
        try:
            yield
        finally:
            self._is_busy.clear()

    def _run(self) -> None:
        while self._is_busy.wait() and not (self.heard or self._is_closed.is_set()):
            try:
                self._reader.pull(newer_than=INTEGER_MAX - 1, timeout=ASK_S)
            except JobOver as error:
                self.heard = str(error)
            except (WaitTimeout, CutMissed):
                continue
            except PsdError:
                self._is_closed.wait(PAUSE_S)
