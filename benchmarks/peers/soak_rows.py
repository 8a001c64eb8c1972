"""One worker of benchmarks/table_soak.py: pulls and pushes rows of two tables until it is told to end.

The ids and gradients of a step follow from rank and step, so that whoever knows how many steps there were knows every sum.
"""

from __future__ import annotations

import sys
import threading

import numpy as np
from numpy.typing import NDArray
from turns import Turns

import psd_client

IDS = 2000
COUNTED_ROWS = 20_000
DIM = 4


def counted(rank: int, step: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Ids of the table whose sums are verified, and whole numbers for them."""
    rng = np.random.default_rng((rank, step))
    return rng.integers(0, COUNTED_ROWS, IDS), rng.integers(-4, 5, (IDS, DIM)).astype(np.float32)


def passing(rank: int, step: int) -> NDArray[np.int64]:
    """Ids of the table whose rows come and go: some hot, most of them soon forgotten."""
    rng = np.random.default_rng((rank, step, 1))
    return np.concatenate([rng.zipf(1.3, IDS // 2) % 100_000, 100_000 + step * 10 + rng.integers(0, 2000, IDS // 2)])


def main() -> None:
    """Join, train, say how many steps there were and which sums there are."""
    turns = Turns()
    told = turns.arguments
    rank = told["rank"]
    over = threading.Event()

    def listen() -> None:
        sys.stdin.readline()
        over.set()

    threading.Thread(target=listen, daemon=True).start()
    tables = [
        psd_client.Table("counted", DIM, psd_client.SGD(lr=1.0)),
        psd_client.Table("passing", 16, psd_client.Adagrad(), admit_after=2, expire_steps=told["expire_steps"], max_rows=6000),
    ]
    with psd_client.connect(told["servers"], rank, told["world_size"], transport=told["transport"], wait_timeout=60) as ps:
        ps.declare({}, tables=tables, consistency="async", reduce="sum")
        turns.say(ready=True)
        step = 0
        while not over.is_set():
            ids = passing(rank, step)
            rows = ps.tables["passing"].pull(ids)
            ps.push({}, tables={"counted": counted(rank, step), "passing": (ids, np.ones_like(rows))})
            step += 1
        ps.barrier("all have pushed")
        sums = ps.tables["counted"].pull(np.arange(COUNTED_ROWS))
        turns.say(steps=step, bits=sums.view(np.uint32).tolist() if rank == 0 else [])
        ps.barrier("all have looked")


if __name__ == "__main__":
    main()
