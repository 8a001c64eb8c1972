"""Rounds that find no room in the arena: as in test_state_full.py, nothing is lost, and nobody waits without being told."""

from __future__ import annotations

import pytest
from full_disk import full_disk
from full_state import NO_ROOM, Hoarder, assert_disk_agrees
from settling import bring, clipped, commit, decision, measure, push_all
from shard_driver import job_spec

from psd.contract.errors import OutOfSpace
from psd.state.aggregation.rounds import Outcome
from psd.state.tickets import Ticket


def test_a_gradient_that_completes_a_round_without_room_is_refused_and_not_counted(driver_of, tmp_path):
    """Nor is the round lost: sent again when there is room, it counts, once."""
    driver = driver_of()
    a, b = driver.start()
    driver.push(a, 0, 1.0)

    with full_disk():
        hoarder = Hoarder(driver)
        push = driver.begin_push(b, 0)
        with pytest.raises(OutOfSpace, match=f"block 0: no room for its next version: no space for .* in {tmp_path}"):
            driver.push_block(push, 0, 3.0)
    assert_disk_agrees(driver, tmp_path)
    hoarder.give_back()
    driver.push(b, 0, 3.0)

    assert (driver.version(), driver.values()) == (1, [-2.0] * 3)


@pytest.mark.parametrize("how", ["leave", "expire"])
@pytest.mark.parametrize("asks", [True, False], ids=["its workers ask again", "nobody asks"])
def test_a_round_that_a_worker_completes_by_going_is_applied_when_there_is_room(driver_of, tmp_path, how, asks):
    """Who waits for it is told why it does not come; the lease clock, or the next one that asks, applies it."""
    driver = driver_of(job_spec(3))
    a, b, c = driver.start()
    for seat in (a, b):
        driver.push(seat, 0, 2.0)
    waiting = driver.pull(a, 1)[0]
    assert isinstance(waiting, Ticket)

    with full_disk():
        hoarder = Hoarder(driver)
        if how == "leave":
            driver.leave(c)
        else:
            driver.expire(c, keep=[a, b])
        driver.advance(1)
        assert waiting.future.done(), "it asks again"
        with pytest.raises(OutOfSpace, match="block 0: no room for its next version"):
            driver.pull(a, 1)
        assert driver.version() == 0
        assert driver.core.job.lacks_space
    assert_disk_agrees(driver, tmp_path)
    hoarder.give_back()
    if asks:
        assert driver.pull(a, 1)[0].tolist() == [-2.0] * 3
    else:
        driver.advance(1)

    assert (driver.version(), driver.core.job.lacks_space) == (1, False)
    assert driver.values() == [-2.0] * 3


def test_a_round_that_is_no_longer_complete_when_there_is_room_waits_again(driver_of):
    """Its worker has come back meanwhile, in that very round: nothing of it may be left out for the lack of room."""
    driver = driver_of(job_spec(2))
    a, b = driver.start()
    driver.push(a, 0, 2.0)
    with full_disk():
        hoarder = Hoarder(driver)
        driver.leave(b)
    b = driver.join(1)
    driver.declare(b)
    hoarder.give_back()

    waiting = driver.pull(a, 1)[0]

    assert isinstance(waiting, Ticket)
    assert not waiting.future.done()
    assert not driver.core.job.lacks_space
    driver.push(b, 0, 4.0)
    assert driver.values() == [-3.0] * 3


@pytest.mark.usefixtures("no_small_blocks")
def test_lent_gradients_that_have_no_room_are_taken_over_and_applied_later(driver_of):
    """Over shared memory: the call ends with the refusal, and the worker's memory is its own again."""
    driver = driver_of()
    a, b = driver.start()
    pushes = [driver.begin_push(seat, 0) for seat in (a, b)]
    gradients = [driver.lend_block(push, 0, value) for push, value in zip(pushes, (1.0, 3.0), strict=True)]

    with full_disk():
        hoarder = Hoarder(driver)
        with pytest.raises(OutOfSpace):
            driver.pull(a, 1)
        for push, gradient in zip(pushes, gradients, strict=True):
            push.loan.end()
            gradient[:] = 1e9
    hoarder.give_back()

    assert driver.pull(a, 1)[0].tolist() == [-2.0] * 3
    assert pushes[1].outcomes[Outcome.COUNTED] == 1


def test_a_decision_stands_though_its_round_has_no_room(driver_of, tmp_path):
    """Exact: it is recorded and told; the round closes when there is room."""
    driver = driver_of(job_spec(2, aggregation="exact"))
    a, b = driver.start()
    for seat in (a, b):
        driver.push(seat, 0, 2.0)
    commit(driver, a, 0)

    with full_disk():
        hoarder = Hoarder(driver)
        reply = commit(driver, b, 0)
        with pytest.raises(OutOfSpace):
            driver.pull(b, 1)
    assert [(d.round, d.members) for d in reply.decisions] == [(0, b"\x03")]
    assert_disk_agrees(driver, tmp_path)
    hoarder.give_back()

    assert driver.pull(b, 1)[0].tolist() == [-2.0] * 3
    assert_disk_agrees(driver, tmp_path)


def test_without_rounds_a_gradient_that_has_no_room_is_refused_and_counts_when_it_is_sent_again(driver_of, tmp_path):
    """Once."""
    driver = driver_of(job_spec(1, mode="async"))
    (a,) = driver.start()

    with full_disk():
        hoarder = Hoarder(driver)
        push = driver.begin_push(a, 0)
        with pytest.raises(OutOfSpace):
            driver.push_block(push, 0, 1.0)
    assert_disk_agrees(driver, tmp_path)
    hoarder.give_back()
    driver.push(a, 0, 1.0)

    assert (driver.version(), driver.values()) == (1, [-1.0] * 3)


def test_a_verdict_that_cannot_be_kept_is_not_told(driver_of, tmp_path):
    """Whoever brought the measures brings them again."""
    driver = driver_of(clipped())
    a, b = driver.start()
    push_all(driver, (a, b), 0, 1.0, 3.0)
    found = measure(driver, a, 0)

    with full_disk(), pytest.raises(OutOfSpace, match=NO_ROOM):
        commit(driver, a, 0, measures=[found.measure])
    assert_disk_agrees(driver, tmp_path)
    assert not commit(driver, b, 0).HasField("verdict")

    reply = commit(driver, b, 0, measures=[found.measure])
    assert reply.verdict.is_final
    assert_disk_agrees(driver, tmp_path)
    bring(driver, b, 1, verdict=reply.verdict, decisions=[decision(0, 0, 1)])
    assert driver.version() == 1
