"""Steps of several workers, and steps beside pushes: rounds, gates, waits and counts. No psd_client."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from raw_client import spec
from raw_steps import CASE, LANES, LONG_WAIT, Again, Done, StepWorker, make_first_round, pause, two, wait_until_counted

from psd.contract.errors import PsdError
from psd.v1 import job_pb2


@pytest.mark.parametrize("lane", LANES)
def test_a_round_is_closed_by_the_last_step(start: Callable[..., StepWorker], lane: str) -> None:
    """The step that has waited is answered, too."""
    first, second = two(start, lane=lane)

    for clock in range(1, 5):
        first.begin_step((1, 2), clock)
        found = second.train((3, 4), clock)
        mine = first.end_step()
        if isinstance(mine, Again):  # the machine was slow
            mine = first.push_pull((1, 2), clock)
        assert mine.parameters == found.parameters == [[-2.0 * clock] * 3, [-3.0 * clock] * 3]


def test_a_round_that_stays_open_is_waited_for_the_long_way(start: Callable[..., StepWorker]) -> None:
    """So status says for whom, and the push counts as the one that it is made in place of."""
    first, second = two(start)

    assert first.step((1, 2), 1) == Again(LONG_WAIT)
    first.begin_call((1, 2), 1)
    while not (waits := start.shard.status().waits):  # type: ignore[attr-defined]
        pause()
    assert [worker.rank for worker in start.shard.missing_for(waits[0])] == [1]  # type: ignore[attr-defined]
    assert isinstance(second.step((3, 4), 1), Done), "a step ends the waits of pushes"

    assert first.end_call() == Done(2, 2, 0, [2, 2], [[-2.0] * 3, [-3.0] * 3])
    counters = start.shard.status().counters  # type: ignore[attr-defined]
    assert (counters.pushes_accepted, counters.pushes_duplicate) == (4, 0)


def test_a_push_ends_the_waits_of_steps(start: Callable[..., StepWorker]) -> None:
    """A round may have both."""
    first, second = two(start)
    for clock in range(1, 20):
        second.offer = None
        first.begin_step((1, 1), clock)
        second.begin_call((3, 3), clock)
        mine, its = first.end_step(), second.end_call()
        if isinstance(mine, Again):
            mine = first.push_pull((1, 1), clock)
        assert mine.parameters == its.parameters == [[-2.0 * clock] * 3] * 2
        if first.offer is None:
            break


def test_a_step_that_closes_a_round_and_cannot_be_answered_ends_the_waits_for_it(start: Callable[..., StepWorker]) -> None:
    """One of its blocks is none for a step, and its worker has gone when it is to hear so."""
    job = spec(2, blocks=2, size=3)
    job.tensors.append(job_pb2.TensorSpec(name="more", shape=[3], dtype=job_pb2.DTYPE_FLOAT32, group=1))
    first, second = two(start, job=job)
    second.begin_call((3, 3), 1)
    shard = start.shard  # type: ignore[attr-defined]
    wait_until_counted(start, second, 1)
    while len(shard.status().waits) < 1:
        pause()

    block = shard.job.blocks[0]
    with block.lock:
        first.begin_step((1, 1), 1, present=[b"\1", b"\1"])  # there are numbers where nothing is present
        first.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        first.stream.close()
    while block.version < 2:
        pause()
    assert shard.job.blocks[1].version == 1

    while [worker.rank for wait in shard.status().waits for worker in shard.missing_for(wait)] != [0]:
        assert not second.is_answered(0), "it goes on, and waits for the other block"


def test_scalars_that_differ_from_a_steps_are_refused_as_ever(start: Callable[..., StepWorker]) -> None:
    """The error names the worker that made the step, and what it said."""
    first, second = two(start)
    first.begin_step((1, 1), 1, scalars=(0.5, 0, 0, 0))
    wait_until_counted(start, first, 1)

    assert second.step((1, 1), 1, scalars=(0.25, 0, 0, 0)) == Again(CASE)
    with pytest.raises(PsdError, match=r"in round 1 worker 1 says 0.25, worker 0 said 0.5") as caught:
        second.push_pull((1, 1), 1, scalars=(0.25, 0, 0, 0))
    assert caught.value.reason == "ScalarsDisagree"
    assert first.end_step() == Again(LONG_WAIT)


def test_the_bound_holds_steps_back_and_a_step_opens_it(start: Callable[..., StepWorker]) -> None:
    """The gate is Python's; whoever opens it tells it."""
    first, second = start(0, 2, mode="ssp", bound=2), start(1, 2, mode="ssp", bound=2)
    second.push_pull((0, 0), 0)
    for clock in range(3):
        first.train((1, 1), clock)
    assert first.step((1, 1), 3) == Again(CASE), "it could not read the answer"
    first.begin_call((1, 1), 3)
    while not start.shard.status().waits:  # type: ignore[attr-defined]
        pause()

    assert isinstance(second.step((0, 0), 1), Done)

    assert first.end_call().clock == 4


