"""Helpers of the rim's tests: stock generated stubs, and a worker of a few lines on top of them. No psd_client."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grpc
import numpy as np

from psd.v1 import control_pb2, control_pb2_grpc, data_pb2, data_pb2_grpc, job_pb2

TIMEOUT_S = 100.0
SGD = (1.0, 0.0, 0.0, 0.0)
MODES = {
    "sync": job_pb2.CONSISTENCY_MODE_SYNC,
    "async": job_pb2.CONSISTENCY_MODE_ASYNC,
    "ssp": job_pb2.CONSISTENCY_MODE_SSP,
}


def spec(world_size: int = 2, *, blocks: int = 1, size: int = 3, mode: str = "sync", bound: int = 0) -> job_pb2.JobSpec:
    """A job of so many blocks: each group is a space of its own, and a small space is one block."""
    return job_pb2.JobSpec(
        world_size=world_size,
        mode=MODES[mode],
        staleness_bound=bound,
        reduction=job_pb2.REDUCTION_MEAN,
        groups=[job_pb2.GroupSpec(rule="sgd") for _ in range(blocks)],
        tensors=[job_pb2.TensorSpec(name=f"t{i}", shape=[size], dtype=job_pb2.DTYPE_FLOAT32, group=i) for i in range(blocks)],
    )


def failure(call: Any, *args: Any, **kwargs: Any) -> grpc.RpcError:
    """The error that a call ends in."""
    try:
        answer = call(*args, **kwargs)
        if isinstance(answer, Iterator):
            list(answer)
    except grpc.RpcError as error:
        return error
    raise AssertionError(f"the call did not fail: {answer}")


def reason(error: grpc.RpcError) -> str:
    """psd's name of an error."""
    return str(dict(error.trailing_metadata()).get("psd-reason", ""))


def detail(error: grpc.RpcError) -> Any:
    """The facts that travel with an error."""
    return json.loads(dict(error.trailing_metadata())["psd-detail-bin"])


class RawWorker:
    """One worker over stock stubs. `channel` may be shared."""

    def __init__(
        self, channel: grpc.Channel, rank: int = 0, world_size: int = 2, *, shard: int = 0, shards: int = 1, session: int = 0
    ) -> None:
        self.channel = channel
        self.control = control_pb2_grpc.ControlServiceStub(channel)
        self.data = data_pb2_grpc.DataServiceStub(channel)
        joined = self.control.Join(
            control_pb2.JoinRequest(
                shard_index=shard, shard_count=shards, rank=rank, world_size=world_size, session=session, host="raw"
            ),
            timeout=TIMEOUT_S,
        )
        self.caller = job_pb2.Caller(run_id=joined.run_id, incarnation=joined.incarnation, rank=rank, session=joined.session)
        self.session = joined.session
        self.clock = joined.clock
        self.digest = b""
        self.groups = 1
        self.barriers = 0

    def declare(
        self,
        job: job_pb2.JobSpec,
        value: float = 0.0,
        blocks: Sequence[int] | None = None,
        *,
        payloads: Sequence[bytes] | None = None,
    ) -> None:
        """Declare, and initialize if chosen. Without `payloads`, small jobs only, whose blocks are their groups."""
        reply = self.control.Declare(control_pb2.DeclareRequest(caller=self.caller, spec=job), timeout=TIMEOUT_S)
        self.digest, self.groups = reply.layout_digest, len(job.groups)
        if reply.initializer:
            if payloads is None:
                payloads = [np.full(job.tensors[0].shape[0], value, np.float32).tobytes()] * self.groups
            frames = [
                data_pb2.InitializeFrame(block=b, payload=payloads[b])
                for b in (range(len(payloads)) if blocks is None else blocks)
            ]
            frames = frames or [data_pb2.InitializeFrame()]
            frames[0].caller.CopyFrom(self.caller)
            frames[0].layout_digest, frames[0].choice = self.digest, reply.choice
            assert self.data.Initialize(iter(frames), timeout=TIMEOUT_S).accepted

    def frames(
        self, clock: int, gradients: Iterable[Any], *, weight: float = 1.0, scalars: Sequence[float] = SGD
    ) -> list[data_pb2.PushFrame]:
        """The frames of a push; the blocks are numbered from 0."""
        frames = [
            data_pb2.PushFrame(block=index, payload=np.asarray(gradient, np.float32).tobytes())
            for index, gradient in enumerate(gradients)
        ]
        frames[0].push.CopyFrom(
            data_pb2.PushHeader(
                caller=self.caller,
                clock=clock,
                weight=weight,
                layout_digest=self.digest,
                scalars=[data_pb2.GroupScalars(values=scalars) for _ in range(self.groups)],
            )
        )
        frames[-1].last = True
        return frames

    def push(self, clock: int, gradients: Iterable[Any], *, timeout: float = TIMEOUT_S) -> data_pb2.PushReply:
        return self.data.Push(iter(self.frames(clock, gradients)), timeout=timeout)

    def pull_request(self, clock: int) -> data_pb2.PullRequest:
        return data_pb2.PullRequest(caller=self.caller, clock=clock, layout_digest=self.digest)

    def pull(self, clock: int, *, timeout: float = TIMEOUT_S) -> dict[int, list[float]]:
        frames = self.data.Pull(self.pull_request(clock), timeout=timeout)
        return {f.block: np.frombuffer(f.payload, np.float32).tolist() for f in frames}

    def barrier_request(self, name: str) -> control_pb2.BarrierRequest:
        self.barriers += 1
        return control_pb2.BarrierRequest(caller=self.caller, name=name, seq=self.barriers)

    def heartbeat(self, clock: int = 0) -> control_pb2.HeartbeatReply:
        return self.control.Heartbeat(control_pb2.HeartbeatRequest(caller=self.caller, clock=clock), timeout=TIMEOUT_S)

    def leave(self) -> None:
        self.control.Leave(control_pb2.LeaveRequest(caller=self.caller), timeout=TIMEOUT_S)
