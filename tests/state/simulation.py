"""A seeded world of workers and shards: real Shard objects, fake time, and a scheduler that mixes everything up.

Each worker is a generator that yields whatever it waits for (a ticket, or something it has begun), and the scheduler resumes a
random one of those that may go on. Between the resumptions it crashes workers, suspends them until their lease has run out
(zombies), starts them again, sends pushes twice, and lets the shards notice expired leases at different times. It kills shards,
between two steps or inside of one, at any of the arena's crash points, and starts them again on what their arenas hold.

The oracle checks while it goes that every read is right. `Simulation.run` fails with the seed if something is not, or if all
live workers wait.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shard_driver import Fuse, Killed, end_process_of
from simulated_tables import ArenaFuse, SimulatedTables
from simulated_worker import RUN_ID, SimulatedWorker
from simulation_oracle import Oracle

from psd.contract.config import ServerConfig
from psd.contract.errors import SessionFenced, ShardRestarted, StateLost
from psd.contract.jobspec import JobSpec
from psd.contract.layout import Layout
from psd.state.shard import Shard
from psd.state.tickets import Ticket
from psd.v1 import job_pb2

LEASE_S = 4.0
MEMORY = Path("/dev/shm")


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
        if isinstance(waits, Ticket):
            return waits.future.done()
        return waits() if callable(waits) else waits.is_done


class Simulation:
    """One run.

    Args:
        trouble: workers crash, turn into zombies, and send everything twice.
        kills: how many shards are killed.
    """

    def __init__(self, seed: int, spec: JobSpec, shards: int, steps: int, *, trouble: bool, kills: int = 0) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.spec = spec
        self.trouble = trouble
        self.is_exact = spec.aggregation == "exact"
        self.has_rounds = spec.consistency.mode == "sync"
        self.scalars = (0.1, 0.9, 0.0, 0.0) if self.is_exact else (1.0, 0.0, 0.0, 0.0)
        self.now = 0.0
        self.turns = 0
        self.layout = Layout(spec, shards)
        self.directory = tempfile.TemporaryDirectory(prefix="psd-simulated-", dir=MEMORY if MEMORY.is_dir() else None)
        self.shards: list[Shard | None] = [None] * shards
        self.fuses: dict[int, Fuse] = {}
        self.kills_left = kills
        self.staged: set[tuple[int, ...]] = set()
        self.push_pulls = self.pushes_again = self.duplicates = self.waits_for_decisions = 0
        self.kills = self.resumes = self.rejoins = 0
        self.was_initialized = self.is_lost = False
        self.oracle = Oracle(self)
        self.tables = SimulatedTables(self) if spec.tables else None
        # A worker that waits at a barrier pushes nothing, so barriers stand where all come by: at the end, if all have as many
        # steps, those too that have died and joined again; or, where nobody dies, before any step that all take.
        self.has_final_barrier = self.rng.random() < 0.5
        self.steps = [
            steps if self.has_final_barrier else max(1, steps - self.rng.choice((0, 0, 1, 3))) for _ in range(spec.world_size)
        ]
        self.barrier_steps = set() if trouble else {self.rng.randrange(min(self.steps)) for _ in range(2)}
        self.barriers = 0
        self.workers = {rank: SimulatedWorker(self, rank) for rank in range(spec.world_size)}
        self.tasks: list[Task] = []
        self.suspended: dict[int, float] = {}
        self.finished: set[int] = set()
        self.troubles_left = 6 if trouble else 0
        self.trouble_rate = 0.01 if self.is_exact else 0.02  # exact steps take more turns

    def scalars_of(self, group: int) -> tuple[float, ...]:
        """Those of a group's rule; the tables' has no momentum."""
        is_of_tables = any(table.group == group for table in self.spec.tables)
        return (1.0, 0.0, 0.0, 0.0) if is_of_tables else self.scalars

    # -- the scheduler --

    def run(self) -> None:
        """Until all workers have finished. Raises AssertionError with the seed."""
        try:
            for index in range(len(self.shards)):
                self.start_shard(index)
            for rank in range(self.spec.world_size):
                self.start(rank)
            while len(self.finished) < self.spec.world_size and not self.is_lost:
                self.one_step()
                self.turns += 1
                assert self.turns < 200_000, "the world does not come to an end"
            if not self.is_lost:
                self.check_end()
        except AssertionError as error:
            raise AssertionError(
                f"seed {self.seed}, {self.spec.consistency}, {self.spec.aggregation}, quorum {self.spec.quorum}: {error}"
            ) from error
        finally:
            for shard in self.shards:
                if shard is not None:
                    shard.close(keep=False)
            self.directory.cleanup()

    def start(self, rank: int) -> None:
        self.workers[rank] = SimulatedWorker(self, rank)
        self.spawn(self.workers[rank].life(), rank)

    def spawn(self, generator: Iterator[Any], rank: int, *, is_ghost: bool = False) -> Task:
        task = Task(generator, rank, is_ghost=is_ghost)
        self.tasks.append(task)
        return task

    def one_step(self) -> None:
        if self.troubles_left and self.rng.random() < self.trouble_rate:
            self.make_trouble()
        if self.kills_left and self.rng.random() < 0.02:
            self.kill_some_shard()
        for index, shard in enumerate(self.shards):
            if shard is None and self.rng.random() < 0.1:
                self.start_shard(index)
        if self.rng.random() < 0.02:
            self.pass_time()
        self.learn_decisions()
        ready = [t for t in self.tasks if t.rank not in self.suspended and t.may_go_on()]
        if ready:
            self.resume(self.rng.choice(ready))
        elif None not in self.shards:
            if not self.suspended and not self.has_unexpired_dead():
                waits = [(t.rank, t.awaits.kind.name, t.awaits.clock) for t in self.tasks if isinstance(t.awaits, Ticket)]
                raise AssertionError(f"deadlock: all live workers wait: {waits}")
            self.pass_time()

    def learn_decisions(self) -> None:
        job = self.shards[0]._core.job if self.shards[0] is not None else None
        if job is not None and job.coordinator is not None:
            self.oracle.on_decisions(job.coordinator.latest())

    def has_unexpired_dead(self) -> bool:
        """A crashed worker whose lease still runs on some shard: time will help. Absent ones are started by their lives."""
        alive = {t.rank for t in self.tasks}
        return any(
            w.state.name == "LIVE" and w.rank not in alive
            for shard in self.shards
            if shard is not None and shard._core.membership is not None
            for w in shard._core.membership.workers
        )

    def resume(self, task: Task) -> None:
        try:
            task.awaits = next(task.generator)
        except StopIteration:
            self.end(task)
        except SessionFenced as error:
            task.error = error
            self.end(task)
        except StateLost as error:
            self.check_loss(error)

    def end(self, task: Task) -> None:
        task.is_done = True
        self.tasks.remove(task)

    def pass_time(self) -> None:
        """A quarter of a lease. Those that run send heartbeats; each shard looks at its leases, or not yet."""
        self.now += LEASE_S / 4
        running = {t.rank for t in self.tasks if not t.is_ghost} - self.suspended.keys() - self.finished
        for index, shard in enumerate(self.shards):
            if shard is None:
                continue
            try:
                for rank in running:
                    with contextlib.suppress(SessionFenced, StateLost):
                        self.workers[rank].heartbeat(index, shard)
                if self.rng.random() < 0.7:
                    shard.tick()
            except Killed:
                self.kill(index)
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
            task.generator.close()  # the shard notices that the connection has gone
        self.start(rank)  # its launcher starts it again, at once or when its lease has run out
        if self.rng.random() < 0.5:
            self.suspended[rank] = self.now + 2 * LEASE_S

    # -- shards --

    def start_shard(self, index: int) -> None:
        self.fuses[index] = ArenaFuse()
        shard = Shard(
            ServerConfig(
                index,
                len(self.shards),
                run_id=RUN_ID,
                lease_s=LEASE_S,
                state_dir=str(Path(self.directory.name) / str(index)),
            ),
            now=lambda: self.now,
            wall=lambda: 1e9 + self.now + self.turns * 1e-3,
            incarnation=self.rng.getrandbits(60) + 1,
            crash_point=self.fuses[index],
        )
        self.shards[index] = shard
        self.oracle.on_restart(index, shard)

    def kill_some_shard(self) -> None:
        """Now, or at one of the next crash points that some shard comes to."""
        index = self.rng.randrange(len(self.shards))
        if self.shards[index] is None or self.fuses[index].steps > 0:
            return
        self.kills_left -= 1
        if self.rng.random() < 0.5:
            self.kill(index)
        else:
            self.fuses[index].steps = self.rng.randrange(1, 30)

    def kill(self, index: int) -> None:
        """What the kernel does: memory is gone, locks are released, the arena's file stays as it is."""
        self.learn_decisions()
        shard = self.shards[index]
        assert shard is not None
        self.shards[index] = None
        self.kills += 1
        end_process_of(shard._core)
        for ticket in shard._core.waiting.open():
            ticket.fail(ShardRestarted("the connection broke", shard=index))

    def running(self, index: int) -> Iterator[Any]:
        """The shard, as soon as it runs."""
        while (shard := self.shards[index]) is None:
            yield lambda: self.shards[index] is not None
        return shard

    def check_alive(self, index: int, caller: job_pb2.Caller) -> None:
        """Calls that were in progress when their shard was killed get no answer."""
        shard = self.shards[index]
        if shard is None or shard._core.incarnation != caller.incarnation:
            raise ShardRestarted("the connection broke", shard=index)

    # -- ends --

    def check_loss(self, error: StateLost) -> None:
        """A shard says that the job is lost. That may be if a worker died, too, in the round whose gradients the shard lost."""
        assert self.is_exact, error
        assert self.trouble, error
        assert self.kills, error
        self.is_lost = True

    def check_end(self) -> None:
        """What is left when everybody has left."""
        for index, shard in enumerate(self.shards):
            if shard is None:
                self.start_shard(index)
        self.oracle.check_end()
        for shard in self.shards:
            ghosts = [t.awaits for t in self.tasks]
            assert shard is not None
            assert [t for t in shard._core.waiting.open() if t not in ghosts] == []
