"""Exact aggregation: which workers make up a round is decided once, for all shards, and nothing else decides the bits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from shard_driver import Driver, Fuse, Killed, job_spec

from psd.contract.errors import InvalidRequest, StateLost, WrongShard
from psd.state.aggregation.settlement import KEPT
from psd.state.tickets import Ticket, WaitKind
from psd.v1 import control_pb2, data_pb2, job_pb2


def exact(world_size=2, **fields):
    return job_spec(world_size, aggregation="exact", **fields)


def commit(driver, seat, clock, **fields):
    """The ticket that a commit waits with, or its reply."""
    desk = driver.shard.settlement
    ticket = desk.commit(control_pb2.CommitRequest(caller=seat.caller, clock=clock, **fields))
    return ticket if ticket is not None else desk.commit_reply(seat.caller.rank, clock)


def decision(round_, *ranks):
    return job_pb2.Decision(round=round_, members=bytes([sum(1 << rank for rank in ranks)]))


def learn(driver, seat, clock, *decisions):
    """What a pull does that brings decisions."""
    driver.shard.exchange.begin_pull(
        data_pb2.PullRequest(caller=seat.caller, clock=clock, layout_digest=driver.layout.digest, decisions=decisions)
    )


def test_a_round_closes_when_all_have_committed_and_not_before():
    """Pushes alone change nothing; the last commit decides, closes, and answers those that wait."""
    driver = Driver(exact())
    a, b = driver.start()
    driver.push(a, 0, 2.0)
    driver.push(b, 0, 4.0)
    assert driver.version() == 0

    waits = commit(driver, a, 0)
    assert isinstance(waits, Ticket)
    assert (waits.kind, driver.shard.missing_for(waits)[0].rank) == (WaitKind.ROUND, 1)
    reply = commit(driver, b, 0)

    assert waits.future.done()
    assert (list(reply.decisions), reply.clock) == ([decision(0, 0, 1)], 1)
    assert (driver.version(), driver.values()) == (1, [-3.0] * 3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_bits_do_not_depend_on_who_comes_first(dtype, reduction):
    """Six orders of arrival, of numbers whose sum depends on the order: the same bits as by rank."""
    results = set()
    for order in itertools.permutations(range(3)):
        driver = Driver(exact(3, dtype=dtype, reduction=reduction, flags=("momentum",)))
        seats = driver.start()
        for clock in range(2):
            for rank in order:
                value = [1e8 / 3, 0.1, -1e8 / 3][rank]
                driver.push(seats[rank], clock, value, weight=1.0 + rank, scalars=(0.1, 0.9, 0.0, 0.0))
            for rank in reversed(order):
                commit(driver, seats[rank], clock)
        page = driver.core.job.blocks[0]._page
        results.add((page.version, page.parameter.tobytes(), page.slots[0].tobytes()))

    assert len(results) == 1
    assert next(iter(results))[0] == 2


def test_half_a_push_of_a_dead_worker_leaves_no_trace():
    """It has not committed, so no block counts it, also not the one that has its gradient."""
    driver = Driver(exact(blocks=2, flags=("momentum",)))
    a, b = driver.start()
    driver.push_block(driver.begin_push(a, 0), 0, 100.0)
    driver.push(b, 0, 4.0)
    waits = commit(driver, b, 0)

    driver.expire(a, keep=[b])

    assert waits.future.done()
    assert [driver.values(block) for block in (0, 1)] == [[-4.0] * 3] * 2
    page = driver.core.job.blocks[0]._page
    assert (int(page.sessions[0]), int(page.clocks[0])) == (0, 0), "nor the dedup window"


def test_a_new_sessions_push_replaces_the_dead_ones_half():
    """Back in time for the round: its own gradient counts, everywhere, and the half one nowhere."""
    driver = Driver(exact(blocks=2))
    a, b = driver.start()
    driver.push_block(driver.begin_push(a, 0), 0, 100.0)

    again = driver.join(0)
    driver.declare(again)
    reply = driver.push(again, 0, 2.0)
    driver.push(b, 0, 4.0)
    commit(driver, again, 0)
    commit(driver, b, 0)

    assert (again.clock, reply.blocks_staged) == (0, 2)
    assert [driver.values(block) for block in (0, 1)] == [[-3.0] * 3] * 2


def test_a_worker_that_had_committed_and_joins_again_enters_after_the_round_and_counts():
    """All shards have its gradient; its new session must not push that round again."""
    driver = Driver(exact())
    a, b = driver.start()
    driver.push(a, 0, 2.0)
    commit(driver, a, 0, without_waiting=True)

    again = driver.join(0)
    assert driver.declare(again)[0].clock == 1
    driver.push(b, 0, 4.0)
    commit(driver, b, 0)

    assert driver.values() == [-3.0] * 3
    driver.push(again, 1, 1.0)
    driver.push(b, 1, 1.0)
    commit(driver, b, 1)
    commit(driver, again, 1)
    assert driver.values() == [-4.0] * 3


def test_a_worker_that_enters_after_an_open_round_waits_for_its_decision_without_a_part_in_it():
    """Nobody else may be left to tell the other shards of it; waiting is not committing."""
    driver = Driver(exact(3))
    a, b, c = driver.start()
    driver.push(a, 0, 2.0)
    commit(driver, a, 0, without_waiting=True)
    again = driver.join(0)
    assert driver.declare(again)[0].clock == 1

    waits = commit(driver, again, 0, only_wait=True)
    assert (waits.kind, driver.shard.missing_for(waits)[0].rank) == (WaitKind.ROUND, 1)
    outsider = commit(driver, c, 0, only_wait=True)
    driver.leave(b)

    assert waits.future.done()
    assert outsider.future.done(), "who only waits takes part in the round after, and is not waited for"
    assert list(driver.shard.settlement.commit_reply(0, 0).decisions) == [decision(0, 0)]
    assert driver.values() == [-2.0] * 3
    assert list(commit(driver, again, 0, only_wait=True).decisions) == [decision(0, 0)], "decided already"


def test_with_a_quorum_late_committers_are_answered_at_once_and_count_nowhere():
    """Quorum 1 of 2: the second is told where to go on, and its staged gradient is dropped."""
    driver = Driver(exact(quorum=1))
    a, b = driver.start()
    driver.push(a, 0, 2.0)
    driver.push(b, 0, 100.0)

    commit(driver, a, 0)
    reply = commit(driver, b, 0)

    assert (list(reply.decisions), reply.clock) == ([decision(0, 0)], 1)
    assert driver.values() == [-2.0] * 3
    assert driver.push(b, 0, 100.0).blocks_late == 1


@pytest.mark.parametrize("rounds", [1, KEPT, KEPT + 1, 3 * KEPT])
def test_a_worker_that_was_busy_for_many_rounds_hears_what_has_become_of_its_last_commit(rounds):
    """With a quorum the others go on; what it is told must not depend on how far."""
    driver = Driver(exact(3, quorum=2))
    a, b, c = driver.start()
    for seat in (a, b):
        driver.push(seat, 0, 1.0)
        commit(driver, seat, 0, without_waiting=True)
    for clock in range(1, 1 + rounds):
        for seat in (b, c):
            driver.push(seat, clock, 1.0)
            commit(driver, seat, clock, without_waiting=True)

    told = commit(driver, a, 0).decisions

    assert decision(0, 0, 1) in told
    assert len(told) <= KEPT
    learn(driver, a, rounds + 1, *told)
    counters = driver.core.counters
    assert (counters.pushes_accepted, counters.pushes_late) == (2 + 2 * rounds, 0)


def test_another_shard_closes_a_round_when_it_hears_of_the_decision_and_has_the_members():
    """In whatever order the two come; workers that are not members do not matter."""
    for is_told_first in (True, False):
        driver = Driver(exact(3, blocks=2), shard=1, shards=2)
        seats = [driver.join(rank, session=rank + 1) for rank in range(3)]
        for seat in seats:
            driver.declare(seat)
        driver.initialize(seats[0])
        driver.push(seats[2], 0, 100.0)
        if is_told_first:
            learn(driver, seats[2], 1, decision(0, 0, 1))
        driver.push(seats[0], 0, 2.0)
        assert driver.version(1) == 0
        driver.push(seats[1], 0, 4.0)
        if not is_told_first:
            assert driver.version(1) == 0
            learn(driver, seats[2], 1, decision(0, 0, 1))

        assert (driver.version(1), driver.values(1)) == (1, [-3.0] * 3)
        learn(driver, seats[2], 1, decision(0, 0, 1))
        assert driver.version(1) == 1


def test_the_next_push_brings_the_decision_too():
    """A worker that is ahead opens its own round by what it knows."""
    driver = Driver(exact(1, blocks=2), shard=1, shards=2)
    seat = driver.join(0, session=1)
    driver.declare(seat)
    driver.initialize(seat)
    driver.push(seat, 0, 2.0)
    header = driver.header(seat, 1)
    header.decisions.append(decision(0, 0))

    push = driver.shard.exchange.begin_push(header)

    assert driver.push_block(push, 1, 2.0) is None
    assert driver.values(1) == [-2.0] * 3


@pytest.mark.parametrize("steps", range(1, 12))
def test_a_decision_stands_wherever_the_shard_dies_after_it(driver_of, steps):
    """Killed at each step of committing, deciding and applying: afterwards the round is undecided and untouched, or decided,
    with the same members, and closes when their gradients have come again; the result is the same."""
    driver = driver_of(exact(blocks=2))
    fuse = Fuse()
    a, b = driver.start()
    driver.restart(a, b, crash_point=fuse)
    driver.push(a, 0, 2.0)
    driver.push(b, 0, 4.0)
    commit(driver, a, 0, without_waiting=True)
    fuse.steps = steps

    with pytest.raises(Killed):
        commit(driver, b, 0)
    driver.restart(a, b)
    decided = list(driver.core.job.coordinator.latest())
    for seat, value in ((a, 2.0), (b, 4.0)):
        driver.push(seat, 0, value)
    for seat in (a, b):
        commit(driver, seat, 0, without_waiting=True)
    reply = commit(driver, a, 0)
    learn(driver, a, 1, *reply.decisions)

    assert decided in ([], [decision(0, 0, 1)])
    assert list(reply.decisions) == [decision(0, 0, 1)]
    assert [driver.version(block) for block in (0, 1)] == [1, 1]
    assert [driver.values(block) for block in (0, 1)] == [[-3.0] * 3] * 2


def test_a_decision_holds_against_those_that_come_after_the_restart(driver_of):
    """Quorum 1: a's round was decided without b; after a restart b commits first, and is still not in it."""
    driver = driver_of(exact(quorum=1))
    fuse = Fuse()
    a, b = driver.start()
    driver.restart(a, b, crash_point=fuse)
    driver.push(a, 0, 2.0)
    fuse.steps = 6  # recorded, and not applied
    with pytest.raises(Killed):
        commit(driver, a, 0)
    driver.restart(a, b)
    assert list(driver.core.job.coordinator.latest()) == [decision(0, 0)]
    assert driver.version() == 0

    driver.push(b, 0, 100.0)
    reply = commit(driver, b, 0)
    learn(driver, b, 1, *reply.decisions)
    assert driver.version() == 0, "a's gradient is lacking"
    driver.push(a, 0, 2.0)

    assert (driver.version(), driver.values()) == (1, [-2.0] * 3)


