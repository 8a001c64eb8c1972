"""A checkpoint store that answers no read until it is told to, and the calls of a test that must not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from psd.checkpoint import CheckpointDirectory

PATIENCE_S = 100.0
"""For what happens at once; a test that waits so long has failed."""


class BlockedStore:
    """Holds up the reads of a directory's files from when `holds` says so, until `open`."""

    def __init__(self, directory: CheckpointDirectory, holds: Callable[[], bool]) -> None:
        self._holds = holds
        self._is_read = threading.Event()
        self._is_open = threading.Event()
        self._read = directory.storage.read
        directory.storage.read = self._blocked_read

    def _blocked_read(self, *arguments: Any) -> bytes:
        if self._holds() and not self._is_open.is_set():
            self._is_read.set()
            assert self._is_open.wait(PATIENCE_S), "the test has not opened the store"
        return self._read(*arguments)

    @contextmanager
    def while_reading(self, call: Callable[[], Any]) -> Iterator[Callable[..., Any]]:
        """Make a call in a thread of its own. Inside, it is held up in a read; afterwards it has ended.

        What is given makes other calls meanwhile, and returns what they do, or fails the test if they have to wait.
        """
        with ThreadPoolExecutor(2) as pool:
            reading = pool.submit(call)
            assert self._is_read.wait(PATIENCE_S), "nothing is read"
            try:
                yield lambda function, *arguments, **named: pool.submit(function, *arguments, **named).result(PATIENCE_S)
                assert not reading.done()
            finally:
                self._is_open.set()
            reading.result(PATIENCE_S)
