"""A seeded world of workers and shards: real Shard objects, fake time, and a scheduler that mixes everything up.

Each worker is a generator that yields whatever it waits for (a ticket, or something it has begun), and the scheduler resumes a
random one of those that may go on. Between the resumptions it crashes workers, suspends them until their lease has run out
(zombies), starts them again, sends pushes twice, and lets the shards notice expired leases at different times.

The oracle is kept beside it, in float64: which gradient was counted in which block and round. `Simulation.run` checks while it
goes that every read is right, and fails with the seed if something is not, or if all live workers wait.
"""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from psd.contract.config import ServerConfig
from psd.contract.errors import SessionFenced
from psd.contract.jobspec import JobSpec
from psd.contract.layout import Layout
from psd.state.block import Outcome
from psd.state.shard import Shard
from psd.state.tickets import Ticket
from psd.v1 import control_pb2, data_pb2, job_pb2

LEASE_S = 10.0
LR = 1.0


class Task:
    """A generator that runs beside others; something to wait for."""

    def __init__(self, generator: Iterator[Any], rank: int, *, is_ghost: bool = False) -> None:
        self.generator = generator
        self.rank = rank
        self.is_ghost = is_ghost
        self.awaits: Any = None
        self.error: Exception | None = None
        self.is_done = False

    def may_go_on(self) -> bool:
        waits = self.awaits
        if waits is None:
            return True
        return waits.future.done() if isinstance(waits, Ticket) else waits.is_done


@dataclass
class Counted:
    """A gradient that a block has counted."""

    rank: int
    session: int
    clock: int
    weight: float
    value: float


