"""Steps leave the same bytes as pushes: random sequences on two shards, of which one never arms anybody, are answered alike.

A sequence is of rounds, or without rounds of pushes: duplicates, late and early ones, other scalars and weights, masks of what
is present, a quorum, workers that die and others that take their ranks. Then pages, windows, ages and counts are compared.
PSD_STEP_SEQUENCES says how many there are; `make check-steps` has 10,003.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from raw_client import MODES
from raw_steps import LANES, Done, StepWorker, has_counted, pause

from psd.checkpoint import CheckpointDirectory
from psd.contract.errors import PsdError
from psd.contract.layout import Layout
from psd.v1 import job_pb2

WORLD = 3
OF_ROUNDS, WITHOUT_ROUNDS = (int(os.environ.get("PSD_STEP_SEQUENCES", "28")) * k // 7 for k in (3, 2))
F32, F64 = job_pb2.DTYPE_FLOAT32, job_pb2.DTYPE_FLOAT64
MOMENTUM, ADAM = (0.5, 0.5, 0.0, 0.0), (0.1, 0.9, 0.99, 1e-8, 0.0)


def job_of(mode: str, choice: random.Random) -> job_pb2.JobSpec:
    """Two groups, of several tensors each, with odd sizes; the second may be of 64 bits."""
    has_rounds = mode == "sync"
    first, second = choice.choice([(F32, F64), (F32, F32), (F64, F32)])
    staleness = "" if has_rounds else choice.choice(["", "lr"])
    groups = [
        job_pb2.GroupSpec(rule="sgd", flags=["momentum"], staleness=staleness),
        job_pb2.GroupSpec(rule="adam", staleness=staleness),
    ]
    tensors = [
        job_pb2.TensorSpec(name=f"t{i}", shape=[size], dtype=dtype, group=group)
        for i, (size, dtype, group) in enumerate([(5, first, 0), (7, first, 0), (1, first, 0), (9, second, 1), (4, second, 1)])
    ]
    return job_pb2.JobSpec(
        world_size=WORLD,
        mode=MODES[mode],
        staleness_bound=2 if mode == "ssp" else 0,
        quorum=choice.choice([0, 2]) if has_rounds else 0,
        reduction=choice.choice([job_pb2.REDUCTION_MEAN, job_pb2.REDUCTION_SUM]),
        groups=groups,
        tensors=tensors,
    )


class Side:
    """One of the two shards, and its workers. url: of its checkpoints; empty: it takes none."""

    def __init__(
        self, server: Any, dial: Callable[[str], grpc.Channel], job: job_pb2.JobSpec, lanes: list[str], url: str = ""
    ) -> None:
        self.shard, self._url = server.shard, url
        self.sessions: list[int] = []
        self.steps = 0
        self._found: dict[int, Done] = {}
        self._is_step: dict[int, bool] = {}
        self._server, self._dial, self._job, self._lanes = server, dial, job, lanes
        self.workers: list[StepWorker] = [self.join(rank) for rank in range(WORLD)]

    def join(self, rank: int) -> StepWorker:
        worker = StepWorker(self._dial(self._server.address), rank, WORLD, job=self._job, lane=self._lanes[rank])
        worker.scalars = [MOMENTUM, ADAM]
        self.sessions.append(worker.session)
        return worker

    def begin(self, rank: int, values: Any, clock: int, named: dict[str, Any]) -> None:
        """Begin a step if it is offered, else a push; return when all blocks have it, or it is answered."""
        worker = self.workers[rank]
        if worker.offer is not None:
            worker.begin_step(values, clock, **named)
            if not self._has_counted(worker, clock) and isinstance(found := worker.end_step(), Done):
                self.steps += 1
                self._found[rank] = found
                return
            self._is_step[rank] = worker.offer is not None
            if self._is_step[rank]:
                return
        worker.begin_call(values, clock, **named)
        self._has_counted(worker, clock)

    def _has_counted(self, worker: StepWorker, clock: int) -> bool:
        """True once all blocks have a push; False if it is answered before that."""
        while not has_counted(self.shard, worker, clock):
            if worker.is_answered(0.001):
                return has_counted(self.shard, worker, clock)
        return True

    def end(self, rank: int, values: Any, clock: int, named: dict[str, Any]) -> Any:
        """The answer, or the name of the error."""
        worker = self.workers[rank]
        if (known := self._found.pop(rank, None)) is not None:
            return known
        try:
            if self._is_step.pop(rank, False):
                found = worker.end_step()
                if isinstance(found, Done):
                    self.steps += 1
                    return found
                worker.begin_call(values, clock, **named)
            return worker.end_call()
        except PsdError as error:
            return error.reason

    def at_once(self, rank: int, values: Any, clock: int, named: dict[str, Any]) -> Any:
        """Both."""
        self.begin(rank, values, clock, named)
        return self.end(rank, values, clock, named)

    def replace(self, rank: int) -> int:
        """A worker dies, and another one takes its rank; the clock at which it begins."""
        self.shard.admission.kick(rank, self.workers[rank].session)
        self.workers[rank].close()
        self.workers[rank] = self.join(rank)
        return self.workers[rank].clock

    def settle(self) -> None:
        """Wait until all checkpoints that were taken are written."""
        while self.shard.cuts.is_storing:
            pause()

    def stored(self) -> list[Any]:
        """Of each checkpoint: its step, clocks, and all that its blocks have but sessions."""
        self.settle()
        directory, found = CheckpointDirectory(self._url), []
        for info in directory.checkpoints():
            manifest = directory.load(info.name)
            blocks = directory.read_blocks(manifest, Layout(manifest.spec, 1), 0)
            arrays = [(b.version, *(a.tobytes() for a in (b.parameter, *b.slots.values(), b.steps, b.clocks))) for b in blocks]
            found.append((manifest.step, dict(manifest.worker_clocks), arrays))
        return sorted(found)

    def left(self) -> Any:
        """All that is left of it."""
        job = self.shard.job
        known = {session: f"session {i}" for i, session in enumerate(self.sessions)}
        pages = []
        for block in job.blocks.values():
            page = block.pin()
            arrays = [array.tobytes() for array in (page.parameter, *page.slots, page.steps, page.clocks)]
            pages.append((page.version, arrays, [known.get(int(each), "") for each in page.sessions], page.content))
            block.unpin(page)
        status = self.shard.status()
        counters = status.counters
        lanes = {
            name: (lane.received_bytes, lane.sent_bytes, sum(lane.calls["push_pull"].counts))
            for name, lane in counters.lanes.items()
        }
        counts = counters.pushes_accepted, counters.pushes_duplicate, counters.pushes_late, counters.pulls
        workers = [(w.clock, w.floor, w.samples, w.state, w.has_pushed) for w in status.workers]
        times = [(sum(block.times.closed.counts), block.times.is_open) for block in job.blocks.values()]
        members = [job.arena.member(rank)[1:] for rank in range(WORLD)]
        return pages, job.ages, lanes, counts, workers, times, members


@pytest.fixture
def sides(
    cluster: Callable[..., Any], dial: Callable[..., grpc.Channel], tmp_path: Path
) -> Iterator[Callable[..., list[Side]]]:
    """sides(job, lanes, every) -> the shard that arms, and the one that does not."""
    made: list[Side] = []

    def make(job: job_pb2.JobSpec, lanes: list[str], every: int = 0) -> list[Side]:
        for never in (False, True):
            url = str(tmp_path / str(never)) if every else ""
            config = {"checkpoint_dir": url, "checkpoint_steps": every, "checkpoint_keep": 1000} if every else {}
            made.append(Side(cluster(1, never_armed=never, **config).shards[0], dial, job, lanes, url))
        return made

    yield make
    for side in made:
        for worker in side.workers:
            worker.close()


def gradient(choice: random.Random, side: Side) -> tuple[Any, list[bytes]]:
    """The values of all blocks, and what is present of them, if not all is."""
    values, masks, is_masked = [], [], choice.random() < 0.3
    for plan in side.workers[0].plans:
        numbers = np.array([choice.uniform(-2, 2) for _ in range(plan.length)])
        mask = choice.randrange(1 << len(plan.segment_ends)) if is_masked else (1 << len(plan.segment_ends)) - 1
        begin = 0
        for k, end in enumerate(plan.segment_ends):
            if not mask >> k & 1:
                numbers[begin:end] = 0
            begin = end
        values.append(numbers)
        masks.append(mask.to_bytes((len(plan.segment_ends) + 7) // 8, "little"))
    return values, masks if is_masked else []


def named_of(choice: random.Random, present: list[bytes]) -> dict[str, Any]:
    named: dict[str, Any] = {"weight": choice.choice([1.0, 1.0, 2.5, 0.0])}
    if present:
        named["present"] = present
    return named


def set_scalars(sides: list[Side], rank: int, scale: float) -> None:
    for side in sides:
        side.workers[rank].scalars = [(MOMENTUM[0] * scale, *MOMENTUM[1:]), (ADAM[0] * scale, *ADAM[1:])]


@pytest.mark.parametrize("every", [0, 4])
@pytest.mark.parametrize("seed", range(OF_ROUNDS))
def test_rounds_of_steps_are_those_of_pushes(sides: Callable[..., list[Side]], seed: int, every: int) -> None:
    """With what happens to rounds: late ones, a quorum, deaths, what comes again; and checkpoints by steps."""
    choice = random.Random(seed)
    job = job_of("sync", choice)
    both = sides(job, [choice.choice(LANES) for _ in range(WORLD)], every)
    since = [0] * WORLD
    for clock in range(25):
        for side in both:
            side.settle()
        scale = choice.choice([1.0, 1.0, 0.5])
        order = choice.sample(range(WORLD), WORLD)
        pushed: list[tuple[int, Any, dict[str, Any]]] = []
        quorum = job.quorum or WORLD
        for place, rank in enumerate(order):
            set_scalars(both, rank, 0.25 if since[rank] and choice.random() < 0.2 else scale)  # a schedule that lags
            values, present = gradient(choice, both[0])
            named = named_of(choice, present) | {"since": since[rank]}
            if place >= quorum:
                late = [side.at_once(rank, values, clock, named) for side in both]
                assert late[0] == late[1]
                continue
            for side in both:
                side.begin(rank, values, clock, named)
            pushed.append((rank, values, named))
        for rank, values, named in pushed:
            found = [side.end(rank, values, clock, named) for side in both]
            assert found[0] == found[1]
            assert isinstance(found[0], Done)
        if choice.random() < 0.2:  # one comes again
            rank, values, named = choice.choice(pushed)
            again = [side.at_once(rank, values, clock, named) for side in both]
            assert again[0] == again[1]
        if choice.random() < 0.1:
            rank = choice.randrange(WORLD)
            begins = [side.replace(rank) for side in both]
            assert begins[0] == begins[1] == clock + 1
            since[rank] = clock + 1
    assert both[0].left() == both[1].left()
    if every:
        stored = [side.stored() for side in both]
        assert stored[0] == stored[1]
        assert [step for step, _, _ in stored[0]] == [*range(every, 25, every)]
    assert both[0].steps > 0
    assert both[1].steps == 0


@pytest.mark.parametrize("mode", ["async", "ssp"])
@pytest.mark.parametrize("seed", range(WITHOUT_ROUNDS))
def test_steps_without_rounds_are_pushes(sides: Callable[..., list[Side]], mode: str, seed: int) -> None:
    """With what happens there: early ones, wrong versions, deaths, what comes again."""
    choice = random.Random(seed)
    job = job_of(mode, choice)
    both = sides(job, [choice.choice(LANES) for _ in range(WORLD)])
    clocks, read = [0] * WORLD, [[0] * both[0].workers[0].blocks for _ in range(WORLD)]
    for _ in range(90):
        rank = choice.randrange(WORLD)
        if mode == "ssp" and clocks[rank] >= min(clocks) + 1:  # it would wait at the gate
            rank = clocks.index(min(clocks))
        set_scalars(both, rank, choice.choice([1.0, 0.5]))
        values, present = gradient(choice, both[0])
        named = named_of(choice, present) | {"versions": read[rank]}
        kind = choice.random()
        clock = clocks[rank]
        if kind < 0.1 and clock:
            clock -= 1  # it comes again
        elif kind < 0.15 and mode == "async":
            clock += 2
        elif kind < 0.2:
            named["versions"] = [version + 1000 for version in read[rank]]
        found = [side.at_once(rank, values, clock, named) for side in both]
        assert found[0] == found[1]
        if isinstance(found[0], Done):
            clocks[rank] = max(clocks[rank], clock + 1)
            read[rank] = found[0].versions
        if choice.random() < 0.05:
            begins = [side.replace(rank) for side in both]
            assert begins[0] == begins[1]
            clocks[rank] = begins[0]
    assert both[0].left() == both[1].left()
    assert both[0].steps > 0
    assert both[1].steps == 0