def test_the_bound_holds_steps_back_after_steps_that_the_shard_has_not_seen(start: Callable[..., StepWorker]) -> None:
    """Whose pushes other shards alone have: clocks are then above the versions here."""
    workers = [start(rank, 2, mode="ssp", bound=2) for rank in range(2)]
    for worker in workers:
        worker.push_pull((0, 0), 0)
    for worker in workers:
        worker.heartbeat(10)
    for worker in workers:
        worker.push_pull((0, 0), 10)

    assert [type(workers[0].step((1, 1), clock)) for clock in (11, 12)] == [Done, Done]
    assert workers[0].step((1, 1), 13) == Again(CASE), "it could not read the answer before the other one has made step 11"


@pytest.mark.parametrize("mode", ["async", "sync", "ssp"])
def test_sums_are_exact_while_steps_are_revoked_again_and_again(start: Callable[..., StepWorker], mode: str) -> None:
    """Two workers push as fast as they can; every gradient counts once."""
    steps = 1500
    workers = tuple(start(rank, 2, mode=mode, bound=4 if mode == "ssp" else 0) for rank in range(2))
    shard = start.shard  # type: ignore[attr-defined]
    ended = threading.Event()
    taken = [0, 0]

    def work(worker: StepWorker) -> list[list[float]]:
        for clock in range(steps):
            before = worker.offer
            found = worker.train((1, 2), clock, scalars=(1.0, 0, 0, 0))
            taken[worker.caller.rank] += before is not None and worker.offer is not None
        return found.parameters

    def revoke() -> None:
        while not ended.wait(0.003):
            shard._core.revoke()

    with ThreadPoolExecutor(3) as pool:
        revoking = pool.submit(revoke)
        try:
            list(pool.map(work, workers))
        finally:
            ended.set()
        revoking.result()

    factor = 1 if mode == "sync" else 2
    final = workers[0].push_pull((0, 0), steps, weight=0.0) if mode != "sync" else None
    pages = {index: block.pin() for index, block in shard.job.blocks.items()}
    try:
        assert [page.parameter.tolist() for page in pages.values()] == [
            [-float(factor * steps)] * 3,
            [-2.0 * factor * steps] * 3,
        ]
        assert all(page.clocks[1] == steps for page in pages.values())
    finally:
        shard.job.unpin_all(pages)
    assert final is None or final.counted == 2
    assert min(taken) > 0, "some were steps"
    status = shard.status()
    assert [worker.clock for worker in status.workers] == ([steps] * 2 if mode == "sync" else [steps + 1, steps])
    assert status.counters.pushes_accepted == 2 * steps + (mode != "sync")
    assert status.counters.pushes_duplicate == 0


@pytest.mark.parametrize("waits_s", [0.0, 0.2])
def test_a_step_whose_worker_hangs_up_counts_as_a_push(
    cluster: Callable[..., Any], dial: Callable[..., grpc.Channel], waits_s: float
) -> None:
    """Whether the worker was told to make it again, or not: its next connection makes another push."""
    seen = []
    for never_armed in (False, True):
        server = cluster(1, never_armed=never_armed).shards[0]
        first, second = (StepWorker(dial(server.address), rank, 2) for rank in range(2))
        make_first_round(first, second)
        if never_armed:
            first.begin_call((1, 1), 1)
        else:
            first.begin_step((1, 1), 1)
        while server.shard.status().workers[0].clock < 2:
            pause()
        pause(waits_s)

        first.stream.close()
        first.open()
        first.begin_call((1, 1), 1)
        found = second.train((3, 3), 1)
        assert first.end_call().parameters == found.parameters
        counters = server.shard.status().counters
        lane = counters.lanes["tcp"]
        seen.append((counters.pushes_accepted, counters.pushes_duplicate, lane.received_bytes))
        seen[-1] += tuple(worker.samples for worker in server.shard.status().workers)
        first.close()
        second.close()

    assert seen[0] == seen[1]
    assert seen[0][:2] == (4, 1)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_counts_are_those_of_the_long_way(cluster: Callable[..., Any], dial: Callable[..., grpc.Channel], mode: str) -> None:
    """Status and metrics cannot tell steps from pushes."""
    seen = []
    for never_armed in (False, True):
        server = cluster(1, never_armed=never_armed).shards[0]
        worker = StepWorker(dial(server.address), mode=mode)
        for clock in range(20):
            worker.train((1, 2), clock, weight=2.0, **({} if worker.offer is None else {"versions": [clock] * 2}))
        assert (worker.offer is None) == never_armed
        worker.push_pull((1, 2), 19)
        status, job = server.shard.status(), server.shard.job
        lane = status.counters.lanes["tcp"]
        calls = lane.calls["push_pull"]
        seen.append(
            (
                (status.counters.pushes_accepted, status.counters.pushes_duplicate, status.counters.pushes_late),
                (status.counters.pulls, lane.received_bytes, lane.sent_bytes, sum(calls.counts), calls.total > 0),
                [(each.clock, each.floor, each.samples, each.session > 0, each.last_seen > 0) for each in status.workers],
                [(sum(block.times.closed.counts), block.times.is_open) for block in job.blocks.values()],
                server.shard._core.job.arena.member(0)[1:],
                job.trained_versions,
            )
        )
        worker.close()

    assert seen[0] == seen[1]
    assert seen[0][0] == (20, 1, 0)
