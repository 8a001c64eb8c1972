"""Armed steps of many connections at once, beside joins, revocations and cuts. `make check-steps` has it at length, and under
ThreadSanitizer: so it needs no psd, nor fixtures of psd's."""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from step_host import SIZES, Connection, Host

WORLD = 8
PUSHES = int(os.environ.get("PSD_STEP_PUSHES", "200"))
"""Of each worker."""


@pytest.mark.parametrize("has_rounds", [False, True], ids=["async", "sync"])
def test_each_push_counts_once_beside_joins_revocations_and_cuts(tmp_path: Path, has_rounds: bool) -> None:
    """And each page that anybody pins meanwhile is whole: what it has is what it says that it has."""
    host = Host(tmp_path / "arena", WORLD, has_rounds=has_rounds)
    is_over = threading.Event()
    connections = [Connection(host, rank) for rank in range(WORLD)]

    def work(rank: int) -> None:
        choice = random.Random(rank)
        try:
            for _ in range(PUSHES):
                connections[rank].push()
                if choice.random() < 0.02:
                    host.leave(rank, returns=True)
            host.leave(rank, returns=False)
        except BaseException:
            host.has_failed.set()
            raise

    def revoke() -> None:
        while not is_over.wait(0.003):
            with host.lock:
                host.ranks.revoke()

    def cut() -> None:
        """All blocks, while no step is under way and no call changes them."""
        while not is_over.wait(0.01):
            with host.lock:
                host.ranks.revoke()
                locks = [lent.core.lock() for lent in host.lent]
                for lock in locks:
                    lock.acquire()
                try:
                    for block in range(len(SIZES)):
                        host.check(block)
                finally:
                    for lock in locks:
                        lock.release()

    def read() -> None:
        """Whenever it may be."""
        last = [0] * len(SIZES)
        while not is_over.wait(0.001):
            for block in range(len(SIZES)):
                version = host.check(block)
                assert version >= last[block]
                last[block] = version

    with ThreadPoolExecutor(WORLD + 3) as pool:
        others = [pool.submit(each) for each in (revoke, cut, read)]
        try:
            list(pool.map(work, range(WORLD)))
        finally:
            is_over.set()
            for connection in connections:
                connection.close()
        for each in others:
            each.result()
    for block in range(len(SIZES)):
        host.check(block)
    assert sum(each.steps + each.calls for each in connections) == WORLD * PUSHES
    assert sum(each.steps for each in connections) > 0
    host.arena.close(remove=True)
