"""A shard that does not run, suspended or starved of the processor, does not take its own silence for its workers'."""

from __future__ import annotations

import pytest
from shard_driver import Driver


def test_a_shard_that_was_suspended_extends_leases_by_the_gap():
    """Time in which the shard itself did not run is not the workers' silence, and is counted for them only up to now."""
    driver = Driver(lease_s=10)
    driver.join(0)
    driver.join(1)
    driver.shard.tick()

    driver.time.value += 3600
    driver.join(1)
    assert driver.shard.tick() == []

    assert driver.worker(1).last_seen == driver.time.value, "last seen in the future"
    assert driver.advance(9) == []
    assert sorted(driver.advance(3)) == [0, 1]


def test_a_shard_that_is_suspended_before_its_first_look_at_leases_expires_nobody():
    """Just started, and a worker has joined; nothing has been looked at yet."""
    driver = Driver(lease_s=10)
    driver.join(0)

    driver.time.value += 3600

    assert driver.advance(9) == []
    assert driver.advance(2) == [0]


@pytest.mark.parametrize("asleep_s", [1.2, 2.4, 4.9])
def test_a_shard_that_only_runs_now_and_then_expires_nobody_sooner_than_it_has_run_for_a_lease(asleep_s):
    """Stopped again and again, or starved of the processor: every time for less than what one would call a suspension."""
    driver = Driver(lease_s=10)
    driver.join(0)
    expired = []
    for _ in range(10):
        driver.time.value += 1 + asleep_s
        expired += driver.shard.tick()
    assert expired == []

    driver.time.value += 1 + asleep_s

    assert [worker.rank for worker in driver.shard.tick()] == [0]


def test_a_job_is_not_done_because_its_shard_was_suspended():
    """A worker that has failed is waited for a while, because it may be started again; by a shard that runs."""
    driver = Driver(lease_s=10)
    done, failed = driver.join(0), driver.join(1)
    driver.leave(done)
    driver.leave(failed, failed=True)

    driver.time.value += 3600
    driver.shard.tick()

    assert not driver.shard.is_done
    driver.advance(61)
    assert driver.shard.is_done


def test_a_shard_that_is_suspended_right_after_a_restart_expires_nobody(tmp_path):
    """Before it has looked at leases once: those began anew when it started, and it has not run since."""
    driver = Driver(lease_s=10, state_dir=str(tmp_path))
    driver.start()
    driver.restart()

    driver.time.value += 3600

    assert driver.shard.tick() == []
    assert driver.advance(9) == []
    assert sorted(driver.advance(2)) == [0, 1]
