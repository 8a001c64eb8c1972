"""A program for test_recovery_async.py: a worker that pushes ones until somebody ends it, and says after each push how many it
knows the shards to have. python dying_worker.py SERVERS RANK WORLD_SIZE SIZE TRANSPORT
"""

from __future__ import annotations

import sys

import numpy as np

import psd_client


def main(servers: str, rank: int, world_size: int, size: int, transport: str) -> None:
    with psd_client.connect(servers, rank, world_size, transport=transport, retry_timeout=60) as ps:
        ps.declare({"w": np.zeros(size, np.float32)}, psd_client.SGD(lr=1), consistency="async", reduce="sum")
        ones = np.ones(size, np.float32)
        count = 0
        while True:
            ps.push({"w": ones})
            count += 1
            sys.stdout.write(f"{count}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5])
