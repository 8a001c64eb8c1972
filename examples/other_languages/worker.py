"""A worker made from psd's protocol alone: stubs of gRPC, NumPy, and none of psd's code. docs/protocol.md explains it.

    psd-run --shards 2 --workers 2 examples/other_languages/worker.py 20

Each worker pushes its rank + 1 for every element, so that parameters say how much has counted. Shards may be killed, and the
job may go back to a checkpoint. worker.js is the same in JavaScript.
"""

import contextlib
import json
import os
import secrets
import sys
import threading
import time
from types import SimpleNamespace

import grpc
import numpy as np

from psd.v1 import control_pb2, control_pb2_grpc, data_pb2, data_pb2_grpc, job_pb2

# Blocks have up to 4 MiB, which is gRPC's own limit of a message; and a shard that is back is to be found at once.
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_reconnect_backoff_ms", 500)]
WAIT_S = 600.0  # for other workers
PATIENCE_S = 120.0  # with a shard that is away


class Refused(Exception):
    """A call that a shard has refused, or that has failed for long; docs/protocol.md says what to do by its reason."""

    def __init__(self, error):
        super().__init__(error.details())
        metadata = dict(error.trailing_metadata() or ())
        self.reason = metadata.get("psd-reason", "")
        self.detail = json.loads(metadata.get("psd-detail-bin", b"{}"))


