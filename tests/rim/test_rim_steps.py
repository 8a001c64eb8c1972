"""Armed steps as a stranger sees them: raw sockets and structures, right and wrong ones. No psd_client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from raw_steps import CASE, LONG_WAIT, REVOKED, Again, Done, StepWorker

from psd.contract.errors import Draining, PsdError, SessionFenced, ShardRestarted
from psd.contract.wire import PREFIX, Disconnected, Kind
from psd.state.workers.membership import WorkerState
from psd.v1 import bulk_pb2, control_pb2, data_pb2

LANES = ["tcp", "local", "memory"]


@pytest.fixture
def start(cluster: Callable[..., Any], dial: Callable[..., grpc.Channel]) -> Iterator[Callable[..., StepWorker]]:
    """start(rank, world_size, shard=..., ...) -> a worker of one job on one shard; `start.shard`."""
    joined: list[StepWorker] = []
    shards: list[Any] = []

    def enter(rank: int = 0, world_size: int = 1, *, config: dict[str, Any] | None = None, **how: Any) -> StepWorker:
        if not shards:
            shards.extend(cluster(1, **(config or {})).shards)
            enter.server, enter.shard = shards[0], shards[0].shard  # type: ignore[attr-defined]
        joined.append(StepWorker(dial(shards[0].address), rank, world_size, **how))
        return joined[-1]

    yield enter
    for worker in joined:
        worker.close()


@pytest.mark.parametrize("mode", ["async", "sync", "ssp"])
@pytest.mark.parametrize("lane", LANES)
def test_steps_do_what_pushes_do(start: Callable[..., StepWorker], mode: str, lane: str) -> None:
    worker = start(lane=lane, mode=mode)
    found = worker.push_pull((1, 2), 0)
    assert found == Done(1, 2, 0, [1, 1], [[-1.0] * 3, [-2.0] * 3])
    assert worker.offer is not None

    for clock in range(1, 6):
        assert worker.step((1, 2), clock) == Done(
            clock + 1, 2, 0, [clock + 1] * 2, [[-1.0 - clock] * 3, [-2.0 - 2 * clock] * 3]
        )

    assert worker.push_pull((1, 2), 6).parameters == [[-7.0] * 3, [-14.0] * 3], "and pushes what steps do"


def armed(start: Callable[..., StepWorker], rank: int = 0, world_size: int = 1, **how: Any) -> StepWorker:
    """A worker that has made its first push, and may make steps; alone in its job."""
    worker = start(rank, world_size, **how)
    worker.push_pull([1] * worker.blocks, 0)
    assert worker.offer is not None
    return worker


def test_a_step_that_comes_again_counts_once(start: Callable[..., StepWorker]) -> None:
    worker = armed(start, mode="async")
    first = worker.step((1, 2), 1)

    assert worker.step((1, 2), 1) == Done(2, 0, 2, [2, 2], first.parameters)
    assert worker.push_pull((1, 2), 1) == Done(2, 0, 2, [2, 2], first.parameters)


def test_nothing_is_offered_to_who_does_not_ask(start: Callable[..., StepWorker]) -> None:
    worker = start(mode="async")

    worker.push_pull((1, 2), 0, wants=False)

    assert worker.offer is None


def test_nothing_is_offered_by_a_shard_that_never_arms(start: Callable[..., StepWorker]) -> None:
    worker = start(mode="async", config={"never_armed": True})

    worker.push_pull((1, 2), 0)

    assert worker.offer is None


@pytest.mark.parametrize("fields", [{"part": 1}, {"held": [0, 0]}, {"norms": [1.0]}], ids=str)
def test_nothing_is_offered_after_a_push_with_what_steps_do_not_have(
    start: Callable[..., StepWorker], fields: dict[str, Any]
) -> None:
    worker = start(mode="async")

    if "held" in fields:
        with pytest.raises(PsdError):
            worker.push_pull((1, 2), 0, **fields)
    else:
        worker.push_pull((1, 2), 0, **fields)

    assert worker.offer is None


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ({"epoch": 0}, REVOKED),
        ({"epoch": 1}, REVOKED),
        ({"session": 0}, CASE),
        ({"session": (1 << 64) - 1}, CASE),
        ({"flags": 4}, CASE),
        ({"place": 1}, CASE),
        ({"weight": float("nan")}, CASE),
        ({"weight": -1.0}, CASE),
        ({"weight": 1e16}, CASE),
        ({"since": 3}, CASE),
        ({"scalars": (-1.0, 0, 0, 0)}, CASE),
        ({"scalars": (float("nan"), 0, 0, 0)}, CASE),
        ({"scalars": (1e39, 0, 0, 0)}, CASE),
        ({"scalars": (1.0, 0.5, 0, 0)}, CASE),  # without the flag "momentum"
        ({"versions": (1, 7)}, CASE),
    ],
    ids=str,
)
def test_what_a_step_may_not_say_is_left_to_the_long_way(
    start: Callable[..., StepWorker], named: dict[str, Any], reason: int
) -> None:
    """And that goes on as if nothing had been."""
    worker = armed(start, mode="async")

    assert worker.step((1, 1), 1, **named) == Again(reason)

    is_half = "versions" in named  # the first block has counted it, which the push made in its place says itself
    assert worker.push_pull((1, 1), 1) == Done(2, 2, 0, [2, 2], [[-2.0] * 3, [-2.0] * 3])
    assert worker.offer is None or reason == REVOKED or is_half, "the next offer waits for a push more"
    status = start.shard.status().counters  # type: ignore[attr-defined]
    assert (status.pushes_accepted, status.pushes_duplicate) == (2, 0)


@pytest.mark.parametrize(("mode", "clock"), [("async", 2), ("async", 1 << 63), ("sync", 0), ("sync", 2), ("ssp", 5)])
def test_early_and_late_steps_are_left_to_the_long_way(start: Callable[..., StepWorker], mode: str, clock: int) -> None:
    worker = armed(start, mode=mode)

    assert worker.step((1, 1), clock) == Again(CASE)
    assert worker.push_pull((1, 1), 1).counted == 2


def test_scalars_weights_and_what_is_present_are_each_steps_own(start: Callable[..., StepWorker]) -> None:
    worker = armed(start, mode="async")

    assert worker.step((1, 1), 1, scalars=(0.5, 0, 0, 0)).parameters == [[-1.5] * 3] * 2
    assert worker.step((1, 1), 2, weight=0.0) == Done(3, 2, 0, [3, 3], [[-1.5] * 3] * 2)
    assert worker.step((1, 1), 3, present=(b"\1", b"\0")) == Done(4, 2, 0, [4, 4], [[-2.5] * 3, [-1.5] * 3])
    assert start.shard.status().workers[0].samples == 3.0  # type: ignore[attr-defined]


def test_an_epoch_is_of_one_connection_and_one_offer(start: Callable[..., StepWorker]) -> None:
    """Another connection of the same worker, and another offer, are others."""
    worker = armed(start, mode="async")
    offer = worker.offer
    worker.push_pull((1, 1), 1)
    assert worker.offer.epoch != offer.epoch
    worker.offer = offer
    assert worker.step((1, 1), 2) == Again(REVOKED)

    worker.push_pull((1, 1), 2)
    offer, before = worker.offer, worker.stream
    worker.stream = worker.connect()
    before.close()
    worker.offer = offer
    assert worker.step((1, 1), 3) == Again(REVOKED), "nothing was offered on this connection"
    assert worker.push_pull((1, 1), 3).counted == 2


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize(("front", "payload"), [(-8, 0), (8, 0), (0, 8), (0, -8), (1 << 31, 0), (0, 1 << 40)])
def test_a_step_of_another_size_ends_the_connection(
    start: Callable[..., StepWorker], lane: str, front: int, payload: int
) -> None:
    worker = armed(start, mode="async", lane=lane)
    head_bytes, nbytes = worker.offer.head_bytes + front, worker.offer.gradient_bytes + payload
    if nbytes < 0:
        pytest.skip("it has no payload")

    worker.stream.socket.sendall(PREFIX.pack(Kind.STEP, head_bytes, nbytes))

    with pytest.raises(PsdError, match="step: has another size than was offered"):
        worker.end_step()
    with pytest.raises(Disconnected):
        worker.stream.receive()
    worker.stream.close()
    worker.stream = worker.connect()
    assert worker.push_pull((1, 1), 1).counted == 2


def test_a_step_that_was_never_offered_is_answered_again(start: Callable[..., StepWorker]) -> None:
    worker = start(mode="async")

    worker.stream.send(Kind.STEP, b"x" * 48, b"y" * 100_000)

    worker.offer = bulk_pb2.StepOffer()
    assert worker.end_step() == Again(REVOKED)
    assert worker.push_pull((1, 1), 0).counted == 2
    worker.stream.socket.sendall(PREFIX.pack(Kind.STEP, 4, 1 << 40))
    worker.offer = None
    worker.stream.skip(0)


def test_a_step_may_come_in_pieces_and_with_the_next_message(start: Callable[..., StepWorker]) -> None:
    worker = armed(start, mode="async")
    whole = bytearray()
    send, worker.stream.send = (
        worker.stream.send,
        lambda kind, head=b"", *payload: whole.extend(
            PREFIX.pack(kind, len(head), sum(map(len, payload))) + head + b"".join(payload)
        ),
    )
    worker.begin_step((1, 1), 1)
    worker.begin_step((1, 1), 2)
    worker.stream.send = send

    for at in range(0, len(whole), 7):
        worker.stream.socket.sendall(whole[at : at + 7])

    assert worker.end_step() == Done(2, 2, 0, [2, 2], [[-2.0] * 3] * 2)
    assert worker.end_step() == Done(3, 2, 0, [3, 3], [[-3.0] * 3] * 2)
    worker.begin_step((1, 1), 3)
    worker.begin_call((1, 1), 4)
    assert worker.end_step() == Done(4, 2, 0, [4, 4], [[-4.0] * 3] * 2)
    assert worker.end_call() == Done(5, 2, 0, [5, 5], [[-5.0] * 3] * 2)


# -- what reaches a worker that is armed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_kick_reaches_a_worker_that_is_armed(start: Callable[..., StepWorker], mode: str) -> None:
    worker = armed(start, mode=mode)

    assert start.shard.admission.kick(0, worker.session)  # type: ignore[attr-defined]

    assert worker.step((1, 1), 1) == Again(REVOKED)
    with pytest.raises(SessionFenced, match="has ended"):
        worker.push_pull((1, 1), 1)


def test_a_kick_reaches_a_step_that_waits(start: Callable[..., StepWorker]) -> None:
    worker, other = two(start)
    worker.begin_step((1, 1), 1)
    has_counted(start, worker, 1)

    assert start.shard.admission.kick(0, worker.session)  # type: ignore[attr-defined]

    assert worker.end_step() in (Again(REVOKED), Again(LONG_WAIT))
    with pytest.raises(SessionFenced, match="has ended"):
        worker.push_pull((1, 1), 1)
    assert other.train((3, 3), 1).parameters == [[-2.0] * 3] * 2, "its gradient stays counted, as ever"


def test_a_lease_that_ends_reaches_a_worker_that_is_armed(start: Callable[..., StepWorker]) -> None:
    worker = armed(start, mode="async", config={"lease_s": 0.5})

    while start.shard.status().workers[0].state is WorkerState.LIVE:  # type: ignore[attr-defined]
        time.sleep(0.05)

    assert worker.step((1, 1), 1) == Again(REVOKED)
    with pytest.raises(SessionFenced, match="lease"):
        worker.push_pull((1, 1), 1)


def test_steps_renew_the_lease(start: Callable[..., StepWorker]) -> None:
    worker = armed(start, mode="async", config={"lease_s": 60.0})
    before = start.shard.status().workers[0].last_seen  # type: ignore[attr-defined]

    worker.step((1, 1), 1)

    assert start.shard.status().workers[0].last_seen > before  # type: ignore[attr-defined]


def test_a_drain_reaches_a_worker_that_is_armed(start: Callable[..., StepWorker]) -> None:
    worker = armed(start, mode="async")

    start.shard.drain()  # type: ignore[attr-defined]

    assert worker.step((1, 1), 1) == Again(REVOKED)
    with pytest.raises(Draining):
        worker.push_pull((1, 1), 1)


def test_an_order_reaches_a_worker_that_is_armed(start: Callable[..., StepWorker]) -> None:
    worker = armed(start, mode="sync")

    start.shard.scale_learning_rate(0.5)  # type: ignore[attr-defined]

    assert worker.step((1, 1), 1) == Again(REVOKED)
    worker.push_pull((1, 1), 1)
    assert worker.reply.orders.learning_rates[0].scale == 0.5
    assert worker.offer is None, "each reply has the orders"


def test_parameters_that_are_set_reach_a_worker_that_is_armed(start: Callable[..., StepWorker]) -> None:
    worker = armed(start, mode="async")
    entry = data_pb2.ParameterBlock(block=0, payload=np.full(3, 7, np.float32).tobytes())

    worker.data.SetParameters(
        data_pb2.ParametersRequest(caller=worker.caller, layout_digest=worker.digest, clock=1, seq=1, parameters=[entry])
    )

    assert worker.step((1, 1), 1) == Again(REVOKED)
    assert worker.push_pull((1, 1), 1).parameters == [[6.0] * 3, [-2.0] * 3]
    assert worker.step((1, 1), 2).parameters == [[5.0] * 3, [-3.0] * 3]


def test_a_reader_reaches_a_worker_that_is_armed(start: Callable[..., StepWorker]) -> None:
    """While it asks for versions that are a few rounds ahead, none passes faster than it can ask."""
    worker = armed(start, mode="sync")

    worker.control.Describe(control_pb2.DescribeRequest(shard_count=1))

    assert worker.step((1, 1), 1) == Again(REVOKED)
    worker.push_pull((1, 1), 1)
    assert worker.offer is None


def test_a_going_back_reaches_a_worker_that_is_armed(start: Callable[..., StepWorker], tmp_path: Path) -> None:
    worker = armed(start, mode="sync", config={"checkpoint_dir": str(tmp_path)})
    clock = 1
    with ThreadPoolExecutor(1) as pool:
        storing = pool.submit(worker.control.Checkpoint, control_pb2.CheckpointRequest(), timeout=100)
        while not storing.done():
            assert worker.train((1, 1), clock).counted == 2
            clock += 1
    while worker.offer is None:
        worker.push_pull((1, 1), clock)
        clock += 1
    assert isinstance(worker.step((1, 1), clock), Done)

    worker.control.Rollback(
        control_pb2.RollbackRequest(
            run_id=worker.caller.run_id,
            checkpoint=storing.result().name,
            timeline=1,
            incarnation=worker.caller.incarnation,
        ),
        timeout=100,
    )

    assert worker.step((1, 1), clock + 1) == Again(REVOKED)
    with pytest.raises(ShardRestarted):
        worker.push_pull((1, 1), clock + 1)


def test_another_worker_reaches_those_that_are_armed(start: Callable[..., StepWorker]) -> None:
    """Who joins is waited for from the next round on."""
    worker, other = two(start)
    start.shard.admission.kick(1, other.session)  # type: ignore[attr-defined]
    worker.train((1, 1), 1)
    worker.train((1, 1), 2)
    assert worker.offer is not None

    successor = start(1, 2)

    assert worker.step((1, 1), 3) == Again(REVOKED)
    worker.begin_call((1, 1), 3)
    assert successor.push_pull((3, 3), 3).versions == [4, 4]
    assert worker.end_call().versions == [4, 4]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_cut_in_the_midst_of_steps_has_each_block_at_its_version(start: Callable[..., StepWorker], mode: str) -> None:
    worker = armed(start, mode=mode)
    shard = start.shard  # type: ignore[attr-defined]
    done = shard.cuts.take_part()
    for clock in range(1, 9):
        assert isinstance(worker.step((1, 1), clock), Done)

    shard.schedule.announce("c")

    clock = 9
    assert worker.step((1, 1), clock) == Again(REVOKED)
    cuts: list[Any] = []
    while done.empty():
        found = worker.push_pull((1, 1), clock, cuts=cuts)
        assert found.counted == 2
        assert worker.offer is None or not done.empty()
        clock += 1
        cuts = list(worker.reply.cuts)
        for cut in cuts:
            if cut.waits and not cut.ready:
                cut.ready = True
            elif cut.waits:
                cut.position, cut.order = clock, cut.order
                cut.ready = True
    snapshot = done.get()
    assert not snapshot.why_missed
    assert {page.version for page in snapshot.pages.values()} == {snapshot.cut.step}
    assert [page.parameter.tolist() for page in snapshot.pages.values()] == [[-float(snapshot.cut.step)] * 3] * 2
    shard.cuts.release(snapshot)


def test_a_token_that_is_not_good_any_more_ends_the_steps(start: Callable[..., StepWorker]) -> None:
    worker = armed(start, mode="async")
    (connection,) = start.server._bulk._by_rank.values()  # type: ignore[attr-defined]
    connection.is_welcome = lambda _: False

    start.server._bulk.check_tokens()  # type: ignore[attr-defined]

    assert worker.step((1, 1), 1) == Again(REVOKED)
    with pytest.raises(Disconnected):
        worker.push_pull((1, 1), 1)


# -- several workers ----------------------------------------------------------------------------------------------------------


def two(start: Callable[..., StepWorker], **how: Any) -> tuple[StepWorker, StepWorker]:
    """Two workers that are armed, of a job whose first round is over."""
    workers = start(0, 2, **how), start(1, 2, **how)
    for worker in workers:
        worker.begin_call((0, 0), 0)
    for worker in workers:
        worker.end_call()
    for worker in workers:
        assert worker.offer is not None
    return workers


def has_counted(start: Callable[..., StepWorker], worker: StepWorker, clock: int) -> None:
    """Wait until all blocks have a push."""
    blocks = start.shard.job.blocks.values()  # type: ignore[attr-defined]
    while not all(block.has(worker.caller.rank, worker.session, clock) for block in blocks):
        time.sleep(0.001)


@pytest.mark.parametrize("lane", LANES)
def test_a_round_is_closed_by_the_last_step(start: Callable[..., StepWorker], lane: str) -> None:
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
        time.sleep(0.001)
    assert [worker.rank for worker in start.shard.missing_for(waits[0])] == [1]  # type: ignore[attr-defined]
    assert isinstance(second.step((3, 4), 1), Done), "a step ends the waits of pushes"

    assert first.end_call() == Done(2, 2, 0, [2, 2], [[-2.0] * 3, [-3.0] * 3])
    counters = start.shard.status().counters  # type: ignore[attr-defined]
    assert (counters.pushes_accepted, counters.pushes_duplicate) == (4, 0)


def test_a_push_ends_the_waits_of_steps(start: Callable[..., StepWorker]) -> None:
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


def test_scalars_that_differ_from_a_steps_are_refused_as_ever(start: Callable[..., StepWorker]) -> None:
    """The error names the worker that made the step, and what it said."""
    first, second = two(start)
    first.begin_step((1, 1), 1, scalars=(0.5, 0, 0, 0))
    has_counted(start, first, 1)

    assert second.step((1, 1), 1, scalars=(0.25, 0, 0, 0)) == Again(CASE)
    with pytest.raises(PsdError, match=r"in round 1 worker 1 says 0.25, worker 0 said 0.5") as caught:
        second.push_pull((1, 1), 1, scalars=(0.25, 0, 0, 0))
    assert caught.value.reason == "ScalarsDisagree"
    assert first.end_step() == Again(LONG_WAIT)


def test_the_bound_holds_steps_back_and_a_step_opens_it(start: Callable[..., StepWorker]) -> None:
    first, second = start(0, 2, mode="ssp", bound=2), start(1, 2, mode="ssp", bound=2)
    second.push_pull((0, 0), 0)
    for clock in range(3):
        first.train((1, 1), clock)
    assert first.step((1, 1), 3) == Again(CASE), "it could not read the answer"
    first.begin_call((1, 1), 3)
    while not start.shard.status().waits:  # type: ignore[attr-defined]
        time.sleep(0.001)

    assert isinstance(second.step((0, 0), 1), Done)

    assert first.end_call().clock == 4


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
        for worker in (first, second):
            worker.begin_call((0, 0), 0)
        for worker in (first, second):
            worker.end_call()
        if never_armed:
            first.begin_call((1, 1), 1)
        else:
            first.begin_step((1, 1), 1)
        while server.shard.status().workers[0].clock < 2:
            time.sleep(0.001)
        time.sleep(waits_s)

        first.stream.close()
        first.stream, first.offer = first.connect(), None
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
