"""Since when a worker has been there, and what a worker hears whose learning rate gives way to another's."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from client_faults import in_threads

from psd.contract.consistency import SYNC
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.v1 import data_pb2
from psd_client import SGD, ParameterServer, connect
from psd_client.worker.exchange.riders import Attendance

SPEC = JobSpec(3, (TensorSpec("w", (3,), "float32", 0),), (GroupSpec("sgd"),), SYNC)


def overruled(round_: int, *, scalar: int = 0, own: float = 1.0, held: float = 0.25) -> data_pb2.PushReply:
    return data_pb2.PushReply(overruled=data_pb2.Overruled(round=round_, rank=2, scalar=scalar, own=own, held=held))


def answered(*replies: data_pb2.PushReply) -> Any:
    """Stands for a push that the shards have answered so."""
    return SimpleNamespace(replies=dict(enumerate(replies)))


def since(attendance: Attendance, session: int, clock: int) -> int:
    """The clock that a push's header says, of that session and clock."""
    sent: Any = SimpleNamespace(session=session, header=data_pb2.PushHeader(clock=clock))
    attendance.write(sent)
    return int(sent.header.since)


def test_since_is_where_a_process_came_and_moves_only_where_it_leaves_a_gap() -> None:
    """The same push again is no gap; a late one, after which the worker goes on further ahead, is."""
    attendance = Attendance(0, SPEC, {})

    assert [since(attendance, 7, clock) for clock in (0, 1, 1, 2, 3)] == [0] * 5
    assert [since(attendance, 7, clock) for clock in (6, 7)] == [6, 6]
    assert [since(attendance, 8, clock) for clock in (7, 8, 12)] == [6, 6, 12]
    assert [since(attendance, 9, clock) for clock in (4, 5)] == [4, 4], "the job has gone back to a checkpoint"


def test_a_process_that_joins_again_was_not_there_from_the_start() -> None:
    """Its schedule may have moved on, or not; but before any that came later it was there."""
    attendance = Attendance(0, SPEC, {})

    assert [since(attendance, 7, 0), since(attendance, 8, 0), since(attendance, 8, 1), since(attendance, 9, 2)] == [0, 1, 1, 1]


def test_a_process_that_joins_a_running_job_came_there() -> None:
    assert since(Attendance(0, SPEC, {}), 7, 40) == 40


def test_each_difference_is_logged_once_and_every_round_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Several shards tell the same, and a schedule that lags differs in every step."""
    counts = {"pushes_overruled": 0}
    attendance = Attendance(1, SPEC, counts)
    since(attendance, 7, 4)

    with caplog.at_level(logging.WARNING, "psd_client"):
        for round_ in (4, 5):
            attendance.hear(answered(overruled(round_), data_pb2.PushReply(), overruled(round_)))
        attendance.hear(answered(overruled(6, scalar=3, own=0.5, held=0.0)))
        since(attendance, 8, 9)
        attendance.hear(answered(overruled(9)))

    assert counts["pushes_overruled"] == 4
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 3
    assert texts[0].startswith("psd: worker 1: in step 4 its lr of group 0, 1.0, gives way to worker 2's, 0.25, which has been")
    assert "in step 6 its weight_decay of group 0, 0.5, gives way to worker 2's, 0.0" in texts[1]
    assert "in step 9 its lr of group 0" in texts[2]


@pytest.mark.parametrize("aggregation", ["fast", "exact"])
@pytest.mark.parametrize("is_newcomer_first", [True, False])
def test_push_pull_when_a_worker_returns_with_a_schedule_that_begins_anew_then_nobody_ends(
    cluster: Callable[..., Any], caplog: pytest.LogCaptureFixture, aggregation: str, is_newcomer_first: bool
) -> None:
    """The defect: its learning rate stood for the round, and all others ended by ScalarsDisagree. Now theirs hold."""
    servers, steps, returns_at = cluster(2, lease_s=60.0).servers, 6, 3
    turn, has_returned = threading.Barrier(2, timeout=100), threading.Event()
    size = 20_000

    def worker(rank: int) -> ParameterServer:
        ps = connect(servers, rank, 2, wait_timeout=60)
        ps.declare({"w": np.zeros(size, np.float32)}, SGD(lr=1.0), aggregation=aggregation)
        return ps

    def train(ps: ParameterServer, first: int, last: int, lag: int = 0) -> Any:
        for step in range(first, last):
            ps.param_groups[0]["lr"] = 0.5 ** (step - lag)
            if step >= returns_at and (ps.rank == 0) == is_newcomer_first:
                turn.wait()  # the other one's push has been answered
            ps.push({"w": np.ones(size, np.float32)})
            if step >= returns_at and (ps.rank == 0) != is_newcomer_first:
                turn.wait()
            params = ps.pull()
        return params["w"]

    def stay() -> Any:
        with worker(0) as ps:
            train(ps, 0, returns_at)
            assert has_returned.wait(100)
            return train(ps, returns_at, steps), ps.stats()

    def die_and_return() -> Any:
        ps = worker(1)
        train(ps, 0, returns_at)
        ps._worker._session.has_failed = True
        ps._worker.close(RuntimeError("dies"))
        with worker(1) as ps:
            assert ps.clock == returns_at
            has_returned.set()
            return train(ps, returns_at, steps, lag=returns_at), ps.stats()

    with caplog.at_level(logging.WARNING, "psd_client"):
        (stayed, stayed_stats), (returned, returned_stats) = in_threads(stay, die_and_return)

    expected = -sum(0.5**step for step in range(steps))
    assert stayed.tolist() == returned.tolist() == [expected] * size
    assert stayed_stats["pushes_overruled"] == 0
    assert returned_stats["pushes_overruled"] >= steps - returns_at - 1
    (text,) = (found for record in caplog.records if "gives way" in (found := record.getMessage()))
    assert text.startswith("psd: worker 1: in step 3 its lr of group 0, 1.0, gives way to worker 0's, 0.125,")