def test_a_round_that_everybody_skips_is_decided_empty(driver_of):
    """a had committed and joined again, beyond the round; shard 0 forgot the commit when it died, and b never came. Nobody
    would ever commit that round."""
    driver = driver_of(exact())
    a, b = driver.start()
    driver.push(a, 0, 2.0)
    commit(driver, a, 0, without_waiting=True)
    again = driver.join(0)
    driver.declare(again)
    assert again.clock == 1
    driver.restart(again, b)

    driver.expire(b, keep=[again])
    waits = driver.pull(again, 1)[0]

    assert not isinstance(waits, Ticket)
    assert (driver.version(), waits.tolist()) == (1, [0.0] * 3)
    driver.push(again, 1, 2.0)
    commit(driver, again, 1)
    assert driver.values() == [-2.0] * 3


def test_a_heartbeat_between_push_and_commit_does_not_leave_its_worker_out():
    """Shard 0 has a static block alone, and sees no push: the clock that a heartbeat says is ahead of the commit."""
    spec = exact(blocks=2)
    spec = replace(spec, groups=(type(spec.groups[0])("static"), spec.groups[1]))
    driver = Driver(spec, shards=2)
    a, b = driver.start()

    waits = commit(driver, a, 0)
    driver.heartbeat(b, 1)

    assert not waits.future.done()
    assert driver.worker(1).clock == 1
    assert list(commit(driver, b, 0).decisions) == [decision(0, 0, 1)]


