"""Real shards without gRPC, and one worker's session and heartbeats, all in a time that moves when it is told to.

world = World(lease_s=2)
world.enter()
world.faults.run_before("join", shard=1, action=lambda: world.pass_time(5))    # shard 1 answers 5 s later
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from client_faults import Faults

from psd.contract.config import ClientConfig, ServerConfig
from psd.contract.consistency import Consistency
from psd.contract.errors import PsdError
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.contract.layout import Block, Layout
from psd.state.shard import Shard
from psd.state.workers.membership import Worker, tick_s
from psd.v1 import control_pb2, data_pb2
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.shards import RetryPolicy, Shards
from psd_client.lanes.transport import Call, Traffic
from psd_client.lanes.waiting import ShardHealth, WaitReporter
from psd_client.worker.session.heartbeat import Heartbeats
from psd_client.worker.session.session import Session

STEP_S = 0.1


class World:
    """The one worker of a job, and its shards, with a lease of 2 s.

    Args:
        of: another worker's world, which has the shards already.
    """

    def __init__(self, *, of: World | None = None, **config: Any) -> None:
        self.now = 1000.0 if of is None else of.now
        self.faults = Faults()
        shards, lease_s, world_size = 2, 2.0, 1
        self.shards = (
            of.shards
            if of is not None
            else [
                Shard(ServerConfig(index, shards, run_id="r", lease_s=lease_s), now=self.clock, wall=self.clock)
                for index in range(shards)
            ]
        )
        self.lanes: list[Any] = [_Lane(self, index) for index in range(shards)]
        self._tick_s, self._tick_at, self._beat_at = tick_s(lease_s), self.now, self.now
        self.spec = JobSpec(
            world_size,
            tuple(TensorSpec(f"t{i}", (3,), "float64", i) for i in range(shards)),
            tuple(GroupSpec("sgd", ()) for _ in range(shards)),
            Consistency.parse("sync"),
            "mean",
            0,
            "fast",
        )
        addresses = tuple(f"h:{7000 + index}" for index in range(shards))
        self.config = ClientConfig(addresses, 0, world_size, **config)
        health = ShardHealth(addresses, self.clock)
        self.client_shards = Shards(self.lanes, RetryPolicy(self.config.retry_timeout_s, self.clock), health)
        self.session = Session(self.config, self.client_shards, self.clock)
        reporter = WaitReporter(0, 1e9, self.clock)
        self._heartbeats = Heartbeats(0, self.session, self.lanes, health, reporter, self.clock)
        self.session.memberships.on_joining = self._wake

    def clock(self) -> float:
        return self.now

    def _wake(self) -> None:
        self._beat_at = self.now

    def close(self) -> None:
        self.client_shards.close()
        for shard in self.shards:
            shard.close(keep=False)

    def enter(self) -> None:
        """Join and declare, as a program begins."""
        self.session.join()
        self.declare(lambda: None)

    def declare(self, fetch: Callable[[], None]) -> None:
        self.session.declare(self.spec, FlatBuffers(Layout(self.spec, len(self.shards))), fetch)

    def pass_time(self, seconds: float) -> None:
        """The heartbeats' thread and the shards' do what is due meanwhile."""
        until = self.now + seconds
        while self.now < until:
            self.now += STEP_S
            if self.now >= self._beat_at:
                self._beat_at = self.now + self._heartbeats.step()
            if self.now >= self._tick_at:
                self._tick_at = self.now + self._tick_s
                for shard in self.shards:
                    shard.tick()

    def expire(self) -> None:
        """The worker is suspended for longer than its lease."""
        for _ in range(4):
            self.now += self.shards[0]._core.config.lease_s / 2
            for shard in self.shards:
                shard._core.members._last_tick = self.now
                shard.tick()

    def worker(self, shard: int) -> Worker:
        return self.shards[shard]._core.members.worker(0)

    def seen_as(self) -> list[tuple[str, int]]:
        """State and session of the worker at each shard."""
        return [(self.worker(index).state.name, self.worker(index).session) for index in range(len(self.shards))]

    def other_joins(self) -> None:
        """Another program with this rank joins at shard 0."""
        request = control_pb2.JoinRequest(shard_count=len(self.shards), world_size=1, host="elsewhere", pid=7, connection=99)
        self.shards[0].admission.join(request)


class _Lane:
    """The calls of one shard, as transport.Lane has them."""

    transport = "direct"
    is_interruptible = False

    def __init__(self, world: World, shard: int) -> None:
        self.world = world
        self.shard = shard
        self.address = f"h:{7000 + shard}"
        self.traffic = Traffic()
        self.joins: list[control_pb2.JoinRequest] = []
        self.heartbeats: list[control_pb2.HeartbeatRequest] = []

    @property
    def _admission(self) -> Any:
        return self.world.shards[self.shard].admission

    def join(self, request: control_pb2.JoinRequest, call: Call) -> Any:
        with self.world.faults.around("join", self.shard):
            self.joins.append(request)
            return self._admission.join(request)

    def declare(self, request: control_pb2.DeclareRequest, call: Call) -> Any:
        with self.world.faults.around("declare", self.shard):
            reply, ticket = self._admission.declare(request)
            assert ticket is None
            return reply

    def initialize(self, first: data_pb2.InitializeFrame, blocks: Sequence[Block], values: FlatBuffers, call: Call) -> Any:
        init = self._admission.begin_initialize(first.caller, first.layout_digest, first.choice)
        for block in blocks:
            self._admission.initialize_block(init, block.index, memoryview(np.zeros(block.length).data).cast("B"))
        return self._admission.end_initialize(init)

    def begin_heartbeat(
        self, request: control_pb2.HeartbeatRequest, timeout_s: float
    ) -> Callable[[], control_pb2.HeartbeatReply]:
        failed: PsdError | None = None
        self.heartbeats.append(request)
        try:
            self._admission.heartbeat(request)
        except PsdError as error:
            failed = error

        def reply() -> control_pb2.HeartbeatReply:
            if failed is not None:
                raise failed
            return control_pb2.HeartbeatReply()

        return reply

    def leave(self, request: control_pb2.LeaveRequest, timeout_s: float) -> None:
        self._admission.leave(request.caller, failed=request.failed)

    def close(self) -> None:
        return