class Worker:
    """One worker of a synchronous job of float32 tensors. They lie flat in `values`: first the initial ones, then the job's."""

    def __init__(self, servers, rank, spec, values):
        self.rank, self.spec, self.values = rank, spec, values
        self.calls = []  # of each shard, by the method's name
        for server in servers:
            channel = grpc.insecure_channel(server, options=OPTIONS)
            stubs = control_pb2_grpc.ControlServiceStub(channel), data_pb2_grpc.DataServiceStub(channel)
            self.calls.append(SimpleNamespace(**vars(stubs[0]), **vars(stubs[1])))
        self.shards = range(len(servers))
        self.callers = [job_pb2.Caller() for _ in servers]  # run, life of the shard, rank, session: who speaks to whom
        self.connection = secrets.randbelow(2**53 - 1) + 1
        self.run_id, self.session, self.timeline, self.clock, self.lease_s = "", 0, 0, 0, 10.0
        self.cuts = {}  # by shard, the checkpoints that its last reply has announced
        for shard in self.shards:
            threading.Thread(target=self.beat, args=(shard,), daemon=True).start()
        self.enter()

    def ask(self, shard, method, request, **fields):
        """The answer to a call, which is made until a shard gives one, in whatever life: a push counts once all the same."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                answer = getattr(self.calls[shard], method)(request(caller=self.callers[shard], **fields), timeout=WAIT_S)
                return list(answer) if method in ("Pull", "PushPull") else answer
            except grpc.RpcError as error:
                refused = Refused(error)
                if refused.reason == "ShardRestarted":
                    self.join(shard, resume=True)
                elif (
                    refused.reason in ("", "Draining") and time.monotonic() < until
                ):  # the connection is broken, or soon will be
                    time.sleep(0.1)
                else:
                    raise refused from error

    def join(self, shard, *, resume=False):
        """Enter as a new session, which shard 0 issues; or go on with the present one at a shard that was restarted."""
        fields = {
            "run_id": self.run_id,
            "shard_index": shard,
            "shard_count": len(self.shards),
            "rank": self.rank,
            "world_size": self.spec.world_size,
            "session": self.session if shard or resume else 0,
            "resume": resume,
            "timeline": self.timeline,
            "connection": self.connection,
        }
        reply = self.ask(shard, "Join", lambda caller: control_pb2.JoinRequest(**fields))  # noqa: ARG005, who joins is nobody yet
        if not resume:
            self.run_id, self.session, self.lease_s = reply.run_id, reply.session, reply.lease_s
        if reply.session == self.session:  # else the program has joined anew meanwhile
            life = {"run_id": reply.run_id, "incarnation": reply.incarnation}
            self.callers[shard] = job_pb2.Caller(**life, rank=self.rank, session=reply.session)
        return reply

    def enter(self):
        """Join, declare the job, and fetch its values: at first, and when it has gone back to a checkpoint."""
        while True:
            try:
                self.clock, self.cuts = 0, {}  # what heartbeats say until all shards have told the clock
                joined = [self.join(shard) for shard in self.shards]
                if len({(reply.timeline, reply.checkpoint) for reply in joined}) > 1 or any(r.is_tentative for r in joined):
                    self.bring_together(joined)
                    continue
                self.timeline, self.orders, self.barriers = joined[0].timeline, joined[0].orders, 0
                self.clock = self.since = max(reply.clock for reply in joined)
                self.declare()
                return self.pull()
            except Refused as error:
                if error.reason != "RolledBack":  # else another worker was bringing them together
                    raise

    def bring_together(self, joined):
        """Have all shards go back to the checkpoint with which one of them, which has lost its memory, has come back."""
        latest = max(reply.timeline for reply in joined)
        begun = [r for r in joined if r.is_tentative] or [r for r in joined if r.timeline == latest]
        fields = {
            "run_id": self.run_id,
            "checkpoint": min(reply.checkpoint for reply in begun if reply.checkpoint),
            "timeline": max(latest, self.timeline) + 1,
            "workers": next((reply.workers for reply in joined if not reply.is_tentative), []),
        }
        for shard, reply in enumerate(joined):
            request = control_pb2.RollbackRequest(**fields, incarnation=reply.incarnation)
            self.ask(shard, "Rollback", lambda caller, request=request: request)  # noqa: ARG005

    def declare(self):
        """Agree on the job, and learn where its elements are; provide the initial values if this worker is chosen to."""
        replies = [self.ask(shard, "Declare", control_pb2.DeclareRequest, spec=self.spec) for shard in self.shards]
        self.digest, self.clock = replies[0].layout_digest, max(self.clock, *(reply.clock for reply in replies))
        self.blocks = [reply.layout.blocks for reply in replies]
        for shard in (
            [*self.shards[1:], 0] if replies[0].initializer else []
        ):  # shard 0 last: when it has its values, so have all
            self.ask(shard, "Initialize", self.initial_frames, blocks=self.blocks[shard], choice=replies[0].choice)

    def initial_frames(self, caller, blocks, choice):
        """One frame for each block, or an empty one."""
        frames = [data_pb2.InitializeFrame(block=b.index, payload=payload(b, self.values)) for b in blocks]
        frames = frames or [data_pb2.InitializeFrame()]
        frames[0].MergeFrom(data_pb2.InitializeFrame(caller=caller, layout_digest=self.digest, choice=choice))
        return iter(frames)

    def pull(self):
        """Fetch all parameters as of the worker's clock."""
        for shard in self.shards:
            self.keep(shard, self.ask(shard, "Pull", data_pb2.PullRequest, clock=self.clock, layout_digest=self.digest))

    def keep(self, shard, frames):
        """Put the numbers of blocks to where they belong."""
        blocks = {block.index: block for block in self.blocks[shard]}
        for frame in frames:
            block, numbers = blocks[frame.block], np.frombuffer(frame.payload, "<f4")
            for tensor, start, length in zip(block.tensors, block.starts, block.lengths, strict=True):
                self.values[tensor][start : start + length], numbers = numbers[:length], numbers[length:]

    def push_pull(self, gradients, scalars):
        """Send a gradient, and fetch the parameters after its round; `scalars` has a list of numbers for each group."""
        clocks = []
        for shard in self.shards:
            if blocks := [block for block in self.blocks[shard] if block.is_trained]:
                fields = {"blocks": blocks, "gradients": gradients, "scalars": scalars}
                *frames, last = self.ask(shard, "PushPull", self.push_frames, **fields)
                self.keep(shard, frames)
                clocks.append(last.push.clock)
                self.cuts[shard] = last.push.cuts
                self.orders = self.orders if shard else last.push.orders
        self.clock = max(clocks)
        if min(clocks) < self.clock:  # it came late at one shard, and in time at another
            self.pull()

    def push_frames(self, caller, blocks, gradients, scalars):
        """One frame for each block. (rank, session, clock) is the push's name, however often it is sent."""
        values = [data_pb2.GroupScalars(values=numbers) for numbers in scalars]
        header = data_pb2.PushHeader(caller=caller, clock=self.clock, since=self.since, weight=1, scalars=values)
        header.layout_digest = self.digest
        header.cuts.extend(self.carried())
        for block in blocks:
            is_first, is_last = block is blocks[0], block is blocks[-1]
            numbers = payload(block, gradients)
            yield data_pb2.PushFrame(push=header if is_first else None, block=block.index, last=is_last, payload=numbers)

    def carried(self):
        """The checkpoints that are announced, which workers carry from shard to shard."""
        return list({cut.id: cut for cuts in [*self.cuts.values()] for cut in cuts}.values())[-8:]

    def barrier(self, name):
        """Wait until all workers are there."""
        self.barriers += 1
        self.ask(0, "Barrier", control_pb2.BarrierRequest, name=name, seq=self.barriers)

    def leave(self):
        """End this worker's part: nobody waits for it any more."""
        left_at = time.time()  # the same for all shards: the last checkpoint has it
        for shard in self.shards:
            self.ask(shard, "Leave", control_pb2.LeaveRequest, left_at=left_at)

    def beat(self, shard):
        """Send heartbeats, whatever else waits: a shard that hears nothing ends the session."""
        while True:
            time.sleep(self.lease_s / 5)
            with contextlib.suppress(Refused):  # the program's next call hears it, too
                if session := self.callers[shard].session:
                    cuts = self.ask(shard, "Heartbeat", self.beat_request).cuts
                    if session == self.session:  # else the job has gone back meanwhile, before that checkpoint
                        self.cuts[shard] = cuts

    def beat_request(self, caller):
        """A heartbeat with the clock of the present session, also if the one before was not answered."""
        return control_pb2.HeartbeatRequest(caller=caller, clock=self.clock, cuts=self.carried())


