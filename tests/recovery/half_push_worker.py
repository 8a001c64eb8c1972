"""A program for test_recovery_half_push.py: a worker that trains for some steps, and then stops in the middle of a push.

python half_push_worker.py SERVERS RANK WORLD_SIZE STEPS BLOCKS AGGREGATION. The last push has BLOCKS blocks for shard 0, and
none for the others, over stock stubs; with BLOCKS = 0 it is not begun. Says "here" when it has come there.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import half_push_job

from psd.v1 import data_pb2, data_pb2_grpc


def main(servers: str, rank: int, world_size: int, steps: int, blocks: int, aggregation: str) -> None:
    with half_push_job.connected(servers, rank, world_size, aggregation) as (ps, params):
        for step in range(steps):
            params = ps.push_pull(half_push_job.gradients(params, rank, step))
        if blocks:
            push_half(servers.split(",")[0], ps, half_push_job.gradients(params, rank, steps), blocks)
        sys.stdout.write("here\n")
        sys.stdout.flush()
        threading.Event().wait()


def push_half(server: str, ps: Any, grads: dict[str, Any], blocks: int) -> None:
    """Returns when shard 0 has so many blocks; the call stays open."""
    layout = ps._exchange._layout
    plans = layout.blocks_of(0)[:blocks]
    caller = ps._session.caller(0)
    never = threading.Event()

    def frames() -> Iterator[data_pb2.PushFrame]:
        for plan in plans:
            frame = data_pb2.PushFrame(block=plan.index, payload=half_push_job.part_of(grads, layout, plan).tobytes())
            if plan is plans[0]:
                frame.push.CopyFrom(
                    data_pb2.PushHeader(
                        caller=caller,
                        clock=ps.clock,
                        weight=1,
                        layout_digest=layout.digest,
                        scalars=[data_pb2.GroupScalars(values=half_push_job.SCALARS)],
                        decisions=ps._session.decisions,
                    )
                )
            yield frame
        never.wait()

    channel = grpc.insecure_channel(server)
    sent = half_push_job.bytes_received(server) + sum(plan.nbytes for plan in plans)
    call = data_pb2_grpc.DataServiceStub(channel).Push.future(frames(), timeout=100)  # gRPC cancels a call that is forgotten
    while half_push_job.bytes_received(server) < sent:
        assert not call.done(), call.exception()
        never.wait(0.01)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6])
