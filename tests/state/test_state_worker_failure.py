"""A worker says that its program has failed: it is left to its lease, or given up at once, or everybody's session ends."""

from __future__ import annotations

import pytest
from shard_driver import Driver, job_spec

from psd.contract.config import ConfigError, ServerConfig
from psd.contract.errors import WorkerFailed
from psd.contract.roster import Absence, Roster
from psd.state.workers.membership import WorkerState


def test_wait_then_rounds_and_barriers_wait_until_the_lease_has_run_out_or_the_rank_is_back():
    """As if it had been killed. Nobody trains on without it meanwhile, and nobody is told of a change."""
    driver = Driver(job_spec(3), on_worker_failure="wait")
    a, b, c = driver.start()
    driver.leave(b, failed=True)
    driver.leave(c, failed=True)
    driver.push(a, 0, 1.0)
    barrier = driver.arrive(a)
    assert (driver.version(), barrier.future.done(), driver.shard.absent) == (0, False, {})

    c = driver.join(2)
    driver.declare(c)
    driver.expire(b, keep=[a, c])

    assert driver.shard.absent == {1: Absence.FAILED}
    assert not barrier.future.done()
    driver.push(c, 0, 1.0)
    assert driver.version() == 1


def test_continue_then_nobody_waits_from_that_moment_on():
    """As before it could be chosen: the lease does not matter."""
    driver = Driver(job_spec(3), on_worker_failure="continue")
    a, b, c = driver.start()
    driver.push(a, 0, 1.0)
    driver.leave(b, failed=True)
    driver.leave(c)

    assert driver.version() == 1
    assert driver.shard.absent == {1: Absence.FAILED, 2: Absence.FINISHED}


@pytest.mark.parametrize("is_silent", [False, True])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_end_then_everybody_is_told_and_new_processes_begin_together(tmp_path, is_silent, is_restarted):
    """No gradient counts without the failed worker. Who comes back waits for all, and trains on from the same parameters."""
    driver = Driver(job_spec(2), on_worker_failure="end", state_dir=str(tmp_path / "state"))
    a, b = driver.start()
    for seat in (a, b):
        driver.push(seat, 0, 1.0)
    waiting = driver.arrive(a)

    driver.expire(a, b) if is_silent else driver.leave(b, failed=True)

    what = "has been silent for longer than its lease" if is_silent else "has failed"
    with pytest.raises(WorkerFailed, match=f"worker {0 if is_silent else 1} {what}, and the shards were told to end the job"):
        waiting.future.result(0)
    with pytest.raises(WorkerFailed):
        driver.push(a, 1, 1.0)
    if is_restarted:
        driver.restart()
        with pytest.raises(WorkerFailed, match="another worker has failed"):
            driver.resume(a)
    assert {worker.state for worker in driver.core.members.workers} == {WorkerState.ABSENT}
    assert driver.shard.absent == {}
    a = driver.join(0)
    driver.declare(a)
    driver.push(a, 1, 1.0)
    driver.expire(keep=[a])
    assert (driver.version(), driver.worker(0).state) == (1, WorkerState.LIVE)
    b = driver.join(1)
    driver.declare(b)
    driver.push(b, 1, 1.0)
    assert driver.values() == [-2.0] * 3


def test_other_words_are_refused():
    """By the name of the flag."""
    with pytest.raises(ConfigError, match="--on-worker-failure: expected one of wait, continue, end, got 'stop'"):
        ServerConfig(0, 1, on_worker_failure="stop")


def test_a_change_of_who_is_waited_for_is_one_sentence():
    """However many there are; nothing is said twice."""
    roster = Roster()

    assert roster.news({}, 4) == ""
    told = roster.news({1: Absence.FAILED, 2: Absence.SILENT}, 4)
    assert told == "worker 1 has failed; worker 2 has fallen silent: 2 of 4 workers are waited for from now on"
    assert roster.news({1: Absence.FAILED, 2: Absence.SILENT}, 4) == ""
    told = roster.news({2: Absence.SILENT, 3: Absence.FINISHED}, 4)
    assert told == "worker 1 is back; worker 3 has finished: 2 of 4 workers are waited for from now on"
    told = roster.news(dict.fromkeys(range(100, 120), Absence.FINISHED), 1000)
    assert told.startswith(
        "workers 2, 3 are back; workers 100, 101, 102, 103, 104, 105, 106, 107 and 12 more have finished: 980 "
    )
