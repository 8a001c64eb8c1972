"""One worker of benchmarks/soak.py: trains until it is told to end, and keeps count in a file that survives its death.

The parameters have one slice per rank; a worker's gradient is one in its own slice, so that the slice counts its pushes. The
file has two numbers: pushes begun, pushes answered.
"""

from __future__ import annotations

import json
import mmap
import sys
import threading
import time
from pathlib import Path

import numpy as np
from turns import Turns
from work import COUNTS, LR

import psd_client


def main() -> None:
    """Join, train, leave."""
    turns = Turns()
    told = turns.arguments
    rank, world, size = told["rank"], told["world_size"], told["slice_size"]
    with Path(told["counts"]).open("r+b") as file, mmap.mmap(file.fileno(), COUNTS.size) as counts:
        over = threading.Event()
        asked: list[str] = []

        def listen() -> None:
            asked.append(sys.stdin.readline())
            over.set()

        threading.Thread(target=listen, daemon=True).start()
        with psd_client.connect(told["servers"], rank, world, transport=told["transport"], wait_timeout=60) as ps:
            ps.declare(
                {"w": np.zeros((world, size), np.float32)},
                psd_client.SGD(lr=LR),
                aggregation="exact",
                reduce="sum",
            )
            gradient = np.zeros((world, size), np.float32)
            gradient[rank] = 1
            turns.say(ready=True)
            done = 0
            while not over.is_set():
                COUNTS.pack_into(counts, 0, done + 1, done)
                ps.push_pull({"w": gradient})
                done += 1
                COUNTS.pack_into(counts, 0, done, done)
                time.sleep(told["pause_s"])
            if asked and json.loads(asked[0] or "{}").get("values"):
                values = ps.pull()["w"]
                turns.say(counted=[[float(part.min()) / -LR, float(part.max()) / -LR] for part in values])
        turns.say(left=True)


if __name__ == "__main__":
    main()
