"""The step by hand: memory that a server and its workers share, and a byte each way. No names of pushes, and nothing that
survives a kill.

The server waits for a byte of each worker, applies SGD to all gradients from one copy of the parameters to another, with psd's
kernel, and answers with a byte each. So what psd takes beyond it is psd's own.
"""

from __future__ import annotations

import mmap
import socket
from pathlib import Path

import numpy as np
import work
from numpy.typing import NDArray
from turns import Turns

import psd_core

COPIES = 2
BLOCK = 1 << 20
"""Elements that are updated at a time."""


def memory_of(path: str, workers: int, size: int) -> list[NDArray[np.float32]]:
    """The copies of the parameters, then the gradient of each worker."""
    with Path(path).open("r+b") as file:
        whole = np.frombuffer(mmap.mmap(file.fileno(), 4 * size * (COPIES + workers)), np.float32)
    return np.split(whole, COPIES + workers)


def serve(turns: Turns, workers: int, size: int) -> None:
    """Apply the rounds of all workers until the benchmark ends."""
    arrays = memory_of(turns.arguments["memory"], workers, size)
    grads = arrays[COPIES:]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(turns.arguments["address"])
    listener.listen()
    turns.end_with_input()
    connections = [listener.accept()[0] for _ in range(workers)]
    touched, steps = np.ones(1, np.uint8), np.zeros(1, np.uint64)
    how = {"weight": 1, "scale": 1, "touched": touched, "steps_in": steps, "steps_out": steps, "flags": ()}
    done = 0
    while [connection.recv(1) for connection in connections] == [b"x"] * workers:
        before, after = arrays[done % COPIES], arrays[(done + 1) % COPIES]
        for start in range(0, size, BLOCK):
            block = slice(start, min(start + BLOCK, size))
            ends = np.array([block.stop - start], np.uint32)
            sum_ = None if workers == 1 else grads[0][block]
            for grad in grads[1:-1]:  # a sum of more than two needs memory of its own
                sum_ = sum_ + grad[block]  # type: ignore[operator]
            scalars = [work.LR, 0, 0, 0]
            psd_core.step_block(
                "sgd", before[block], after[block], [], [], sum_, grads[-1][block], segment_ends=ends, scalars=scalars, **how
            )
        done += 1
        for connection in connections:
            connection.send(b"x")


def work_with(turns: Turns, workers: int, size: int) -> None:
    """Push and pull when told."""
    arrays = memory_of(turns.arguments["memory"], workers, size)
    arrays[COPIES + turns.arguments["rank"]][...] = work.gradient(turns.arguments["rank"], size)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(turns.arguments["address"])

    def step() -> None:
        connection.send(b"x")
        connection.recv(1)

    turns.work(step, lambda pushes: work.difference(arrays[pushes[0] % COPIES], pushes))


def main() -> None:
    """Run the server or a worker."""
    turns = Turns()
    told = turns.arguments
    (work_with if "rank" in told else serve)(turns, told["world_size"], work.size_of(told["model"]))


if __name__ == "__main__":
    main()
