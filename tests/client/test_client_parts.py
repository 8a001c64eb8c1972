"""Parts of a job that are stepped at different times: each round is of one, and its push brings back that part alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_faults import Restartable, connect_faulty, expire, in_threads, until

from psd.contract.errors import PartsDisagree
from psd.contract.jobspec import GroupSpec, TensorSpec
from psd_client import ParameterServer, connect
from psd_client.client import worker_of
from psd_client.worker.exchange.sent_push import JobPart

Start = Callable[..., Any]

SIZE = 20_000  # two blocks on two shards, of each part
FIRST, SECOND = JobPart(1, frozenset({0})), JobPart(2, frozenset({1}))
ORDER = (FIRST, FIRST, SECOND, FIRST, SECOND, SECOND)
SGD, MOMENTUM = (0.5, 0.0, 0.0, 0.0), (0.25, 0.5, 0.0, 0.0)
TENSORS = (TensorSpec("a", (SIZE,), "float32", 0), TensorSpec("b", (SIZE,), "float32", 1))
GROUPS = (GroupSpec("sgd"), GroupSpec("sgd", ("momentum",)))


class Worker:
    """A worker that steps parts."""

    def __init__(self, ps: ParameterServer, tensors: Sequence[TensorSpec] = TENSORS, **options: Any) -> None:
        self.ps, self.flat = ps, worker_of(ps)
        self.flat.declare_tensors(tensors, GROUPS, initial=lambda _: None, **options)

    def step(self, part: JobPart, value: float) -> None:
        """Push a gradient of this value for one part, while the other's memory holds what must not be sent."""
        present = np.array([part is FIRST, part is SECOND])
        for view, is_there in zip(self.flat.gradients.views, present, strict=True):
            view.fill(value if is_there else np.nan)
        self.flat.push_pull_flat((SGD, MOMENTUM), 1, present, job_part=part)
        assert np.isnan(self.flat.gradients.views[1 if part is FIRST else 0]).all(), "another part's gradients were changed"

    @property
    def values(self) -> list[float]:
        """The value of each part, all of whose elements are equal."""
        views = self.flat.parameters.views
        for view in views:
            np.testing.assert_array_equal(view, view[0])
        return [float(view[0]) for view in views]


def expected(gradients: list[tuple[JobPart, float]]) -> list[float]:
    """What one process has after these steps."""
    a = b = momentum = 0.0
    for part, gradient in gradients:
        if part is FIRST:
            a -= 0.5 * gradient
        else:
            momentum = 0.5 * momentum + gradient
            b -= 0.25 * momentum
    return [a, b]


def trained(servers: str, world_size: int = 2, order: tuple[JobPart, ...] = ORDER, **options: Any) -> list[list[float]]:
    """The values that each worker has in the end; worker r's gradient at step i is i + r + 1."""

    def run(rank: int) -> list[float]:
        with connect(servers, rank, world_size) as ps:
            worker = Worker(ps, **options)
            for step, part in enumerate(order):
                worker.step(part, step + rank + 1)
            assert ps.clock == len(order)
            return worker.values

    return in_threads(*(lambda rank=rank: run(rank) for rank in range(world_size)))


MEAN = [(part, step + 1.5) for step, part in enumerate(ORDER)]


@pytest.mark.parametrize("aggregation", ["fast", "exact"])
def test_workers_that_step_parts_in_turn_have_the_values_of_one_process(cluster: Start, aggregation: str) -> None:
    assert trained(cluster(2).servers, aggregation=aggregation) == [expected(MEAN)] * 2


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
@pytest.mark.parametrize("consistency", ["sync", "async", "ssp:1"])
def test_a_step_brings_back_its_own_part_alone(cluster: Start, transport: str, consistency: str) -> None:
    """By each lane: half of the parameters, and no more than half of the gradients."""
    with connect(cluster(2).servers, 0, 1, transport=transport) as ps:
        worker = Worker(ps, consistency=consistency)
        before = ps.stats()
        for step, part in enumerate(ORDER):
            worker.step(part, step + 1)
        after = ps.stats()

        assert worker.values == expected([(part, step + 1.0) for step, part in enumerate(ORDER)])
        for way in ("sent_bytes", "received_bytes"):
            assert after[way] - before[way] == len(ORDER) * SIZE * 4, way


def test_a_worker_that_steps_another_part_than_the_round_is_refused_and_may_correct_itself(cluster: Start) -> None:
    shards = cluster(2)
    with connect(shards.servers, 0, 2) as ps, connect(shards.servers, 1, 2) as peer:
        workers = in_threads(lambda: Worker(ps), lambda: Worker(peer))

        def second() -> None:
            until(lambda: all(shard.shard.declared().agreement.known() for shard in shards.shards))
            with pytest.raises(PartsDisagree, match=r"in round 0 worker 1 steps part 2 of the job, worker 0 steps part 1"):
                workers[1].step(SECOND, 1.0)
            workers[1].step(FIRST, 2.0)

        in_threads(lambda: workers[0].step(FIRST, 4.0), second)

        assert workers[1].values == [-1.5, 0.0]


