"""What reaches a worker whose steps are taken: whatever changes, before its next step counts. No psd_client."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from raw_steps import CUT, LONG_WAIT, REVOKED, Again, Done, StepWorker, armed, pause, two, wait_until_counted

from psd.checkpoint import CheckpointDirectory
from psd.contract.errors import Draining, SessionFenced, ShardRestarted
from psd.contract.wire import Disconnected
from psd.state.cuts.snapshots import Snapshot
from psd.state.workers.membership import WorkerState
from psd.v1 import control_pb2, data_pb2


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_kick_reaches_a_worker_that_is_armed(start: Callable[..., StepWorker], mode: str) -> None:
    """By the error that a push gets."""
    worker = armed(start, mode=mode)

    assert start.shard.admission.kick(0, worker.session)  # type: ignore[attr-defined]

    assert worker.step((1, 1), 1) == Again(REVOKED)
    with pytest.raises(SessionFenced, match="has ended"):
        worker.push_pull((1, 1), 1)


def test_a_kick_reaches_a_step_that_waits(start: Callable[..., StepWorker]) -> None:
    """And not only when its wait is over."""
    worker, other = two(start)
    worker.begin_step((1, 1), 1)
    wait_until_counted(start, worker, 1)

    assert start.shard.admission.kick(0, worker.session)  # type: ignore[attr-defined]

    assert worker.end_step() in (Again(REVOKED), Again(LONG_WAIT))
    with pytest.raises(SessionFenced, match="has ended"):
        worker.push_pull((1, 1), 1)
    assert other.train((3, 3), 1).parameters == [[-2.0] * 3] * 2, "its gradient stays counted, as ever"


def test_a_lease_that_ends_reaches_a_worker_that_is_armed(start: Callable[..., StepWorker]) -> None:
    """By the error that a push gets."""
    worker = armed(start, mode="async", config={"lease_s": 0.5})

    while start.shard.status().workers[0].state is WorkerState.LIVE:  # type: ignore[attr-defined]
        pause(0.05)

    assert worker.step((1, 1), 1) == Again(REVOKED)
    with pytest.raises(SessionFenced, match="lease"):
        worker.push_pull((1, 1), 1)


def test_a_lease_that_ends_is_noted_when_no_step_is_under_way(start: Callable[..., StepWorker]) -> None:
    """Else a step could note after that, for the shard's next process, that its worker lives."""
    armed(start, mode="async", config={"lease_s": 0.5})
    members, noted = start.shard._core.members, []  # type: ignore[attr-defined]
    save = members._save

    def note(worker: Any) -> None:
        noted.append(members.ranks.known(worker.rank)[1])
        save(worker)

    members._save = note
    while members.workers[0].state is WorkerState.LIVE:
        pause(0.05)

    assert noted == [None], "the session that is armed"


def test_steps_renew_the_lease(start: Callable[..., StepWorker]) -> None:
    """A worker that steps is no silent one."""
    worker = armed(start, mode="async", config={"lease_s": 60.0})
    before = start.shard.status().workers[0].last_seen  # type: ignore[attr-defined]

    worker.step((1, 1), 1)

    assert start.shard.status().workers[0].last_seen > before  # type: ignore[attr-defined]


def test_a_drain_reaches_a_worker_that_is_armed(start: Callable[..., StepWorker]) -> None:
    """By the error that a push gets."""
    worker = armed(start, mode="async")

    start.shard.drain()  # type: ignore[attr-defined]

    assert worker.step((1, 1), 1) == Again(REVOKED)
    with pytest.raises(Draining):
        worker.push_pull((1, 1), 1)


def test_an_order_reaches_a_worker_that_is_armed(start: Callable[..., StepWorker]) -> None:
    """In the reply to the push that is made in place of its next step."""
    worker = armed(start, mode="sync")

    start.shard.scale_learning_rate(0.5)  # type: ignore[attr-defined]

    assert worker.step((1, 1), 1) == Again(REVOKED)
    worker.push_pull((1, 1), 1)
    assert worker.reply.orders.learning_rates[0].scale == 0.5
    assert isinstance(worker.step((1, 1), 2), Done)

    header = data_pb2.PushHeader(caller=worker.caller, clock=2)
    assert start.shard.steps.arm(header, worker.reply, "tcp") is not None  # type: ignore[attr-defined]
    start.shard.scale_learning_rate(0.25)  # type: ignore[attr-defined]
    assert start.shard.steps.arm(header, worker.reply, "tcp") is None, "it has not heard of that"  # type: ignore[attr-defined]


def test_parameters_that_are_set_reach_a_worker_that_is_armed(start: Callable[..., StepWorker]) -> None:
    """The next steps go on from them."""
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
    """No step counts in the job that has been given up."""
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


