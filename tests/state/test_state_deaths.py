"""Synchronous rounds when workers die in mid-push, come back, or skip rounds: nobody waits for ever or counts twice."""

from __future__ import annotations

import pytest
from shard_driver import Driver, job_spec

from psd.contract.errors import SessionFenced


def test_half_a_push_counts_where_it_arrived_and_nowhere_twice():
    """A worker dies in mid-push: the block that has its gradient keeps it, the other closes without; back with a new session
    it goes on at the clock of the block that is ahead, and nobody waits for ever."""
    driver = Driver(job_spec(2, blocks=2))
    a, b = driver.start()
    push = driver.begin_push(a, 0)
    driver.push_block(push, 0, 2.0)
    driver.push(b, 0, 4.0)
    assert (driver.version(0), driver.version(1)) == (1, 0)

    again = driver.join(0)
    driver.declare(again)

    assert (driver.version(0), driver.version(1)) == (1, 1)
    assert (driver.values(0), driver.values(1)) == ([-3.0] * 3, [-4.0] * 3)
    assert driver.declare(again)[0].clock == 1
    with pytest.raises(SessionFenced):
        driver.push_block(push, 1, 2.0)
    driver.push(again, 1, 1.0)
    driver.push(b, 1, 1.0)
    assert (driver.version(0), driver.version(1)) == (2, 2)


def test_a_rank_has_one_gradient_in_a_round():
    """What a worker's dead session had contributed to the open round stands, and its new session begins after that round. If it
    pushes to the round all the same, it is told that its gradient does not count where there is one."""
    driver = Driver(job_spec(2, blocks=2))
    a, b = driver.start()
    push = driver.begin_push(a, 0)
    driver.push_block(push, 0, 2.0)

    again = driver.join(0)
    assert driver.declare(again)[0].clock == 1
    reply = driver.push(again, 0, 20.0)
    driver.push(b, 0, 4.0)

    assert (reply.blocks_counted, reply.blocks_duplicate, reply.blocks_late) == (1, 0, 1)
    assert (driver.values(0), driver.values(1)) == ([-3.0] * 3, [-12.0] * 3)


@pytest.mark.parametrize("death", ["expire", "rejoin"])
def test_a_lone_worker_that_dies_in_mid_push_leaves_no_round_that_nobody_can_close(death):
    """One worker, two blocks, killed between them: when it is back, the block that stayed behind passes over the round."""
    driver = Driver(job_spec(1, blocks=2))
    (a,) = driver.start()
    driver.push_block(driver.begin_push(a, 0), 0, 2.0)
    if death == "expire":
        driver.expire(a)

    again = driver.join(0)
    driver.declare(again)

    assert (driver.version(0), driver.version(1)) == (1, 1)
    assert driver.pull(again, 1)[1].tolist() == [0.0] * 3


def test_everybody_dies_in_mid_push_and_comes_back():
    """Both workers die with different blocks counted; the job goes on from the block that is ahead, in whatever order."""
    for order in ((0, 1), (1, 0)):
        driver = Driver(job_spec(2, blocks=3))
        seats = driver.start()
        for clock in range(2):
            for seat in seats:
                driver.push(seat, clock, 1.0)
        for seat, blocks in zip(seats, ((0, 1), (0, 2)), strict=True):
            push = driver.begin_push(seat, 2)
            for block in blocks:
                driver.push_block(push, block, 1.0)
        driver.expire(*seats)

        new = [driver.join(rank) for rank in order]
        clocks = [driver.declare(seat)[0].clock for seat in new]

        assert clocks == [3, 3]
        assert [driver.version(b) for b in range(3)] == [3, 3, 3]
        for seat in new:
            driver.push(seat, 3, 1.0)
        assert [driver.values(b) for b in range(3)] == [[-4.0] * 3] * 3


def test_a_worker_that_skips_rounds_is_not_waited_for_in_them():
    """Another shard sent a worker ahead: this one closes the rounds between without it, and voids those that all skip."""
    driver = Driver()
    a, b = driver.start()

    driver.heartbeat(a, 2)
    driver.push(b, 0, 6.0)
    driver.heartbeat(b, 3)
    driver.heartbeat(a, 3)

    assert driver.values() == [-6.0] * 3
    assert driver.version() == 3


def test_accumulators_and_tickets_do_not_pile_up():
    """After many rounds with deaths and rejoins, a shard holds no more tickets, scalars or accumulators than after few."""
    driver = Driver(job_spec(3, blocks=2))
    seats = driver.start()
    for clock in range(40):
        gone = clock % 3
        for seat in seats:
            if seat.rank != gone:
                driver.push(seat, clock, 1.0)
        driver.pull(seats[(gone + 1) % 3], clock + 1)
        seats[gone] = driver.join(gone)
        driver.declare(seats[gone])
        driver.push(seats[gone], clock, 1.0)

    assert driver.version() == 40
    assert driver.core.waiting.open() == []
    assert len(driver.core.job.agreement.known()) <= 2
    assert sum(len(free) for free in driver.core.job.arena._accumulators._free.values()) <= 2
    assert all(not block._waits._tickets for block in driver.core.job.blocks.values())
