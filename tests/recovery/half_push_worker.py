"""A program for test_recovery_half_push.py: a worker that trains for some steps, and then stops in the middle of a push.

python half_push_worker.py SERVERS RANK WORLD_SIZE STEPS BLOCKS AGGREGATION TRANSPORT. The last push has BLOCKS blocks for shard
0, and none for the others; with BLOCKS = 0 it is not begun. Says "here" when it has come there.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import half_push_job

from psd.v1 import data_pb2
from psd_client.lanes.overlap_feed import Feed
from psd_client.lanes.transport import Call, GradientPart, Scope


def main(servers: str, rank: int, world_size: int, steps: int, blocks: int, aggregation: str, transport: str) -> None:
    with half_push_job.connected(servers, rank, world_size, aggregation, transport) as (ps, params):
        for step in range(steps):
            params = ps.push_pull(half_push_job.gradients(params, rank, step))
        if blocks:
            before = 1 + world_size * steps  # the initial values, and what all have pushed
            push_half(servers.split(",")[0], ps, half_push_job.gradients(params, rank, steps), blocks, before)
        sys.stdout.write("here\n")
        sys.stdout.flush()
        threading.Event().wait()


class Half(Feed):
    """Has so many blocks of shard 0, and never another one."""

    def __init__(self, layout: Any, count: int) -> None:
        super().__init__(layout)
        for block in layout.blocks_of(0)[:count]:
            self._put(block, None)


def push_half(server: str, ps: Any, grads: dict[str, Any], blocks: int, before: int) -> None:
    """Returns when shard 0, which has received all its blocks `before` times, has so many more; the call stays open."""
    layout = ps._worker._exchange._layout
    header = data_pb2.PushHeader(
        caller=ps._worker._session.caller(0),
        clock=ps.clock,
        weight=1,
        layout_digest=layout.digest,
        scalars=[data_pb2.GroupScalars(values=half_push_job.SCALARS)],
        decisions=ps._worker._session.decisions,
    )
    ps._worker.gradients.views[0][...] = grads["w"]  # the job has a single tensor
    part = GradientPart(layout.blocks_of(0), ps._worker.gradients, None, Half(layout, blocks), header=header)
    sent = before * sum(block.nbytes for block in part.blocks) + sum(block.nbytes for block in part.blocks[:blocks])
    lane = ps._worker._shards.lanes[0]
    pushing = threading.Thread(target=lane.push, args=(part, Call(100, Scope())), daemon=True)
    pushing.start()
    while half_push_job.bytes_received(server) < sent:
        assert pushing.is_alive()
        threading.Event().wait(0.01)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:6]), *sys.argv[6:])