def test_a_gradient_that_was_lost_with_its_worker_is_reported_to_those_that_wait(driver_of):
    """Decided to count, lost with the shard's process, and its worker is gone: the round can never close, and says so."""
    driver = driver_of(exact(blocks=2), shard=1, shards=2)
    a, b = (driver.join(rank, session=rank + 1) for rank in range(2))
    for seat in (a, b):
        driver.declare(seat)
    driver.initialize(a)
    for seat in (a, b):
        driver.push(seat, 0, 2.0)
    driver.restart(a, b)
    driver.push(b, 0, 2.0)
    learn(driver, b, 1, decision(0, 0, 1))
    early = driver.pull(b, 1)[1]

    assert driver.shard.cannot_go_on == ""
    driver.expire(a, keep=[b])
    late = driver.pull(b, 1)[1]

    for ticket in (early, late):
        assert isinstance(ticket.future.exception(0), StateLost)
        assert ticket.future.exception(0).detail["ranks"] == [0]
    assert driver.shard.cannot_go_on == str(late.future.exception(0)), "there is no checkpoint to go back to"


def test_requests_that_make_no_sense_are_refused_by_name():
    """Commits of jobs without them, at other shards, ahead of their round; decisions that name nobody; push_pulls."""
    fast, other, driver = Driver(job_spec(1)), Driver(exact(1, blocks=2), shard=1, shards=2), Driver(exact(2))
    (seat,) = fast.start()
    with pytest.raises(InvalidRequest, match="only a job with exact aggregation has commits"):
        commit(fast, seat, 0)
    seat = other.join(0, session=1)
    other.declare(seat)
    other.initialize(seat)
    with pytest.raises(WrongShard, match="rounds are decided by shard 0, this is shard 1"):
        commit(other, seat, 0)
    a, _b = driver.start()
    with pytest.raises(InvalidRequest, match="clock: 1 cannot be committed before round 0 is decided"):
        commit(driver, a, 1)
    skipping = Driver(exact(1, nan_policy="skip"))
    (seat,) = skipping.start()
    with pytest.raises(InvalidRequest, match="skip: a worker that sets only_wait has no gradient in the round"):
        commit(skipping, seat, 0, skip=True, only_wait=True)
    with pytest.raises(InvalidRequest, match=r"decisions\.members: names worker 2, world_size is 2"):
        learn(driver, a, 0, decision(0, 2))
    with pytest.raises(InvalidRequest, match="decisions: 9 are more than the 8"):
        learn(driver, a, 0, *[decision(0, 0)] * 9)
    with pytest.raises(InvalidRequest, match="PushPull: not with exact aggregation"):
        driver.shard.exchange.begin_answer(driver.begin_push(a, 0))


