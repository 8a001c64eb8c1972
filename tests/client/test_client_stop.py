"""A worker that ends the job for all, by `stop`: where the others end, in which modes, and after which failures."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_faults import Restartable, connect_faulty, expire, in_threads, until

from psd.checkpoint import CheckpointDirectory
from psd.contract.errors import InvalidRequest, NotDeclared, RolledBack, ShardUnavailable
from psd_client import SGD, Drained, connect
from psd_client.client import worker_of

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "exact": {"aggregation": "exact"},
    "quorum": {"quorum": 2},
    "ssp": {"consistency": "ssp:1"},
    "async": {"consistency": "async"},
}
PARAMS = {"a": np.zeros(20_000, np.float32), "b": np.zeros(3, np.float32)}
ONES = {name: np.ones_like(value) for name, value in PARAMS.items()}


def train(ps: Any, stops_at: int | None = None, steps: int = 1000) -> int | None:
    """Train until the job ends, or so many steps are made; ask for the end at a step, if it says so. What stop has returned."""
    ends_at = None
    while ps.clock < steps and not ps.is_over:
        if stops_at is not None and ends_at is None and ps.clock >= stops_at:
            ends_at = ps.stop()
        ps.push_pull(ONES)
    return ends_at


@pytest.mark.parametrize("mode", MODES)
def test_all_workers_end_at_the_step_that_stop_returns_and_the_last_checkpoint_is_stored(
    mode: str, cluster: Callable[..., Any], tmp_path: Path
) -> None:
    """Worker 1 asks. The next push of each raises Drained, with status 0; the job has ended in order, as psd-run is told."""
    place = str(tmp_path / "checkpoints")
    started = cluster(2, checkpoint_dir=place, exit_when_done=True)

    def worker(rank: int) -> Any:
        with pytest.raises(Drained, match="as worker 1 has asked") as ended, connect(started.servers, rank, 3) as ps:
            ps.declare(PARAMS, SGD(lr=1.0), **MODES[mode])
            ends_at = train(ps, 5 if rank == 1 else None)
            assert ps.is_over
            ps.push_pull(ONES)
        return ps.clock, ended.value.clock, ended.value.code, ended.value.asked_by, ends_at

    first, second, third = in_threads(*(lambda rank=rank: worker(rank) for rank in range(3)))

    ends_at = second[4]
    assert first == third == (ends_at, ends_at, 0, 1, None)
    assert second[:4] == first[:4]
    assert ends_at == 7 if mode in ("sync", "exact") else ends_at > 6
    assert [each.shard.schedule.is_left_in_order for each in started.shards] == [True, True]
    started.finish()
    newest = CheckpointDirectory(place).newest()
    assert newest is not None
    assert newest.step == ends_at
    assert started.shards[0].totals.endswith("; ended there, as worker 1 has asked (stop)")
    assert "ended there" not in started.shards[1].totals


def test_workers_that_stop_at_different_steps_end_at_that_of_the_first_call(cluster: Callable[..., Any]) -> None:
    """Each says so to its program, and in the log once."""
    started = cluster(2)

    def worker(rank: int) -> tuple[int | None, int]:
        with connect(started.servers, rank, 2) as ps:
            ps.declare(PARAMS, SGD(lr=1.0))
            return train(ps, 3 + rank), ps.clock

    (first, ended), (second, others_ended) = in_threads(lambda: worker(0), lambda: worker(1))

    assert first == second == ended == others_ended == 5


def test_a_loop_that_ends_earlier_by_itself_is_not_kept_and_a_job_that_trains_on_later_is_not_ended(
    cluster: Callable[..., Any],
) -> None:
    started = cluster(1)
    for steps in (4, 9):
        with connect(started.servers, 0, 1) as ps:
            ps.declare(PARAMS, SGD(lr=1.0))
            train(ps, 3 if steps == 4 else None, steps)
            assert ps.clock == steps
        started.shards[0].shard.tick()
        assert "ended there" not in started.shards[0].totals


def test_a_call_whose_answer_is_lost_with_the_shard_counts_once(job: Restartable, caplog: pytest.LogCaptureFixture) -> None:
    """Shard 0 is killed after it has stored the order; the call, sent again, finds it."""
    caplog.set_level(logging.INFO, "psd_client")
    ps, faults = connect_faulty(job.servers)
    faults.lose_reply("stop", shard=0, after=lambda: job.restart(0))
    with ps:
        ps.declare(PARAMS, SGD(lr=1.0))
        ends_at = train(ps, 4)
        assert (ends_at, ps.clock, ps.stop()) == (6, 6, 6)
    faults.assert_all_fired()
    heard = [record.getMessage() for record in caplog.records if "the job ends at" in record.getMessage()]
    assert heard == ["psd: worker 0: the job ends at step 6, as worker 0 has asked (stop)"]


@pytest.mark.parametrize(("mode", "made_at_its_return"), [("sync", 3), ("async", 1)])
def test_a_worker_that_comes_back_after_the_others_have_ended_makes_the_steps_that_are_left_and_no_other(
    mode: str, made_at_its_return: int, cluster: Callable[..., Any]
) -> None:
    """In rounds the others have made them without it; else it goes on where it was."""
    started = cluster(2)
    with connect(started.servers, 0, 2) as ps, connect(started.servers, 1, 2) as other:
        in_threads(*(lambda each=each: each.declare(PARAMS, SGD(lr=1.0), **MODES[mode]) for each in (ps, other)))
        in_threads(lambda: ps.push_pull(ONES), lambda: other.push_pull(ONES))
        assert ps.stop() == 3
        for shard in started.shards:
            expire(shard, 1)
        train(ps)
        ps.close()
        with connect(started.servers, 1, 2) as late, pytest.raises(Drained):
            late.declare(PARAMS, SGD(lr=1.0), **MODES[mode])
            assert late.clock == made_at_its_return
            train(late)
            assert late.clock == 3
            late.push_pull(ONES)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_job_that_goes_back_ends_at_the_same_step_unless_shard_0_was_lost(
    lost: int, cluster: Callable[..., Any], tmp_path: Path
) -> None:
    """What shard 0 has lost is asked for again by whoever is told that the job has gone back, and still wants it to end."""
    place = str(tmp_path / "checkpoints")
    settings: dict[str, Any] = {"checkpoint_dir": place, "checkpoint_steps": 4}
    started = cluster(2, **settings)
    with connect(started.servers, 0, 1) as ps:
        ps.declare(PARAMS, SGD(lr=1.0))
        train(ps, steps=9)
        until(lambda: CheckpointDirectory(place).newest() is not None)
        assert ps.stop() == 11
        started.shards[lost].stop()
        started.shards[lost] = cluster(2, only=lost, listen=started.shards[lost].address, **settings).shards[0]
        with pytest.raises(RolledBack):
            train(ps)
        gone_back_to = ps.clock
        assert gone_back_to in (4, 8)
        train(ps, steps=gone_back_to + 1)
        if lost == 0:
            assert train(ps, steps=20, stops_at=gone_back_to + 1) == ps.clock == gone_back_to + 3
        else:
            assert ps.stop() == 11
            train(ps)
            assert ps.clock == 11


def test_a_push_that_is_given_up_for_another_gradient_moves_no_worker_beyond_the_end(cluster: Callable[..., Any]) -> None:
    """Shard 0 has counted the last step's push, and shard 1 has not; the new session begins at the end, and must not push."""
    started = cluster(2)
    ps, faults = connect_faulty(started.servers, retry_timeout_s=0)
    with ps:
        ps.declare(PARAMS, SGD(lr=1.0))
        ends_at = ps.stop()
        train(ps, steps=ends_at - 1)

        def break_then() -> None:
            until(lambda: started.shards[0].shard.declared().version_max == ends_at)
            raise ShardUnavailable("the connection broke")

        faults.run_before("push_pull", shard=1, action=break_then)
        with pytest.raises(ShardUnavailable):
            ps.push_pull(ONES)
        worker = worker_of(ps)
        for space in worker.gradients.spaces:
            space[...] = 2.0  # as the face of a framework does, without looking back
        with pytest.raises(Drained):
            worker.push_pull_flat([[1.0, 0.0, 0.0, 0.0]])
        assert (ps.clock, ps.is_over) == (ends_at, True)
    faults.assert_all_fired()


def test_stop_before_anything_is_declared_or_where_nothing_is_trained_is_refused(cluster: Callable[..., Any]) -> None:
    started = cluster(2)
    with connect(started.servers, 0, 1) as ps:
        with pytest.raises(NotDeclared):
            ps.stop()
        ps.vector("v", 10)
        with pytest.raises(InvalidRequest, match="no trained blocks"):
            ps.stop()
        assert not ps.is_over
