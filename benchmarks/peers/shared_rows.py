"""Rows in memory that all workers share, gathered and updated by loops in C that know their places: no server, no index, no
order among workers, and nothing that outlives a kill."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import rows
from numpy.typing import NDArray
from turns import Turns


def address(array: NDArray[np.generic]) -> ctypes.c_void_p:
    """An array as C takes it."""
    return ctypes.c_void_p(array.ctypes.data)


def main() -> None:
    """Take turns."""
    turns = Turns()
    told = turns.arguments
    turn = rows.Turn(told)
    dim, library = turn.shape.dim, ctypes.CDLL(told["library"])
    with Path(told["memory"]).open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.float32)
    out = np.empty((turn.shape.ids, dim), np.float32)

    def step() -> None:
        for ids, grads in turn.next():
            library.gather(address(memory), address(ids), len(ids), dim, address(out))
            library.adagrad(address(memory), address(ids), len(ids), dim, address(grads))

    def verify(pushes: list[int]) -> str:
        return turn.check.difference(memory.reshape(-1, 2, dim)[turn.check.ids, 0], pushes[told["rank"]])

    turns.work(step, verify)


if __name__ == "__main__":
    main()
