"""TCP ports for servers that tests start, and perhaps start again: nobody else takes them meanwhile, in any test process."""

from __future__ import annotations

import random
import socket

_FIRST, _LAST = 20_000, 32_767
"""Below those that Linux gives to connections by itself: one of these could take a port before its server does."""


def claimed_port() -> tuple[int, socket.socket]:
    """A TCP port that nobody uses now; and a socket, until whose end no other call returns that port.

    It has the UDP port of that number, which nobody else wants.
    """
    while True:
        port = random.SystemRandom().randint(_FIRST, _LAST)
        claim = socket.socket(type=socket.SOCK_DGRAM)
        try:
            claim.bind(("127.0.0.1", port))
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
        else:
            return port, claim


def free_port() -> int:
    """A TCP port that nobody uses now, claimed as long as this process lives."""
    port, claim = claimed_port()
    claim.detach()  # it stays open
    return port
