"""Explains a wait that takes long, for callers without a thread for that. Must not know what is waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

REPORT_AFTER_S = 5.0
"""Seconds after which a wait is explained, by default."""


@contextmanager
def explained(explain: Callable[[float], None], after_s: float = REPORT_AFTER_S) -> Iterator[None]:
    """Call `explain`, in another thread, with the seconds so far, when the block has taken `after_s`, and again whenever that
    time has doubled."""
    ended = threading.Event()

    def watch() -> None:
        began, due_s = time.monotonic(), after_s
        while not ended.wait(max(0.0, began + due_s - time.monotonic())):
            explain(due_s)
            due_s *= 2

    watcher = threading.Thread(target=watch, name="psd-explain", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
