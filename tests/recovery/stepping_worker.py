"""A program for test_recovery_leases.py: a worker that makes a step for each line that it reads, and says at which clock it
is then. python stepping_worker.py SERVERS TRANSPORT
"""

from __future__ import annotations

import sys

import numpy as np

import psd_client


def main(servers: str, transport: str) -> None:
    with psd_client.connect(servers, 0, 1, transport=transport, retry_timeout=60) as ps:
        ps.declare({"w": np.zeros(20_000, np.float32)}, psd_client.SGD(lr=1))
        ones = np.ones(20_000, np.float32)
        for _ in sys.stdin:
            values = set(ps.push_pull({"w": ones})["w"].tolist())
            sys.stdout.write(f"{ps.clock} {values} {ps.stats()['rejoins']}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