def test_steps_go_on_up_to_the_version_of_a_cut(start: Callable[..., StepWorker]) -> None:
    """That one is made the long way, where the pages are taken; beyond it, steps go on."""
    worker = armed(start, mode="sync")
    shard = start.shard  # type: ignore[attr-defined]
    done = shard.cuts.take_part()
    shard.schedule.announce("c")
    assert worker.step((1, 1), 1) == Again(REVOKED)
    worker.push_pull((1, 1), 1)
    assert [cut.step for cut in worker.reply.cuts] == [4]

    assert isinstance(worker.step((1, 1), 2), Done)
    assert worker.step((1, 1), 3) == Again(CUT)
    assert done.empty()
    worker.push_pull((1, 1), 3)

    snapshot = done.get_nowait()
    assert [page.version for page in snapshot.pages.values()] == [4, 4]
    assert [page.parameter.tolist() for page in snapshot.pages.values()] == [[-4.0] * 3] * 2
    assert isinstance(worker.step((1, 1), 4), Done)
    shard.cuts.release(snapshot)
    assert isinstance(worker.step((1, 1), 5), Done)


def test_a_reader_of_a_version_to_come_gets_that_one(start: Callable[..., StepWorker]) -> None:
    """Steps stop there, too."""
    worker = armed(start, mode="sync")
    shard, done = start.shard, SimpleQueue()  # type: ignore[attr-defined, var-annotated]
    cut = data_pb2.Cut(id="r", step=4, is_read=True)
    request = data_pb2.ReadRequest(run_id=worker.caller.run_id, layout_digest=worker.digest, cut=cut)

    asked = shard.begin_read(request, done)

    assert worker.step((1, 1), 1) == Again(REVOKED)
    worker.push_pull((1, 1), 1)
    assert isinstance(worker.step((1, 1), 2), Done)
    assert worker.step((1, 1), 3) == Again(CUT)
    worker.push_pull((1, 1), 3)
    assert done.get_nowait() is asked
    assert [page.version for page in asked.pages.values()] == [4, 4]
    shard.cuts.abandon(asked)


@pytest.mark.parametrize(("mode", "announced"), [("sync", [2, 7, 12]), ("async", [4, 9, 14])])
def test_the_push_by_which_a_cut_by_steps_is_due_is_made_the_long_way(
    start: Callable[..., StepWorker], tmp_path: Path, mode: str, announced: list[int]
) -> None:
    """It alone, so that the shard announces the cut when it would without steps."""
    worker = armed(start, mode=mode, config={"checkpoint_dir": str(tmp_path), "checkpoint_steps": 5})
    shard, refused, ids = start.shard, [], set()  # type: ignore[attr-defined]
    for clock in range(1, 16):
        while shard.cuts.is_storing:
            pause()
        if worker.offer is None or isinstance(worker.step((1, 1), clock), Again):
            cuts = list(worker.reply.cuts)
            for cut in cuts if mode == "async" else ():
                cut.ready = True
                if cut.waits:
                    cut.position = clock
            before = {cut.id for cut in worker.reply.cuts}
            worker.push_pull((1, 1), clock, cuts=cuts)
            after = {cut.id for cut in worker.reply.cuts}
            if after - before - ids:
                refused.append(clock)
            ids |= after

    assert refused == announced
    while shard.cuts.is_storing:
        pause()
    assert {info.step for info in CheckpointDirectory(str(tmp_path)).checkpoints()} == {5, 10, 15}


def test_when_a_checkpoint_is_written_the_next_one_is_announced_at_once(
    start: Callable[..., StepWorker], tmp_path: Path
) -> None:
    """As by the next push that is made the long way: meanwhile steps pass where it would have been due."""
    worker = armed(start, mode="sync", config={"checkpoint_dir": str(tmp_path), "checkpoint_steps": 5})
    shard = start.shard  # type: ignore[attr-defined]
    snapshot = Snapshot(data_pb2.Cut(id="w", step=1), shard._core.job, SimpleQueue())
    shard.cuts._unwritten.add(snapshot)
    shard.steps.revoke(0)
    worker.train((1, 1), 1)
    for clock in range(2, 12):
        assert isinstance(worker.train((1, 1), clock), Done)
    assert [cut.step for cut in shard.cuts.latest()] == [5]
    while shard.cuts.unwritten > 1:
        pause()

    shard.cuts.release(snapshot)

    assert worker.step((1, 1), 12) == Again(REVOKED)
    worker.push_pull((1, 1), 12)
    assert [cut.step for cut in worker.reply.cuts] == [5, 20]


def test_a_cut_in_the_midst_of_steps_has_each_block_at_the_workers_positions(start: Callable[..., StepWorker]) -> None:
    """No step passes the position that was announced."""
    worker = armed(start, mode="async")
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
                cut.position = clock
    snapshot = done.get()
    assert not snapshot.why_missed
    assert {page.version for page in snapshot.pages.values()} == {snapshot.cut.step}
    assert [page.parameter.tolist() for page in snapshot.pages.values()] == [[-float(snapshot.cut.step)] * 3] * 2
    shard.cuts.release(snapshot)


def test_a_token_that_is_not_good_any_more_ends_the_steps(start: Callable[..., StepWorker]) -> None:
    """It is looked at at each tick."""
    worker = armed(start, mode="async")
    (connection,) = start.server._bulk._by_rank.values()  # type: ignore[attr-defined]
    connection.is_welcome = lambda _: False

    start.server._bulk.check_tokens()  # type: ignore[attr-defined]

    assert worker.step((1, 1), 1) == Again(REVOKED)
    with pytest.raises(Disconnected):
        worker.push_pull((1, 1), 1)