def test_weight_zero_is_a_member_and_adds_nothing():
    """As with fast: it takes part, the others' mean is theirs alone; a round of nothing changes nothing."""
    driver = Driver(exact(2))
    a, b = driver.start()
    driver.push(a, 0, 6.0, weight=0.0)
    driver.push(b, 0, 3.0, weight=5.0)
    for seat in (a, b):
        commit(driver, seat, 0)
    for seat in (a, b):
        driver.push(seat, 1, 6.0, weight=0.0)
    for seat in (a, b):
        commit(driver, seat, 1)

    assert (driver.version(), driver.values()) == (2, [-3.0] * 3)
    assert int(driver.core.job.blocks[0]._page.steps[0]) == 1


def test_memory_of_staged_gradients_is_given_back():
    """After many rounds with late workers and rejoins, no more is lent than one round needs."""
    driver = Driver(exact(3, quorum=2, blocks=2))
    seats = driver.start()
    lent = driver.lent_accumulators()

    for clock in range(20):
        for seat in seats:
            driver.push(seat, clock, 1.0)
            commit(driver, seat, clock)
        seats[clock % 3] = driver.join(clock % 3)
        driver.declare(seats[clock % 3])

    assert driver.version() == 20
    assert len(lent) <= 6, "three workers, two blocks"
    assert np.isfinite(driver.values()).all()


def test_a_decision_of_a_distant_round_is_refused_and_does_not_hide_those_that_come():
    """Otherwise one request would end the job: what is decided then would be taken for old."""
    driver = Driver(exact(1))
    (a,) = driver.start()

    with pytest.raises(InvalidRequest, match=r"decisions\.round: 1000000 is far beyond this shard's 0"):
        learn(driver, a, 0, decision(1_000_000, 0))
    driver.push(a, 0, 2.0)
    commit(driver, a, 0)

    assert driver.version() == 1
