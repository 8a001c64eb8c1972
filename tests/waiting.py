"""Waits of tests for what other processes and threads do."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable


def wait_until(is_so: Callable[[], bool], what: str = "what the test waits for", *, timeout_s: float = 100.0) -> None:
    """Until something outside of this thread is so; AssertionError names it if it never is."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"never: {what}"
        threading.Event().wait(0.05)


def is_open(port: int) -> bool:
    """True if somebody listens there."""
    with socket.socket() as dialling:
        return dialling.connect_ex(("127.0.0.1", port)) == 0
