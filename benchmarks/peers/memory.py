"""The cost of memory alone, on one core: a memcpy of the parameters, or psd's SGD kernel from one copy of them to another."""

from __future__ import annotations

import numpy as np
import work
from turns import Turns

import psd_core


def main() -> None:
    """Take turns with one of the two."""
    turns = Turns()
    size = work.size_of(turns.arguments["model"])
    grad = psd_core.aligned_empty(size, np.float32)
    grad[...] = work.gradient(0, size)
    copies = [psd_core.aligned_empty(size, np.float32) for _ in range(2)]
    for copy in copies:
        copy[...] = 0
    ends, touched = np.array([size], np.uint32), np.ones(1, np.uint8)
    steps = np.zeros(1, np.uint64)
    done = 0

    def memcpy() -> None:
        np.copyto(copies[1], grad)

    def sgd() -> None:
        nonlocal done
        psd_core.step_block(
            "sgd",
            copies[done % 2],
            copies[(done + 1) % 2],
            [],
            [],
            None,
            grad,
            weight=1,
            scale=1,
            segment_ends=ends,
            touched=touched,
            steps_in=steps,
            steps_out=steps,
            scalars=[work.LR, 0, 0, 0],
            flags=(),
        )
        done += 1

    def verify(pushes: list[int]) -> str:
        if turns.arguments["pattern"] == "sgd":
            return work.difference(copies[done % 2], pushes)
        return "" if np.array_equal(copies[1], grad) else "the copy differs"

    turns.work(sgd if turns.arguments["pattern"] == "sgd" else memcpy, verify)


if __name__ == "__main__":
    main()
