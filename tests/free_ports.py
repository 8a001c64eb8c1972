"""A TCP port for a server that a test starts, and perhaps starts again."""

from __future__ import annotations

import random
import socket

_FIRST, _LAST = 20_000, 32_767
"""Below those that Linux gives to connections by itself: one of these could take a port before its server does."""


def free_port() -> int:
    """A TCP port that nobody uses now."""
    while True:
        port = random.SystemRandom().randint(_FIRST, _LAST)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
