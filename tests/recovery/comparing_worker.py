"""A program for test_recovery_differences.py: a worker that makes steps until somebody ends it, and says after each which bits
it has of which version of each block. python comparing_worker.py SERVERS RANK TRANSPORT CODEC
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator

import numpy as np

import psd_client

SIZE = 300_000


def versions(servers: str, rank: int, transport: str, codec: str) -> Iterator[dict[str, str]]:
    """After each step: a digest for each block and version. Gradients follow from the parameters, so an error would stay."""
    with psd_client.connect(servers, rank, 2, transport=transport, retry_timeout=60, wait_timeout=100) as ps:
        initial = np.random.default_rng(1).standard_normal(SIZE).astype(np.float32)
        params = ps.declare({"w": initial}, psd_client.SGD(lr=0.1), pull=codec)
        while True:
            params = ps.push_pull({"w": np.sin(params["w"] + rank)})
            received = ps._worker.declared.parameters
            yield {
                f"{block.index}@{received.versions[block.index]}": hashlib.sha256(received.block(block.index)).hexdigest()
                for block in received.layout.blocks
            }


def main(servers: str, rank: int, transport: str, codec: str) -> None:
    for found in versions(servers, rank, transport, codec):
        sys.stdout.write(" ".join(f"{name}={digest}" for name, digest in found.items()) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