class Simulation:
    """One run. `trouble`: crashes, zombies, repeated pushes, workers that leave."""

    def __init__(self, seed: int, spec: JobSpec, shards: int, steps: int, *, trouble: bool) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.spec = spec
        self.trouble = trouble
        self.now = 0.0
        self.layout = Layout(spec, shards)
        self.shards = [
            Shard(
                ServerConfig(i, shards, lease_s=LEASE_S), now=lambda: self.now, wall=lambda: 1e9 + self.now, incarnation=i + 1
            )
            for i in range(shards)
        ]
        self.steps = [max(1, steps - self.rng.choice((0, 0, 1, 3))) for _ in range(spec.world_size)]
        self.tasks: list[Task] = []
        self.callers: dict[int, list[job_pb2.Caller]] = {}
        self.clocks: dict[int, int] = {}
        self.suspended: dict[int, float] = {}
        self.finished: set[int] = set()
        self.troubles_left = 6 if trouble else 0
        self.counted: dict[int, list[Counted]] = defaultdict(list)
        self.initial: dict[int, float] = {}
        self.versions: dict[int, int] = defaultdict(int)
        self.entered: dict[tuple[int, int], int] = {}  # (rank, session) -> clock at which it began
        self.reads = self.rejoins = self.duplicates = 0

    # -- the scheduler --

    def run(self) -> None:
        """Until all workers have finished. Raises AssertionError with the seed."""
        try:
            for rank in range(self.spec.world_size):
                self.start(rank)
            turns = 0
            while len(self.finished) < self.spec.world_size:
                self.one_step()
                turns += 1
                assert turns < 200_000, "the world does not come to an end"
            self.check_end()
        except AssertionError as error:
            raise AssertionError(f"seed {self.seed}, {self.spec.consistency}: {error}") from error

    def start(self, rank: int) -> None:
        self.tasks.append(Task(self.life(rank), rank))

    def one_step(self) -> None:
        if self.troubles_left and self.rng.random() < 0.01:
            self.make_trouble()
        if self.rng.random() < 0.02:
            self.pass_time()
        ready = [t for t in self.tasks if t.rank not in self.suspended and t.may_go_on()]
        if ready:
            self.resume(self.rng.choice(ready))
            return
        if not self.suspended and not self.has_unexpired_dead():
            waits = [(t.rank, t.awaits.kind.name, t.awaits.clock) for t in self.tasks if isinstance(t.awaits, Ticket)]
            raise AssertionError(f"deadlock: all live workers wait: {waits}")
        self.pass_time()

    def has_unexpired_dead(self) -> bool:
        """A crashed worker whose lease still runs on some shard: time will help. Absent ones are started by their lives."""
        alive = {t.rank for t in self.tasks}
        return any(
            w.state.name == "LIVE" and w.rank not in alive
            for shard in self.shards
            if shard.core.membership is not None
            for w in shard.core.membership.workers
        )

    def resume(self, task: Task) -> None:
        try:
            task.awaits = next(task.generator)
        except StopIteration:
            self.end(task)
        except SessionFenced as error:
            task.error = error
            self.end(task)

    def end(self, task: Task) -> None:
        task.is_done = True
        self.tasks.remove(task)

    def pass_time(self) -> None:
        """A quarter of a lease. Those that run send heartbeats; each shard looks at its leases, or not yet."""
        self.now += LEASE_S / 4
        for rank, callers in self.callers.items():
            if rank in self.suspended or rank in self.finished or not any(t.rank == rank for t in self.tasks):
                continue
            for shard, caller in zip(self.shards, callers, strict=False):
                with contextlib.suppress(SessionFenced):
                    shard.admission.heartbeat(control_pb2.HeartbeatRequest(caller=caller, clock=self.clocks.get(rank, 0)))
        for shard in self.shards:
            if self.rng.random() < 0.7:
                shard.tick()
        for rank in [r for r, until in self.suspended.items() if until < self.now]:
            del self.suspended[rank]

    def make_trouble(self) -> None:
        running = sorted({t.rank for t in self.tasks} - self.suspended.keys())
        if not running:
            return
        self.troubles_left -= 1
        rank = self.rng.choice(running)
        if self.rng.random() < 0.5:
            self.suspended[rank] = self.now + self.rng.choice((0.5, 1.5, 2.5)) * LEASE_S
            return
        for task in [t for t in self.tasks if t.rank == rank]:
            self.tasks.remove(task)
        self.start(rank)  # its launcher starts it again, at once or when its lease has run out
        if self.rng.random() < 0.5:
            self.callers.pop(rank, None)
            self.suspended[rank] = self.now + 2 * LEASE_S

    # -- a worker --

    def life(self, rank: int) -> Iterator[Any]:
        while True:
            try:
                yield from self.train(rank)
                break
            except SessionFenced:
                self.rejoins += 1
        for shard, caller in zip(self.shards, self.callers[rank], strict=True):
            shard.admission.leave(caller, failed=False)
            yield None
        self.finished.add(rank)

    def train(self, rank: int) -> Iterator[Any]:
        clock = yield from self.enter(rank)
        while clock < self.steps[rank]:
            value = float(self.rng.randrange(-20, 20))
            weight = float(self.rng.choice((0, 1, 1, 2, 7)))
            clocks: list[int] = []
            yield from self.at_all(rank, lambda s, v=value, w=weight, c=clock, r=clocks: self.push(rank, s, c, v, w, r))
            if self.trouble and self.rng.random() < 0.2:  # the reply was lost
                yield from self.at_all(rank, lambda s, v=value, w=weight, c=clock: self.push(rank, s, c, v, w, []))
            clock = max(clock + 1, *clocks)
            self.clocks[rank] = clock
            yield from self.at_all(rank, lambda s, c=clock: self.pull(rank, s, c))

    def at_all(self, rank: int, begin: Any) -> Iterator[Any]:
        """Do something at all shards at once; raises what the first one raised, when all have ended."""
        tasks = [Task(begin(shard), rank) for shard in range(len(self.shards))]
        self.tasks += tasks
        for task in tasks:
            if not task.is_done:
                yield task
        for task in tasks:
            if task.error is not None:
                raise task.error

    def enter(self, rank: int) -> Iterator[Any]:
        session, run_id, clocks, callers = 0, "", [], []
        for index, shard in enumerate(self.shards):
            reply = shard.admission.join(
                control_pb2.JoinRequest(
                    run_id=run_id,
                    shard_index=index,
                    shard_count=len(self.shards),
                    rank=rank,
                    world_size=self.spec.world_size,
                    session=session,
                )
            )
            run_id, session = reply.run_id, reply.session
            clocks.append(reply.clock)
            callers.append(job_pb2.Caller(run_id=run_id, incarnation=reply.incarnation, rank=rank, session=session))
            yield None
        self.clocks[rank] = max(clocks)
        self.callers[rank] = callers
        is_initializer = False
        for index, shard in enumerate(self.shards):
            reply, ticket = shard.admission.declare(
                control_pb2.DeclareRequest(caller=callers[index], spec=self.spec.to_message())
            )
            assert reply.layout_digest == self.layout.digest
            if index == 0:
                if ticket is not None:
                    yield ticket
                is_initializer = reply.initializer if ticket is None else ticket.future.result(0)
            clocks.append(reply.clock)
            yield None
        if is_initializer:
            for index in (*range(1, len(self.shards)), 0):
                yield from self.initialize(rank, index)
        else:
            assert len(set(self.initial.values())) == 1, f"shards start from different workers' values: {self.initial}"
        clock = max(clocks)
        self.clocks[rank] = clock
        self.entered[rank, session] = clock
        yield from self.at_all(rank, lambda s, c=clock: self.pull(rank, s, c))
        return clock

    def initialize(self, rank: int, index: int) -> Iterator[Any]:
        desk = self.shards[index].admission
        init = desk.begin_initialize(self.callers[rank][index], self.layout.digest)
        value = 1000.0 * (rank + 1)
        for block in self.layout.blocks_of(index):
            yield None
            desk.initialize_block(init, block.index, memoryview(np.full(block.length, value, block.dtype)))
        if desk.end_initialize(init):
            self.initial[index] = value

    def push(self, rank: int, index: int, clock: int, value: float, weight: float, clocks: list[int]) -> Iterator[Any]:
        if self.trouble and self.rng.random() < 0.1:  # a first attempt whose connection was lost, and which is still running
            self.tasks.append(Task(self.push_once(rank, index, clock, value, weight, []), rank, is_ghost=True))
        yield from self.push_once(rank, index, clock, value, weight, clocks)

    def push_once(self, rank: int, index: int, clock: int, value: float, weight: float, clocks: list[int]) -> Iterator[Any]:
        exchange = self.shards[index].exchange
        caller = self.callers[rank][index]
        push = exchange.begin_push(
            data_pb2.PushHeader(
                caller=caller,
                clock=clock,
                weight=weight,
                layout_digest=self.layout.digest,
                scalars=[data_pb2.GroupScalars(values=(LR, 0, 0, 0)) for _ in self.spec.groups],
            )
        )
        yield None
        while (ticket := exchange.gate(push, clock)) is not None:
            yield ticket
            ticket.future.result(0)
        blocks = list(self.layout.blocks_of(index))
        self.rng.shuffle(blocks)
        for block in blocks:
            before = push.outcomes[Outcome.COUNTED], push.outcomes[Outcome.DUPLICATE]
            # A gradient of its own in each block and for each push, so that a sum tells what is in it.
            number = value + block.index
            while (
                ticket := exchange.push_block(push, block.index, b"", memoryview(np.full(block.length, number).tobytes()))
            ) is not None:
                yield ticket
                ticket.future.result(0)
            if push.outcomes[Outcome.COUNTED] > before[0]:
                self.on_counted(block.index, Counted(rank, caller.session, clock, weight, number))
            self.duplicates += push.outcomes[Outcome.DUPLICATE] - before[1]
            yield None
        clocks.append(exchange.end_push(push).clock)

    def pull(self, rank: int, index: int, clock: int) -> Iterator[Any]:
        exchange = self.shards[index].exchange
        pull, blocks = exchange.begin_pull(self.callers[rank][index], clock, self.layout.digest, ())
        while (ticket := exchange.gate(pull, clock)) is not None:
            yield ticket
            ticket.future.result(0)
        for block in blocks:
            while isinstance(found := exchange.read(block, pull), Ticket):
                yield found
                found.future.result(0)
            version, page = found
            self.on_read(rank, index, clock, block.plan.index, version, page.parameter)
            exchange.release(page)
            if block.plan.index % 3 == 2:
                yield None

    # -- the oracle --

    def on_counted(self, block: int, part: Counted) -> None:
        same = [c for c in self.counted[block] if (c.rank, c.clock) == (part.rank, part.clock)]
        if self.spec.consistency.mode == "sync":
            assert not same, f"block {block}: worker {part.rank} counted twice in round {part.clock}"
        assert part.session not in [c.session for c in same], f"block {block}: a push of worker {part.rank} counted twice"
        self.counted[block].append(part)

    def expected(self, block: int, version: int) -> float:
        """What the block must hold at that version."""
        value = self.initial[block % len(self.shards)]
        if self.spec.consistency.mode != "sync":
            assert version == len(self.counted[block])
            return value - LR * sum(c.value for c in self.counted[block] if c.weight)
        rounds: dict[int, list[Counted]] = defaultdict(list)
        for part in self.counted[block]:
            rounds[part.clock].append(part)
        for round_ in range(version):
            parts = [c for c in rounds[round_] if c.weight]
            if parts and self.spec.reduction == "sum":
                value -= LR * sum(c.value for c in parts)
            elif parts:
                value -= LR * sum(c.value * c.weight for c in parts) / sum(c.weight for c in parts)
        return value

    def on_read(self, rank: int, index: int, clock: int, block: int, version: int, numbers: Any) -> None:
        self.reads += 1
        assert version >= self.versions[block], f"block {block}: version went back"
        self.versions[block] = version
        expected = self.expected(block, version)
        assert np.allclose(numbers, expected, rtol=1e-12, atol=1e-9), (
            f"block {block}, version {version}: {numbers}, not {expected}"
        )
        consistency = self.spec.consistency
        if consistency.mode == "sync":
            assert version >= clock, f"block {block}: worker {rank} at clock {clock} read version {version}"
        elif consistency.mode == "ssp":
            self.check_bound(rank, index, clock - consistency.staleness_bound, block)

    def check_bound(self, reader: int, index: int, lag: int, block: int) -> None:
        """Every worker that is waited for has finished `lag` steps, and all its updates up to there are in the block."""
        for worker in self.shards[index].core.members.workers:
            if not worker.is_waited_for:
                continue
            assert worker.clock >= lag, f"worker {reader} read while worker {worker.rank} had finished {worker.clock} < {lag}"
            begun = self.entered.get((worker.rank, worker.session))
            if begun is None:
                continue
            there = {c.clock for c in self.counted[block] if (c.rank, c.session) == (worker.rank, worker.session)}
            lacking = set(range(begun, lag)) - there
            assert not lacking, f"block {block}: worker {reader} read without the steps {lacking} of worker {worker.rank}"

    def check_end(self) -> None:
        """What is left when everybody has left."""
        for block in self.layout.blocks:
            state = self.shards[block.index % len(self.shards)].core.job.blocks[block.index]
            version, page = state.read(0)
            assert np.allclose(page.parameter, self.expected(block.index, version), rtol=1e-12, atol=1e-9)
            if self.spec.consistency.mode == "sync":
                assert max(c.clock for c in self.counted[block.index]) < version, "a round was left open"
        if not self.trouble and self.spec.quorum in (0, self.spec.world_size):
            begun = {rank: clock for (rank, _), clock in self.entered.items()}
            everything = {(r, c) for r, steps in enumerate(self.steps) for c in range(begun[r], steps)}
            for block in self.layout.blocks:
                assert {(c.rank, c.clock) for c in self.counted[block.index]} == everything, "a gradient was lost"
        for shard in self.shards:
            ghosts = [t.awaits for t in self.tasks]
            assert [t for t in shard.core.waiting.open() if t not in ghosts] == []
