"""TCP between two processes of one machine: without pacing, which some systems do for all connections.

A congestion control that paces, such as BBR, measures the way to the peer, and sends segment after segment by a timer. Within a
machine there is nothing to measure: that only makes more and smaller segments, which cost both sides processor time. A socket
that has begun to pace goes on with it, whatever is chosen later; so this chooses before it connects or listens. Connections to
other machines are as the system would have them. Must not know what is sent.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import Any

UNPACED = b"reno"
"""A congestion control that every Linux has, and that every process may choose."""


def connect_tcp(host: str, port: int, timeout_s: float) -> socket.socket:
    """A connection to the first address of the host that takes one; blocks then. Raises OSError, as of the last address."""
    error: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            unpaced(sock, address)
            sock.settimeout(timeout_s)
            sock.connect(address)
        except OSError as why:
            sock.close()
            error = why
        except BaseException:
            sock.close()
            raise
        else:
            sock.settimeout(None)
            return sock
    raise error or OSError(f"{host}: has no address")


def unpaced(sock: socket.socket, address: tuple[Any, ...]) -> None:
    """Let a TCP socket do without pacing, if it is to connect to an address of loopback, or to listen there."""
    if hasattr(socket, "TCP_CONGESTION") and ipaddress.ip_address(address[0]).is_loopback:
        with contextlib.suppress(OSError):  # it is an optimisation
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, UNPACED)
