"""The part of a simulated worker that moves gradients and parameters: what psd_client/worker/exchange/exchange.py and psd/rim
do.

A push and a pull, or both at once from memory that the shard reads where it lies; repeated where the shard has died.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from shard_driver import Killed
from simulated_settlement import Counted, Sent, SettlingWorker

from psd.contract.errors import SessionFenced, ShardRestarted
from psd.state.aggregation.block import BlockState
from psd.state.aggregation.lent_gradients import Loan
from psd.state.aggregation.rounds import Outcome
from psd.state.aggregation.trained import Trained
from psd.state.desks.transfers import Pull, Push
from psd.state.shard import Shard
from psd.state.tickets import Ticket
from psd.v1 import control_pb2, data_pb2, job_pb2

if TYPE_CHECKING:
    from simulation import Simulation


class ExchangingWorker(SettlingWorker):
    """A worker that pushes, commits and pulls."""

    world: Simulation
    rank: int
    incarnations: list[int]
    sent: Sent | None

    def push_everywhere(self, sent: Sent) -> Iterator[Any]:
        self.world.oracle.on_send(self.rank, sent)
        clocks: list[int] = []
        yield from self.at_all(lambda index: self.push(index, sent, clocks))
        if self.world.trouble and self.world.rng.random() < 0.2:  # the reply was lost
            yield from self.at_all(lambda index: self.push(index, sent, []))
        self.world.oracle.on_acknowledged(self.rank, sent)
        self.clock = max(self.clock + 1, *clocks)

    def at_all(self, begin: Callable[[int], Iterator[Any]]) -> Iterator[Any]:
        """Do something at all shards at once; raises what the first one raised, when all have ended."""
        tasks = [self.world.spawn(begin(index), self.rank) for index in range(len(self.world.shards))]
        for task in tasks:
            if not task.is_done:
                yield task
        for task in tasks:
            if task.error is not None:
                raise task.error

    def push(self, index: int, sent: Sent, clocks: list[int]) -> Iterator[Any]:
        world = self.world
        if world.trouble and world.rng.random() < 0.1:  # a first attempt whose connection was lost, and which is still running
            world.spawn(self.ghost(index, self.caller(index), sent), self.rank, is_ghost=True)

        def push(shard: Shard) -> Iterator[Any]:
            caller = self.caller(index)
            clock = yield from self.push_once(index, shard, caller, sent)
            sent.incarnations[index] = caller.incarnation
            return clock

        clocks.append((yield from self.call(index, push, sent.session)))

    def ghost(self, index: int, caller: job_pb2.Caller, sent: Sent) -> Iterator[Any]:
        try:
            shard = yield from self.world.running(index)
            yield from self.push_once(index, shard, caller, sent)
        except Killed:
            self.world.kill(index)
        except (ShardRestarted, SessionFenced):
            pass

    def push_once(self, index: int, shard: Shard, caller: job_pb2.Caller, sent: Sent) -> Iterator[Any]:
        push = yield from self.begin_push(index, shard, caller, sent)
        yield from self.push_blocks(index, shard, caller, sent, push)
        return shard.exchange.end_push(push).clock

    def begin_push(self, index: int, shard: Shard, caller: job_pb2.Caller, sent: Sent) -> Iterator[Any]:
        world, exchange = self.world, shard.exchange
        push = exchange.begin_push(
            data_pb2.PushHeader(
                caller=caller,
                clock=sent.clock,
                weight=sent.weight,
                layout_digest=world.layout.digest,
                scalars=[data_pb2.GroupScalars(values=world.scalars_of(group)) for group in range(len(world.spec.groups))],
                decisions=self.decisions,
            )
        )
        yield None
        world.check_alive(index, caller)
        while (ticket := exchange.gate(push, sent.clock)) is not None:
            yield ticket
            ticket.future.result(0)
        return push

    def push_blocks(
        self,
        index: int,
        shard: Shard,
        caller: job_pb2.Caller,
        sent: Sent,
        push: Push,
        lent: list[NDArray[Any]] | None = None,
    ) -> Iterator[Any]:
        """lent: takes the gradients, which the shard may read until it has taken over."""
        world = self.world
        blocks = list(world.layout.blocks_of(index))
        world.rng.shuffle(blocks)
        if world.tables is not None and world.rng.random() < 0.5:
            yield from self.push_rows(index, shard, caller, sent, push)
        for block in blocks:
            # A gradient of its own in each block and for each push, so that a sum tells what is in it.
            gradient = np.full(block.length, sent.value + block.index)
            if lent is not None:
                lent.append(gradient)
            payload = memoryview(gradient).cast("B")
            while True:
                world.check_alive(index, caller)
                before = push.outcomes[Outcome.COUNTED], push.outcomes[Outcome.DUPLICATE]
                with world.oracle.counting(block.index, self.rank, sent) as counted:
                    ticket = shard.exchange.push_block(push, block.index, b"", payload, is_lent=lent is not None)
                    counted.is_counted = push.outcomes[Outcome.COUNTED] > before[0]
                if ticket is None:
                    break
                yield ticket
                ticket.future.result(0)
            world.duplicates += push.outcomes[Outcome.DUPLICATE] - before[1]
            if push.outcomes[Outcome.STAGED]:  # exact: what comes again before its round is decided is staged again
                name = (index, block.index, self.rank, push.begun_as, push.clock)
                world.duplicates += name in world.staged
                world.staged.add(name)
            if lent is None or world.rng.random() < 0.5:
                yield None
        if world.tables is not None and world.layout.tables_block(index) not in push.covered:
            yield from self.push_rows(index, shard, caller, sent, push)
        world.check_alive(index, caller)

    def push_rows(self, index: int, shard: Shard, caller: job_pb2.Caller, sent: Sent, push: Push) -> Iterator[Any]:
        """The push's rows, which are not lent."""
        world, tables, block = self.world, self.world.tables, self.world.layout.tables_block(index)
        assert tables is not None
        assert block is not None
        tables.make_mortal(index, shard)
        parts, payload = tables.frame(index, self.rank, sent)
        while True:
            world.check_alive(index, caller)
            before = push.outcomes[Outcome.COUNTED]
            with tables.counting(index, Counted(self.rank, sent.session, sent.clock, sent.weight, sent.value + block)) as part:
                ticket = shard.exchange.push_block(push, block, b"", payload, rows=parts)
                part.is_counted = push.outcomes[Outcome.COUNTED] > before
            if ticket is None:
                break
            yield ticket
            ticket.future.result(0)
        if world.rng.random() < 0.5:
            yield None

    def push_pull_everywhere(self, sent: Sent) -> Iterator[Any]:
        """What push_pull does through shared memory: the shards read the gradients where they lie."""
        self.world.oracle.on_send(self.rank, sent)
        clocks: dict[int, int] = {}

        def at(index: int) -> Iterator[Any]:
            def push_pull(shard: Shard) -> Iterator[Any]:
                caller = self.caller(index)
                clocks[index] = yield from self.push_pull_once(index, shard, caller, sent)
                sent.incarnations[index] = caller.incarnation

            yield from self.call(index, push_pull, sent.session)

        yield from self.at_all(at)
        self.world.oracle.on_acknowledged(self.rank, sent)
        self.clock = max(self.clock + 1, *clocks.values())
        for index, clock in clocks.items():
            if clock < self.clock:
                yield from self.pull(index)

    def push_pull_once(self, index: int, shard: Shard, caller: job_pb2.Caller, sent: Sent) -> Iterator[Any]:
        """See DataPlane.push_pull, which this must follow."""
        world, exchange = self.world, shard.exchange
        lent: list[NDArray[Any]] = []
        push = yield from self.begin_push(index, shard, caller, sent)
        try:
            yield from self.push_blocks(index, shard, caller, sent, push, lent)
            answer = exchange.begin_answer(push)
            reply = exchange.end_push(push)
            while (ticket := exchange.gate(answer, answer.clock)) is not None:
                yield ticket
                ticket.future.result(0)
                world.check_alive(index, caller)
            for block in push.job.read_from(()):
                yield from self.read(index, shard, caller, answer, block)
        except Killed:
            push.loan = Loan()  # a process that is dead ends none
            raise
        finally:
            if world.shards[index] is shard:
                try:
                    push.loan.end()
                except Killed:
                    world.kill(index)
            for gradient in lent:
                gradient.fill(np.nan)  # whoever still reads it gives itself away
        world.check_alive(index, caller)
        world.push_pulls += 1
        return reply.clock

    def push_again(self, index: int, shard: Shard) -> Iterator[Any]:
        """The last push, to a shard that has lost it."""
        sent = self.sent
        if sent is not None and sent.incarnations[index] != self.incarnations[index]:
            caller = self.caller(index)
            yield from self.push_once(index, shard, caller, sent)
            sent.incarnations[index] = caller.incarnation
            self.world.pushes_again += 1

    def commit(self, shard: Shard, *, without_waiting: bool) -> Iterator[Any]:
        yield from self.push_again(0, shard)
        assert self.sent is not None
        clock, caller = self.sent.clock, self.caller(0)
        self.world.check_alive(0, caller)
        self.world.oracle.on_commit(self.rank, self.sent)
        request = control_pb2.CommitRequest(caller=caller, clock=clock, without_waiting=without_waiting, skip=self.sent.skip)
        yield from self.decided(shard, request)

    def pull(self, index: int) -> Iterator[Any]:
        yield from self.call(index, lambda shard: self.pull_once(index, shard))

    def pull_once(self, index: int, shard: Shard) -> Iterator[Any]:
        yield from self.push_again(index, shard)
        world, clock, exchange, caller = self.world, self.clock, shard.exchange, self.caller(index)
        world.check_alive(index, caller)
        pull, blocks = exchange.begin_pull(
            data_pb2.PullRequest(
                caller=caller,
                clock=clock,
                layout_digest=world.layout.digest,
                decisions=self.decisions,
                verdict=self.verdict,
            )
        )
        while (ticket := exchange.gate(pull, clock)) is not None:
            yield ticket
            ticket.future.result(0)
            world.check_alive(index, caller)
        for block in blocks:
            yield from self.read(index, shard, caller, pull, block)

    def read(self, index: int, shard: Shard, caller: job_pb2.Caller, pull: Pull, block: Trained) -> Iterator[Any]:
        world = self.world
        while isinstance(found := shard.exchange.read(block, pull), Ticket):
            yield found
            found.future.result(0)
            world.check_alive(index, caller)
        version, page = found
        if not isinstance(block, BlockState):
            assert world.tables is not None
            world.tables.check_rows(index, shard, pull.clock, version)
            return
        assert page is not None
        world.oracle.on_read(self.rank, pull.clock, block.plan.index, version, page)
        block.unpin(page)
        if block.plan.index % 3 == 2:
            yield None
            world.check_alive(index, caller)