def test_a_worker_that_has_missed_rounds_has_all_parts_again_after_its_next_step(cluster: Start) -> None:
    """With a quorum of one it is late for rounds of both parts, and its step is of one."""
    servers = cluster(2).servers
    with connect(servers, 0, 2) as ps, connect(servers, 1, 2) as peer:
        fast, slow = in_threads(lambda: Worker(ps, quorum=1), lambda: Worker(peer, quorum=1))
        for step, part in enumerate(ORDER):
            fast.step(part, step + 1)

        slow.step(FIRST, 100.0)

        assert slow.values == fast.values == expected([(part, step + 1.0) for step, part in enumerate(ORDER)])
        assert slow.ps.clock == len(ORDER)


@pytest.mark.parametrize("aggregation", ["fast", "exact"])
@pytest.mark.parametrize("index", [0, 1])
def test_a_shard_that_is_restarted_between_parts_changes_no_bit(
    cluster: Start, tmp_path: Path, aggregation: str, index: int
) -> None:
    """Also while a reply is lost: the push is made again, of the same part."""
    shards = Restartable(cluster, tmp_path)
    ps, faults = connect_faulty(shards.servers, 0, 2)
    method = "push_pull" if aggregation == "fast" else "push"

    def first() -> list[float]:
        with ps:
            worker = Worker(ps, aggregation=aggregation)
            for step, part in enumerate(ORDER):
                if step in (1, 4):
                    faults.run_before(method, shard=0, action=lambda: shards.restart(index))
                elif step in (2, 3):
                    faults.lose_reply(method, shard=index)
                worker.step(part, step + 1)
            return worker.values

    def second() -> list[float]:
        with connect(shards.servers, 1, 2) as peer:
            worker = Worker(peer, aggregation=aggregation)
            for step, part in enumerate(ORDER):
                worker.step(part, step + 2)
            return worker.values

    assert in_threads(first, second) == [expected(MEAN)] * 2
    faults.assert_all_fired()


@pytest.mark.parametrize("aggregation", ["fast", "exact"])
def test_a_shard_without_a_block_of_the_part_that_is_restarted_in_its_round_has_the_push_again(
    cluster: Start, tmp_path: Path, aggregation: str
) -> None:
    """It once answered at once: the worker had moved on when the shard lost the push, and everybody waited for it for ever."""
    shards = Restartable(cluster, tmp_path)
    tensors = (TensorSpec("a", (SIZE,), "float32", 0), TensorSpec("b", (10,), "float32", 1))
    order = (SECOND, FIRST, SECOND)

    def known(index: int) -> dict[int, object]:
        found: dict[int, object] = shards.shards[index].shard.declared().agreement.known()
        return found

    with connect(shards.servers, 0, 2) as ps, connect(shards.servers, 1, 2) as peer:
        first, second = in_threads(
            lambda: Worker(ps, tensors, aggregation=aggregation), lambda: Worker(peer, tensors, aggregation=aggregation)
        )
        layout = first.flat.declared.parameters.layout
        (owner,) = {layout.shard_of(block.index) for block in layout.blocks if block.group == 1}

        def steps(worker: Worker) -> list[float]:
            for step, part in enumerate(order):
                worker.step(part, step + 1)
            return worker.values

        def after_a_restart() -> list[float]:
            until(lambda: 0 in known(1 - owner) and 0 in known(owner))
            shards.restart(1 - owner)
            return steps(second)

        ends = in_threads(lambda: steps(first), after_a_restart)

    assert ends == [expected([(part, step + 1.0) for step, part in enumerate(order)])] * 2


def test_a_worker_that_comes_back_goes_on_with_the_part_of_its_round(cluster: Start) -> None:
    """Its lease ran out in mid-job, and it joins again: it has all parts as they are."""
    shards = cluster(2)
    with connect(shards.servers, 0, 2) as ps, connect(shards.servers, 1, 2) as peer:
        workers = in_threads(lambda: Worker(ps), lambda: Worker(peer))
        for part in (FIRST, SECOND):
            in_threads(*(lambda worker=worker, part=part: worker.step(part, 2.0) for worker in workers))
        for shard in shards.shards:
            expire(shard, 1)
        workers[0].step(SECOND, 4.0)

        in_threads(lambda: workers[0].step(FIRST, 1.0), lambda: workers[1].step(FIRST, 3.0))

        assert workers[0].values == workers[1].values


def test_a_step_whose_turn_was_over_before_it_was_made_is_late_and_harms_nobody(cluster: Start) -> None:
    """The program has chosen the part by the clock; its worker then joins anew, at a round of another part. Its push once stood
    for that round, and the other worker was refused."""
    shards = cluster(2)
    with connect(shards.servers, 0, 2) as ps, connect(shards.servers, 1, 2) as peer:
        steady, returned = in_threads(lambda: Worker(ps), lambda: Worker(peer))
        in_threads(lambda: steady.step(FIRST, 2.0), lambda: returned.step(FIRST, 2.0))
        for shard in shards.shards:
            expire(shard, 1)
        steady.step(SECOND, 4.0)
        in_threads(lambda: peer.barrier("here"), lambda: (until(lambda: peer.clock == 2), ps.barrier("here")))

        returned.step(SECOND, 100.0)
        in_threads(lambda: steady.step(FIRST, 1.0), lambda: returned.step(FIRST, 3.0))

        assert steady.values == returned.values == expected([(FIRST, 2.0), (SECOND, 4.0), (FIRST, 2.0)])
        assert (ps.clock, peer.clock) == (3, 3)
        assert peer.stats()["blocks_late"] == 4
