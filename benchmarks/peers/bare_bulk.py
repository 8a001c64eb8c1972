"""A push_pull of one small block by the messages of psd's tcp lane and psd's kernel, without shard and client.

Nobody joins, nothing is checked, counted, kept twice or waited for: what is left is what Python costs to build and parse these
messages, and so how near to a raw ping-pong any parameter server in Python can come that speaks so. A server, or its client.
"""

from __future__ import annotations

import socket

import numpy as np
import work
from numpy.typing import NDArray
from turns import Turns

import psd_core
from psd.contract.wire import Disconnected, Kind, Stream
from psd.v1 import bulk_pb2, data_pb2, job_pb2

_HEAD_BYTES_MAX = 1 << 20
_SCALARS = (work.LR, 0.0, 0.0, 0.0)


def serve(stream: Stream, param: NDArray[np.float32]) -> None:
    """Serve one client, until it goes."""
    gradient = np.empty_like(param)
    ends, touched, steps = np.array([param.size], np.uint32), np.ones(1, np.uint8), np.zeros(1, np.uint64)
    try:
        while True:
            _, head, _ = stream.receive()
            bulk_pb2.BulkCall.FromString(head)
            _, head, _ = stream.receive()
            frame = data_pb2.PushFrame.FromString(head)
            stream.read_into(memoryview(gradient).cast("B"))
            psd_core.step_block(
                "sgd",
                param,
                param,
                (),
                (),
                None,
                gradient,
                weight=frame.push.weight,
                scale=1.0,
                segment_ends=ends,
                touched=touched,
                steps_in=steps,
                steps_out=steps,
                scalars=tuple(frame.push.scalars[0].values),
                flags=(),
            )
            answer = data_pb2.PullFrame(block=frame.block, version=frame.push.clock + 1)
            stream.send(Kind.ANSWER, answer.SerializeToString(), param, more=True)
            reply = bulk_pb2.BulkReply(push=data_pb2.PushReply(clock=frame.push.clock + 1, blocks_counted=1))
            stream.send(Kind.REPLY, reply.SerializeToString())
    except Disconnected:
        pass


def run_server(turns: Turns, size: int) -> None:
    """Accept clients until the benchmark ends."""
    turns.serve_each(lambda connection: serve(Stream(connection, _HEAD_BYTES_MAX), np.zeros(size, np.float32)))


def run_client(turns: Turns, size: int) -> None:
    """Push and pull when told."""
    host, port = turns.arguments["address"].rsplit(":", 1)
    stream = Stream(socket.create_connection((host, int(port))), _HEAD_BYTES_MAX)
    gradient, param = work.gradient(0, size), np.zeros(size, np.float32)
    caller = job_pb2.Caller(run_id="run-0123456789abcdef", incarnation=1 << 61, session=1 << 50, rank=0)
    clock = 0

    def step() -> None:
        nonlocal clock
        header = data_pb2.PushHeader(
            caller=caller,
            clock=clock,
            weight=1.0,
            layout_digest=bytes(16),
            scalars=[data_pb2.GroupScalars(values=_SCALARS)],
            is_finite=psd_core.first_nonfinite(gradient) < 0,
        )
        call = bulk_pb2.BulkCall(method=bulk_pb2.BULK_METHOD_PUSH_PULL, timeout_s=120)
        stream.send(Kind.CALL, call.SerializeToString(), more=True)
        stream.send(Kind.FRAME, data_pb2.PushFrame(push=header, block=0, last=True).SerializeToString(), gradient)
        _, head, _ = stream.receive()
        data_pb2.PullFrame.FromString(head)
        stream.read_into(memoryview(param).cast("B"))
        _, head, _ = stream.receive()
        clock = bulk_pb2.BulkReply.FromString(head).push.clock

    turns.work(step, lambda pushes: work.difference(param, pushes))


def main() -> None:
    """Run a server or a client."""
    turns = Turns()
    run = run_client if "address" in turns.arguments else run_server
    run(turns, work.size_of(turns.arguments["model"]))


if __name__ == "__main__":
    main()
