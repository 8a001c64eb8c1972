"""A worker of the simulated world: what psd_client does, as generators over Shard objects.

It joins, declares, provides initial values, pushes, commits (exact aggregation), pulls, and meets the others at barriers. Where
a shard has come back as another incarnation it resumes there and sends again what it has no answer for, and in jobs with rounds
also its last push, until it has pulled the round: see psd_client/worker/session/session.py and exchange.py, which this must
follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from shard_driver import Killed
from simulated_exchange import ExchangingWorker
from simulated_settlement import Sent

from psd.contract.errors import BarrierTimeout, SessionFenced, ShardRestarted, StateLost
from psd.state.shard import Shard
from psd.v1 import control_pb2, job_pb2

if TYPE_CHECKING:
    from simulation import Simulation

RUN_ID = "simulated"


class SimulatedWorker(ExchangingWorker):
    """One rank, in all its lives."""

    def __init__(self, world: Simulation, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.session = 0
        self.incarnations: list[int] = []
        self.clock = 0
        self.decisions: list[job_pb2.Decision] = []
        self.verdict: job_pb2.Verdict | None = None
        self.settled = self.asked = -1
        self.sent: Sent | None = None
        self.barrier_seq = 0

    def caller(self, index: int) -> job_pb2.Caller:
        return job_pb2.Caller(run_id=RUN_ID, incarnation=self.incarnations[index], rank=self.rank, session=self.session)

    # -- calls --

    def call(self, index: int, operation: Callable[[Shard], Iterator[Any]], session: int | None = None) -> Iterator[Any]:
        """The result of an operation at a shard, repeated where the shard has died; SessionFenced if `session` is over."""
        session = self.session if session is None else session
        while True:
            try:
                shard = yield from self.world.running(index)
                return (yield from operation(shard))
            except Killed:
                self.world.kill(index)
            except ShardRestarted:
                pass
            while True:
                shard = yield from self.world.running(index)
                if session != self.session:
                    raise SessionFenced("superseded by this worker itself", cause="superseded")
                try:
                    self.resume(index, shard)
                    break
                except Killed:
                    self.world.kill(index)

    def resume(self, index: int, shard: Shard) -> None:
        """Go on with the same session."""
        if not self.session:
            return  # it has never joined there
        reply = shard.admission.join(self.join_request(index, self.session, resume=True))
        self.incarnations[index] = reply.incarnation
        self.world.resumes += 1

    def join_request(self, index: int, session: int, *, resume: bool = False) -> control_pb2.JoinRequest:
        return control_pb2.JoinRequest(
            run_id=RUN_ID,
            shard_index=index,
            shard_count=len(self.world.shards),
            rank=self.rank,
            world_size=self.world.spec.world_size,
            session=session,
            resume=resume,
        )

    def heartbeat(self, index: int, shard: Shard) -> None:
        """What the client's background thread does."""
        if not self.session:
            return  # the client beats once it has joined everywhere
        try:
            shard.admission.heartbeat(control_pb2.HeartbeatRequest(caller=self.caller(index), clock=self.clock))
        except ShardRestarted:
            self.resume(index, shard)

    # -- life --

    def life(self) -> Iterator[Any]:
        while True:
            try:
                yield from self.train()
                break
            except SessionFenced:
                self.world.rejoins += 1
        for index in range(len(self.world.shards)):
            shard = yield from self.world.running(index)
            try:
                shard.admission.leave(self.caller(index), failed=False)
            except Killed:  # the lease tells the shard
                self.world.kill(index)
            yield None
        self.world.finished.add(self.rank)

    def train(self) -> Iterator[Any]:
        world, rng = self.world, self.world.rng
        yield from self.enter()
        while self.clock < world.steps[self.rank]:
            if self.clock in world.barrier_steps:
                yield from self.barrier(f"step {self.clock}")
            value = rng.uniform(-20, 20) if world.is_exact else float(rng.randrange(-20, 20))
            yield from self.catch_up()
            sent = Sent(self.session, self.clock, value, float(rng.choice((0, 1, 1, 2, 7))))
            if world.spec.nan_policy == "skip" and rng.random() < 0.1:
                sent.weight, sent.skip = 0.0, True
            if not world.is_exact and rng.random() < 0.5:
                yield from self.push_pull_everywhere(sent)
                continue
            yield from self.push_everywhere(sent)
            if world.has_rounds:
                self.sent = sent
            if world.is_exact:
                if rng.random() < 0.3:
                    yield from self.call(0, lambda shard: self.commit(shard, without_waiting=True))
                yield from self.call(0, lambda shard: self.commit(shard, without_waiting=False))
            yield from self.pull_everywhere()
            self.sent = None
        if world.has_final_barrier:
            yield from self.barrier("end")

    def barrier(self, name: str) -> Iterator[Any]:
        """Wait for the others. The answer may be lost, and the call given up and made anew."""
        while True:
            self.barrier_seq += 1
            is_given_up = yield from self.call(0, lambda shard: self.arrive(shard, name))
            if not is_given_up:
                break
        self.world.barriers += 1
        if self.world.rng.random() < 0.3:
            yield from self.call(0, lambda shard: self.arrive(shard, name, has_opened=True))

    def arrive(self, shard: Shard, name: str, *, has_opened: bool = False) -> Iterator[Any]:
        """True if the call's deadline has passed meanwhile."""
        caller = self.caller(0)
        self.world.check_alive(0, caller)
        seq, oracle = self.barrier_seq, self.world.oracle
        oracle.on_arrive(name, caller)
        ticket = shard.arrive(control_pb2.BarrierRequest(caller=caller, name=name, seq=seq))
        ticket.future.add_done_callback(lambda _: oracle.on_barrier_end(shard, ticket, seq))
        assert ticket.future.done() or not has_opened, "a barrier that had opened waits again for those whose answer was lost"
        if not has_opened and self.world.rng.random() < 0.1:
            yield None
            self.world.check_alive(0, caller)
            if not ticket.future.done():
                ticket.fail(BarrierTimeout("the deadline has passed"))
                shard.withdraw(ticket)
                oracle.on_withdraw(name, caller)
                return True
        yield ticket
        ticket.future.result(0)
        self.world.check_alive(0, caller)
        return False

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
