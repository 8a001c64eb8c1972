"""A program for test_recovery_attached.py: workers of rank 0, one after the other, each killed (-9) while it pushes.

python killed_workers.py SERVER COUNT SIZE SEED. Forks them, because starting Python that often would take a minute.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading

import numpy as np

import psd_client

INSTANT_MAX_S = 0.02


def push_for_ever(server: str, size: int, begun: int) -> None:
    """Says on the descriptor `begun` that a push has been answered."""
    ps = psd_client.connect(server, 0, 1, transport="shm")
    ps.declare({"w": np.zeros(size, np.float32)}, psd_client.SGD(lr=1), consistency="async")
    ones = np.ones(size, np.float32)
    ps.push_pull({"w": ones})
    os.write(begun, b"\0")
    while True:
        ps.push_pull({"w": ones})


def main(server: str, count: int, size: int, seed: int) -> None:
    source = random.Random(seed)
    for _ in range(count):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                push_for_ever(server, size, writing)
            finally:
                os._exit(1)
        os.close(writing)
        assert os.read(reading, 1), "the worker has failed"
        threading.Event().wait(source.random() * INSTANT_MAX_S)  # the instant itself is random
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
