"""Raw TCP with the bytes of a step and no arithmetic: the cost of the wire itself. A server, or one of its clients.

duplex: block by block, as a pipelined parameter server moves them: each side has a receiving and a sending thread per
connection, and the answer to block b leaves while block b + 1 arrives. turns: all gradients, then all parameters; with a
single small block that is a ping-pong. Buffers are reused, calls are few: recv_into whole blocks, sendmsg from where they lie.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterable

import numpy as np
import work
from turns import Turns

_PIECE_BYTES = 8 << 20
"""Bytes to receive per call at most: MSG_WAITALL shows no progress before its end."""


def receive(connection: socket.socket, memory: memoryview) -> None:
    """Fill the memory; ConnectionError at the end of the stream."""
    while len(memory):
        count = connection.recv_into(memory, min(len(memory), _PIECE_BYTES), socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionError("the other side has gone")
        memory = memory[count:]


def send(connection: socket.socket, memory: memoryview) -> None:
    """Send all of it."""
    while len(memory):
        memory = memory[connection.sendmsg([memory]) :]


def serve(connection: socket.socket, parameters: memoryview, is_duplex: bool) -> None:
    """Serve one client, until it goes."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        if not is_duplex:
            gradients = memoryview(bytearray(len(parameters)))
            while True:
                receive(connection, gradients)
                send(connection, parameters)
        blocks = work.cut(parameters)
        scratch = memoryview(bytearray(len(blocks[0])))
        arrived: queue.SimpleQueue[memoryview] = queue.SimpleQueue()

        def answer() -> None:
            while True:
                send(connection, arrived.get())

        threading.Thread(target=answer, daemon=True).start()
        while True:
            for block in blocks:
                receive(connection, scratch[: len(block)])
                arrived.put(block)
    except ConnectionError:
        pass


def run_server(turns: Turns, size: int, is_duplex: bool) -> None:
    """Accept clients until the benchmark ends."""
    parameters = memoryview(work.gradient(7, size)).cast("B")
    turns.serve_each(lambda connection: serve(connection, parameters, is_duplex))


def run_client(turns: Turns, size: int, is_duplex: bool) -> None:
    """Push and pull when told."""
    host, port = turns.arguments["address"].rsplit(":", 1)
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    gradients = memoryview(work.gradient(0, size)).cast("B")
    values = np.zeros(size, np.float32)
    parameters = memoryview(values).cast("B")
    sent, received = work.cut(gradients), work.cut(parameters)
    begin: queue.SimpleQueue[Iterable[memoryview]] = queue.SimpleQueue()

    def send_all() -> None:
        while True:
            for block in begin.get():
                send(connection, block)

    threading.Thread(target=send_all, daemon=True).start()

    def duplex() -> None:
        begin.put(sent)
        for block in received:
            receive(connection, block)

    def in_turns() -> None:
        send(connection, gradients)
        receive(connection, parameters)

    def verify(_: list[int]) -> str:
        return "" if np.array_equal(values, work.gradient(7, size)) else "the bytes that came are not the server's"

    turns.work(duplex if is_duplex else in_turns, verify)


def main() -> None:
    """Run a server or a client."""
    turns = Turns()
    run = run_client if "address" in turns.arguments else run_server
    run(turns, work.size_of(turns.arguments["model"]), turns.arguments["pattern"] == "duplex")


if __name__ == "__main__":
    main()
