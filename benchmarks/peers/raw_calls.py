"""A ping-pong over loopback TCP in C, of the bytes that psd's tcp lane moves for a push_pull of 1 KB: a server, or its clients.

What a small call costs where no interpreter is. Loops are _calls.c; Python starts them and does nothing meanwhile. A process of
clients has one connection, and says when each call began and ended; or several, for load: {"pushes": n} makes n calls on each.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from turns import Turns

OUT_BYTES = 1024 + 144
"""Bytes of a push: gradients, prefixes and heads of two messages."""
IN_BYTES = 1024 + 56
"""Bytes of the answer."""


def connect(address: str) -> socket.socket:
    """A connection to the server."""
    host, port = address.rsplit(":", 1)
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def main() -> None:
    """Serve, or make calls when told."""
    turns = Turns()
    told = turns.arguments
    library = ctypes.CDLL(told["library"])

    def serve(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        library.serve_calls(
            connection.fileno(), ctypes.create_string_buffer(OUT_BYTES), ctypes.c_long(OUT_BYTES), ctypes.c_long(IN_BYTES)
        )

    if "address" not in told:
        turns.serve_each(serve)
        return
    connections = [connect(told["address"]) for _ in range(told.get("connections", 1))]

    def calls(connection: socket.socket, count: int) -> NDArray[np.float64]:
        times, memory = np.zeros((count, 2)), ctypes.create_string_buffer(OUT_BYTES)
        sizes = ctypes.c_long(OUT_BYTES), ctypes.c_long(IN_BYTES), ctypes.c_long(count)
        failed = library.make_calls(connection.fileno(), memory, *sizes, ctypes.c_void_p(times.ctypes.data))
        if failed:
            raise OSError(failed, os.strerror(failed))
        return times

    if "connections" not in told:
        turns.work_in_runs(lambda count: calls(connections[0], count), lambda _: "")
        return
    with ThreadPoolExecutor(len(connections)) as pool:

        def answered(request: dict[str, Any]) -> dict[str, Any]:
            if "verify" in request:
                return {"wrong": ""}
            begun = time.monotonic()
            list(pool.map(lambda connection: calls(connection, request["pushes"]), connections))
            return {"seconds": time.monotonic() - begun}

        turns.answer(answered)


if __name__ == "__main__":
    main()
