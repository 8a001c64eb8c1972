"""Steps with rows leave what pushes leave: random sequences on two shards, of which one never arms anybody, are answered alike.

Ids that are known, new, repeated, or in no table; tables without a gradient, or without a row; pushes that come again, or with
other versions; workers that die, and others that take their ranks. Then rows, marks, notes and counts are compared. `make
check-steps` has many more rounds.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from raw_client import MODES
from raw_row_steps import RowsDone, RowStepWorker
from raw_steps import pause

from psd.contract.errors import PsdError
from psd.contract.jobspec import JobSpec
from psd.contract.tables import SparseTableSpec
from psd.contract.wire import Disconnected
from psd.v1 import job_pb2

KNOWN, MORE = 30, 36
OF_ROUNDS = int(os.environ.get("PSD_STEP_SEQUENCES", "28")) * 3 // 14
LANES = ("tcp", "local", "memory")
SGD, ADAGRAD, ADAM = (0.5, 0.5, 0.0, 0.0), (0.1, 0.0, 0.0, 1e-10), (0.1, 0.9, 0.99, 1e-8, 0.0)


def job_of(mode: str, choice: random.Random, world: int) -> job_pb2.JobSpec:
    """One group of parameters, or none, and three tables, one of which may be limited, or catch up."""
    staleness = "" if mode == "sync" else choice.choice(["", "lr"])
    dense = choice.random() < 0.7
    groups = [job_pb2.GroupSpec(rule="sgd", flags=["momentum"], staleness=staleness)] if dense else []
    groups += [
        job_pb2.GroupSpec(rule="sgd", flags=["momentum"], staleness=staleness),
        job_pb2.GroupSpec(rule="adagrad", constants=[0.0]),
        job_pb2.GroupSpec(rule="adam", staleness=staleness),
    ]
    tensors = [job_pb2.TensorSpec(name="t", shape=[5], dtype=job_pb2.DTYPE_FLOAT32, group=0)] if dense else []
    tables = [
        SparseTableSpec("a", 3, dense + 0, updates=choice.choice(["lazy", "catch_up"])),
        SparseTableSpec("b", 4, dense + 1, max_rows=choice.choice([0, KNOWN + 2])),
        SparseTableSpec("c", 1, dense + 2, admit_after=choice.choice([1, 2])),
    ]
    job = job_pb2.JobSpec(
        world_size=world,
        mode=MODES[mode],
        quorum=choice.choice([0, world - 1]) if mode == "sync" and world > 2 else 0,
        staleness_bound=2 if mode == "ssp" else 0,
        reduction=choice.choice([job_pb2.REDUCTION_MEAN, job_pb2.REDUCTION_SUM]),
        groups=groups,
        tensors=tensors,
        tables=[table.to_message() for table in tables],
    )
    JobSpec.from_message(job)
    return job


class Side:
    """One of the two shards, and its workers."""

    def __init__(self, server: Any, dial: Callable[[str], grpc.Channel], job: job_pb2.JobSpec, lanes: list[Any]) -> None:
        self.shard = server.shard
        self.sessions: list[int] = []
        self.steps = 0
        self._server, self._dial, self._job, self._lanes = server, dial, job, lanes
        self.workers = [self.join(rank) for rank in range(job.world_size)]
        self._pool = ThreadPoolExecutor(job.world_size)

    def join(self, rank: int) -> RowStepWorker:
        lane, in_memory = self._lanes[rank]
        channel = self._dial(self._server.address)
        worker = RowStepWorker(channel, rank, self._job.world_size, job=self._job, lane=lane, in_memory=in_memory)
        worker.scalars = [*([SGD] if self._job.tensors else []), SGD, ADAGRAD, ADAM]
        self.sessions.append(worker.session)
        return worker

    def train(self, rank: int, *args: Any, **named: Any) -> RowsDone | str:
        """The answer, or the name of the error."""
        try:
            found, is_step = self.workers[rank].train_rows(*args, **named)
        except PsdError as error:
            return error.reason
        except (Disconnected, OSError):
            return "gone"
        self.steps += is_step
        return found

    def begin(self, rank: int, clock: int, *args: Any, **named: Any) -> Future[RowsDone | str]:
        """Begin a push; return when the tables have it, or it is answered."""
        worker, tables = self.workers[rank], self.shard.job.tables
        found = self._pool.submit(self.train, rank, *args, **named)
        while not found.done() and not tables.has(rank, worker.session, clock):
            pause(0.0005)
        return found

    def die(self, rank: int) -> None:
        """End the session of a worker, whose push may be under way."""
        self.shard.admission.kick(rank, self.workers[rank].session)

    def replace(self, rank: int) -> int:
        """A worker dies, and another one takes its rank; the clock at which it begins."""
        self.shard.admission.kick(rank, self.workers[rank].session)
        self.workers[rank].close()
        self.workers[rank] = self.join(rank)
        return self.workers[rank].clock

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self._pool.shutdown()

    def left(self) -> Any:
        """All that is left of it."""
        job, world = self.shard.job, self._job.world_size
        known = {session: f"session {i}" for i, session in enumerate(self.sessions)}
        tables = []
        for partition in job.tables.partitions:
            store = partition.store
            walked = [pair for found in store.walk() for pair in zip(found.heads.tolist(), found.rows, strict=True)]
            rows = sorted((id_, used, changed, row.tobytes()) for (id_, used, changed, _), row in walked)
            notes = store.notes().tolist()
            windows = [known.get(each, "") for each in notes[1 : 1 + world]], notes[1 + world :]
            counted = {name: count for name, count in store.counters().items() if name not in ("spares", "buckets")}
            tables.append((notes[0], windows, partition.clock, counted, rows))
        pages = []
        for block in job.blocks.values():
            page = block.pin()
            arrays = [array.tobytes() for array in (page.parameter, *page.slots, page.clocks)]
            pages.append((page.version, arrays, page.content))
            block.unpin(page)
        status = self.shard.status()
        counters = status.counters
        lanes = {
            name: (lane.received_bytes, lane.sent_bytes, sum(lane.calls["push_pull"].counts))
            for name, lane in counters.lanes.items()
        }
        counts = counters.pushes_accepted, counters.pushes_duplicate, counters.pushes_late, counters.pulls
        workers = [(w.clock, w.floor, w.samples, w.state, w.has_pushed) for w in status.workers]
        times = sum(job.round_times.counts), job.open_rounds
        counted_by = [known.get(job.tables.last_counted(rank)[0], "") for rank in range(world)]
        return tables, pages, job.ages, job.age_total, lanes, counts, workers, times, counted_by, job.tables.version


@pytest.fixture
def sides(cluster: Callable[..., Any], dial: Callable[..., grpc.Channel]) -> Iterator[Callable[..., list[Side]]]:
    """sides(job, lanes) -> the shard that arms, and the one that does not."""
    made: list[Side] = []

    def make(job: job_pb2.JobSpec, lanes: list[Any]) -> list[Side]:
        made.extend(Side(cluster(1, never_armed=never).shards[0], dial, job, lanes) for never in (False, True))
        return made

    yield make
    for side in made:
        side.close()


def rows_of(
    choice: random.Random, dims: list[int], news: float, *, exact: bool = False, repeats: bool = True
) -> tuple[dict[int, Any], dict[int, Any]]:
    """What a push brings, and pulls. news: how often an id may be new. exact: sums have the same bits in whatever order."""
    pushed, pulled = {}, {}
    for table, dim in enumerate(dims):
        most = MORE if choice.random() < news else KNOWN
        if choice.random() < 0.9:
            count = choice.choice([0, 1, 7, 20])
            found = [choice.randrange(most) for _ in range(count)] if repeats else choice.sample(range(most), count)
            ids = np.array(found, np.uint64)
            values = [[choice.randrange(-64, 65) / 32 if exact else choice.uniform(-2, 2) for _ in range(dim)] for _ in ids]
            pushed[table] = ids, np.array(values, np.float32).reshape(len(ids), dim)
        if choice.random() < 0.8:
            pulled[table] = np.array([choice.randrange(2 * MORE) for _ in range(choice.choice([1, 5, 11]))], np.uint64)
    return pushed, pulled


def all_rows(dims: list[int]) -> dict[int, Any]:
    ids = np.arange(KNOWN, dtype=np.uint64)
    return {table: (ids, np.ones((KNOWN, dim), np.float32)) for table, dim in enumerate(dims)}


@pytest.mark.parametrize("mode", ["async", "ssp", "sync"])
@pytest.mark.parametrize("seed", range(6))
def test_steps_with_rows_are_pushes(sides: Callable[..., list[Side]], mode: str, seed: int) -> None:
    """In every mode that offers them, and with what makes them none: the shards answer alike, and are left alike."""
    choice = random.Random(seed)
    world = 1 if mode == "sync" else 3
    job = job_of(mode, choice, world)
    both = sides(job, [(choice.choice(LANES), choice.random() < 0.7) for _ in range(world)])
    blocks, dims = both[0].workers[0].blocks, both[0].workers[0].dims
    clocks, read = [0] * world, [[0] * (blocks + 1) for _ in range(world)]
    before: dict[int, Any] = {}
    for turn in range(100):
        rank = choice.randrange(world)
        if mode == "ssp" and clocks[rank] >= min(clocks) + 1:  # it would wait at the gate
            rank = clocks.index(min(clocks))
        clock, kind = clocks[rank], choice.random()
        pushed, pulled = rows_of(choice, dims, 0.03)
        if turn < 2:  # twice, since some tables want to see an id twice
            pushed = all_rows(dims)
        named = {"weight": choice.choice([1.0, 1.0, 2.5, 0.0]), "versions": read[rank]}
        values = [choice.uniform(-2, 2)] * blocks
        if kind < 0.1 and rank in before:  # it comes again
            values, clock, pushed, pulled, named = before[rank]
        elif kind < 0.13 and mode == "async":
            clock += 2
        elif kind < 0.16 and mode != "sync":
            named["versions"] = [version + 1000 for version in read[rank]]
        found = [side.train(rank, values, clock, pushed, pulled, **named) for side in both]
        assert found[0] == found[1]
        if isinstance(found[0], RowsDone):
            before[rank] = values, clock, pushed, pulled, named
            clocks[rank] = max(clocks[rank], clock + 1)
            read[rank] = found[0].versions
        if choice.random() < 0.04:
            begins = [side.replace(rank) for side in both]
            assert begins[0] == begins[1]
            clocks[rank] = begins[0]
            before.pop(rank, None)
    assert both[0].left() == both[1].left()
    assert both[0].steps > 0
    assert both[1].steps == 0


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("seed", range(OF_ROUNDS))
def test_rounds_with_rows_of_steps_are_those_of_pushes(sides: Callable[..., list[Side]], world: int, seed: int) -> None:
    """With what happens to rounds: a quorum, late pushes and such that come again, pushes beside steps, deaths and revocation
    amid a round. A push may repeat ids where the order in which they are summed has no bits of its own."""
    choice = random.Random(seed)
    repeats = choice.random() < 0.5
    job = job_of("sync", choice, world)
    both = sides(job, [(choice.choice(LANES), choice.random() < 0.7) for _ in range(world)])
    blocks, dims = both[0].workers[0].blocks, both[0].workers[0].dims
    since, quorum = [0] * world, job.quorum or world
    for clock in range(40):
        order = choice.sample(range(world), world)
        dies = choice.choice(order) if choice.random() < 0.1 else -1
        pushed: list[tuple[int, tuple[Any, ...], dict[str, Any], list[Future[Any]]]] = []
        for place, rank in enumerate(order):
            rows = rows_of(choice, dims, 0.1, exact=repeats, repeats=repeats)
            args: tuple[Any, ...] = [choice.uniform(-2, 2)] * blocks, clock, *(rows if clock > 1 else (all_rows(dims), {}))
            named = {"weight": choice.choice([1.0, 1.0, 2.5, 0.0]), "since": since[rank]}
            is_push, is_revoked = choice.random() < 0.1, choice.random() < 0.1
            if rank == dies and place == world - 1:  # the round may wait for it
                for side in both:
                    side.die(dies)
                continue
            for side in both:
                if is_push:
                    side.workers[rank].offer = None
            begun = [side.begin(rank, clock, *args, **named) for side in both]
            if place >= quorum:
                assert begun[0].result(100) == begun[1].result(100)
            else:
                pushed.append((rank, args, named, begun))
            if rank == dies and place < quorum - 1:  # the round is open, and has its gradient
                for side in both:
                    side.die(dies)
                assert all(isinstance(each.result(100), str) for each in begun)
            elif rank == dies:
                dies = -1
            if is_revoked:
                both[0].shard._core.revoke()
        for rank, _, _, begun in pushed:
            found = [each.result(100) for each in begun]
            assert rank == dies or found[0] == found[1]
            assert rank == dies or isinstance(found[0], RowsDone)
        if dies >= 0:
            begins = [side.replace(dies) for side in both]
            assert begins[0] == begins[1] == clock + 1
            since[dies] = clock + 1
        elif choice.random() < 0.2:  # one comes again
            rank, args, named, _ = choice.choice(pushed)
            again = [side.train(rank, *args, **named) for side in both]
            assert again[0] == again[1]
    assert both[0].left() == both[1].left()
    assert both[0].steps > 10
    assert both[1].steps == 0
