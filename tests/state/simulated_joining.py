"""The part of a simulated worker that enters the job: joins, declares, provides initial values. As generators over shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from shard_driver import Killed

from psd.contract.errors import StateLost
from psd.state.shard import Shard
from psd.v1 import control_pb2, job_pb2


class JoiningWorker:
    """A worker that enters, as often as its sessions end; see psd_client/session.py."""

    world: Any
    rank: int
    session: int
    incarnations: list[int]
    clock: int
    decisions: list[job_pb2.Decision]
    sent: Any
    barrier_seq: int
    call: Callable[..., Iterator[Any]]
    caller: Callable[[int], Any]
    join_request: Callable[..., Any]
    pull_everywhere: Callable[[], Iterator[Any]]

    def enter(self) -> Iterator[Any]:
        """Join everywhere, declare, and pull; again from the start where a shard died before it had its values."""
        while True:
            yield from self.join()
            try:
                yield from self.declare()
                break
            except StateLost:
                assert not self.world.was_initialized, "a shard lost values that the job was built on"
        self.world.oracle.entered[self.rank, self.session] = self.clock
        yield from self.pull_everywhere()

    def join(self) -> Iterator[Any]:
        self.session, self.incarnations, self.sent, self.barrier_seq = 0, [], None, 0
        session, clocks = 0, []
        for index in range(len(self.world.shards)):
            reply = None
            while reply is None:
                shard = yield from self.world.running(index)
                try:
                    reply = shard.admission.join(self.join_request(index, session))
                except Killed:
                    self.world.kill(index)
            if index == 0:
                session, self.decisions = reply.session, list(reply.decisions)
            self.incarnations.append(reply.incarnation)
            clocks.append(reply.clock)
            yield None
        self.session, self.clock = session, max(clocks)

    def declare(self) -> Iterator[Any]:
        choice = yield from self.call(0, self.declare_at(0))
        for index in range(1, len(self.world.shards)):
            yield from self.call(index, self.declare_at(index))
        if choice:
            for index in (*range(1, len(self.world.shards)), 0):
                if not (yield from self.call(index, self.initialize_at(index, choice))):
                    # Another worker was chosen since; this one's session has ended, which shard 0 will say.
                    assert (yield from self.call(0, self.declare_at(0))) != choice
                    yield from self.declare()
                    return
        else:
            self.world.oracle.check_initial()

    def declare_at(self, index: int) -> Callable[[Shard], Iterator[Any]]:
        def declare(shard: Shard) -> Iterator[Any]:
            reply, ticket = shard.admission.declare(
                control_pb2.DeclareRequest(caller=self.caller(index), spec=self.world.spec.to_message())
            )
            assert reply.layout_digest == self.world.layout.digest
            self.clock = max(self.clock, reply.clock)
            if ticket is None:
                yield None
                return reply.choice
            yield ticket
            return ticket.future.result(0)

        return declare

    def initialize_at(self, index: int, choice: int) -> Callable[[Shard], Iterator[Any]]:
        def initialize(shard: Shard) -> Iterator[Any]:
            caller = self.caller(index)
            init = shard.admission.begin_initialize(caller, self.world.layout.digest, choice)
            value = 1000.0 * (self.rank + 1)
            for block in self.world.layout.blocks_of(index):
                yield None
                self.world.check_alive(index, caller)
                shard.admission.initialize_block(init, block.index, memoryview(np.full(block.length, value, block.dtype)))
            self.world.check_alive(index, caller)
            with self.world.oracle.initializing(index, value):
                accepted = shard.admission.end_initialize(init)
            if accepted:
                self.world.oracle.initial[index] = value
            if accepted and index == 0:
                self.world.was_initialized = True
            return accepted

        return initialize
