"""Raw TCP with the bytes of a step on a sparse table, and no rows: ids there and numbers back, then ids and numbers there and a
word back. A server, or one of its clients."""

from __future__ import annotations

import socket

import numpy as np
import raw_tcp
import rows
from turns import Turns


def serve(connection: socket.socket, dim: int, ids_max: int) -> None:
    """Serve one client, until it goes."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    count = np.zeros(1, np.int64)
    arrived = memoryview(bytearray(ids_max * (8 + 4 * dim)))
    numbers = memoryview(np.ones(ids_max * dim, np.float32)).cast("B")
    try:
        while True:
            raw_tcp.receive(connection, memoryview(count).cast("B"))
            raw_tcp.receive(connection, arrived[: 8 * count[0]])
            raw_tcp.send(connection, numbers[: 4 * dim * count[0]])
            raw_tcp.receive(connection, arrived[: (8 + 4 * dim) * count[0]])
            raw_tcp.send(connection, memoryview(count).cast("B"))
    except ConnectionError:
        pass


def run_client(turns: Turns) -> None:
    """Pull and push when told."""
    turn = rows.Turn(turns.arguments)
    host, port = turns.arguments["address"].rsplit(":", 1)
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    values = np.zeros((turn.shape.ids, turn.shape.dim), np.float32)
    answer = np.zeros(1, np.int64)

    def step() -> None:
        for ids, grads in turn.next():
            count = np.array([len(ids)])
            connection.sendmsg([count, ids])
            raw_tcp.receive(connection, memoryview(values[: len(ids)]).cast("B"))
            raw_tcp.send(connection, memoryview(ids).cast("B"))
            raw_tcp.send(connection, memoryview(grads).cast("B"))
            raw_tcp.receive(connection, memoryview(answer).cast("B"))

    turns.work(step, lambda _: "" if values[0, 0] == 1 else "the bytes that came are not the server's")


def main() -> None:
    """Run a server or a client."""
    turns = Turns()
    if "address" in turns.arguments:
        run_client(turns)
    else:
        shape = rows.Shape(*turns.arguments["shape"])
        turns.serve_each(lambda connection: serve(connection, shape.dim, shape.ids))


if __name__ == "__main__":
    main()
