"""The grace of rounds that have their quorum: who is still counted, when they are decided, and who decides."""

from __future__ import annotations

import math

import pytest
from settling import commit
from shard_driver import Driver, job_spec

from psd.contract.errors import InvalidRequest
from psd.state.aggregation.grace import GRACE_SHARE


def graced(grace, world_size=3, quorum=1, **fields):
    driver = Driver(job_spec(world_size, quorum=quorum, aggregation="exact", grace=grace, size=1, **fields))
    return driver, driver.start()


def bring(driver, seat, clock, value, **fields):
    """Push and commit; the ticket, or the reply."""
    driver.push(seat, clock, value)
    return commit(driver, seat, clock, **fields)


def at(driver, seconds):
    driver.time.value += seconds
    driver.shard.tick()


def test_a_round_waits_for_others_for_so_many_seconds_after_its_quorum():
    """The seconds begin with the quorum; the tick decides when they are over."""
    driver, (a, b, _c) = graced(2.0, quorum=2)
    bring(driver, a, 0, 1.0)
    at(driver, 5.0)
    assert driver.shard.settlement.due_in() is None, "there is no quorum yet"
    bring(driver, b, 0, 3.0)
    assert driver.shard.settlement.due_in() == 2.0
    at(driver, 1.5)
    assert driver.core.job.coordinator.next_round == 0

    at(driver, 0.5)

    assert (driver.version(), driver.values()) == (1, [-2.0])
    assert driver.shard.settlement.due_in() is None


def test_a_contribution_within_the_grace_counts_and_ends_it_if_it_is_the_last():
    """Nobody else is to be waited for then."""
    driver, (a, b, c) = graced(100.0)
    ticket = bring(driver, a, 0, 1.0)
    at(driver, 1.0)
    bring(driver, b, 0, 2.0)
    assert not ticket.future.done()

    bring(driver, c, 0, 6.0)

    assert ticket.future.done()
    assert (driver.version(), driver.values()) == (1, [-3.0])


def test_a_contribution_after_the_grace_is_late_and_its_worker_learns_so():
    """It was pushed in time, and committed too late."""
    driver, (a, b, _c) = graced(1.0)
    driver.push(b, 0, 8.0)
    bring(driver, a, 0, 1.0)
    at(driver, 1.0)
    assert driver.version() == 1

    reply = commit(driver, b, 0, without_waiting=True)

    assert (reply.is_left_out, reply.clock) == (True, 1)
    assert driver.values() == [-1.0]


def test_nobody_stands_still_for_the_grace_of_learners():
    """It ends before the first of them would, and begins anew when one comes that has less to spare."""
    driver, (a, b, _c) = graced(math.inf, quorum=1)
    bring(driver, a, 0, 1.0, spare_s=10.0)
    assert driver.shard.settlement.due_in() == GRACE_SHARE * 10
    at(driver, 2.0)
    assert driver.shard.settlement.due_in() == GRACE_SHARE * 10 - 2
    bring(driver, b, 0, 3.0, spare_s=3.0)
    assert driver.shard.settlement.due_in() == GRACE_SHARE * 5 - 2

    at(driver, GRACE_SHARE * 5 - 2)

    assert driver.values() == [-2.0]


@pytest.mark.parametrize("spare", [0.0, 4.0])
def test_without_time_to_spare_a_round_is_decided_with_its_quorum(spare):
    """At once; also if the quorum has taken all the time that the first one had."""
    driver, (a, b, _c) = graced(math.inf, quorum=2)
    bring(driver, a, 0, 1.0, spare_s=spare)
    at(driver, 5.0)

    bring(driver, b, 0, 3.0, spare_s=100.0)

    assert driver.values() == [-2.0]


def test_a_worker_that_is_gone_is_not_waited_for():
    """The round is decided when the last one that it waits for has expired."""
    driver, (a, b, c) = graced(1000.0)
    bring(driver, a, 0, 1.0)
    driver.expire(b, keep=[a, c])
    assert driver.version() == 0
    driver.expire(c, keep=[a])

    assert driver.version() == 1


def test_a_shard_that_is_killed_in_the_grace_begins_it_anew(tmp_path):
    """Commits are not kept; workers make them again, and every contribution counts once."""
    driver = Driver(job_spec(2, quorum=1, aggregation="exact", grace=5.0, size=1), state_dir=str(tmp_path))
    a, b = driver.start()
    bring(driver, a, 0, 1.0)
    at(driver, 4.0)
    driver.restart(a, b)
    assert driver.shard.settlement.due_in() is None

    bring(driver, a, 0, 1.0)
    at(driver, 4.0)
    assert driver.version() == 0
    bring(driver, b, 0, 3.0)

    assert (driver.version(), driver.values()) == (1, [-2.0])


@pytest.mark.parametrize("spare", [-1.0, math.nan, math.inf])
def test_spare_time_that_is_no_time_is_refused(spare):
    """The message names the field."""
    driver, (a, _b, _c) = graced(math.inf)
    driver.push(a, 0, 1.0)
    with pytest.raises(InvalidRequest, match="spare_s: must be finite and >= 0"):
        commit(driver, a, 0, spare_s=spare)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"grace": -1.0}, "grace: must be seconds >= 0"),
        ({"grace": math.nan}, "grace: must be seconds >= 0"),
        ({"grace": 1.0, "aggregation": "fast"}, "grace: is 1.0, but only rounds that shard 0 decides"),
    ],
)
def test_a_grace_that_makes_no_sense_is_refused(fields, words):
    """The message names what would go together."""
    with pytest.raises(InvalidRequest, match=words):
        job_spec(2, quorum=1, **{"aggregation": "exact", **fields})