def payload(block, values):
    """A block's numbers: those of its segments, end to end."""
    runs = zip(block.tensors, block.starts, block.lengths, strict=True)
    return np.concatenate([values[tensor][start : start + length] for tensor, start, length in runs]).tobytes()


def main():
    """Make as many steps as the argument says."""
    rank, sizes = int(os.environ["PSD_RANK"]), {"w": 300_000, "b": 7}
    spec = job_pb2.JobSpec(
        world_size=int(os.environ["PSD_WORLD_SIZE"]),
        mode=job_pb2.CONSISTENCY_MODE_SYNC,
        reduction=job_pb2.REDUCTION_SUM,
        groups=[job_pb2.GroupSpec(rule="sgd")],
        tensors=[job_pb2.TensorSpec(name=name, shape=[size], dtype=job_pb2.DTYPE_FLOAT32) for name, size in sizes.items()],
    )
    values = [np.zeros(size, "<f4") for size in sizes.values()]
    gradients = [np.full(size, rank + 1, "<f4") for size in sizes.values()]
    worker = Worker(os.environ["PSD_SERVERS"].split(","), rank, spec, values)
    while worker.clock < int(sys.argv[1]) and not 0 < worker.orders.ends_at <= worker.clock:
        try:
            worker.push_pull(gradients, [[1.0, 0.0, 0.0, 0.0]])  # lr, momentum, dampening, weight_decay
        except Refused as error:
            if error.reason != "RolledBack":
                raise
            worker.enter()
        print(f"step {worker.clock}", flush=True)
    worker.barrier("end")
    worker.leave()
    print(f"values {sorted({float(value) for tensor in values for value in tensor})}", flush=True)


if __name__ == "__main__":
    main()
