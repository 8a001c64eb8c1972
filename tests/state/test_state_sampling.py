"""A share of the learners in each round: who is chosen, who waits for whom, and what becomes of those who die or come."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from settling import commit
from shard_driver import Driver, job_spec

from psd.contract.errors import InvalidRequest
from psd.contract.jobspec import JobSpec
from psd.state.aggregation.consistency import ranks_in
from psd.state.aggregation.sampling import Sampling, sample_size
from psd.state.workers.membership import Membership
from psd.v1 import data_pb2

WORLD = 10


def sampled(share=0.3, world_size=WORLD, ranks=(), **fields):
    driver = Driver(job_spec(world_size, aggregation="exact", size=1, reduction="sum", sample=share, **fields))
    return driver, {seat.rank: seat for seat in driver.start(*ranks)}


def chosen(driver, seats):
    """The ranks that are told to take part in the open round."""
    return [rank for rank, seat in seats.items() if not commit(driver, seat, 0, only_ask=True).sits_out]


def bring(driver, seat, clock, value=1.0):
    driver.push(seat, clock, value)
    return commit(driver, seat, clock)


def members(driver):
    """By round, who was counted in the latest ones."""
    decided = driver.core.job.coordinator.latest()
    return {each.round: ranks_in(int.from_bytes(each.members, "little")) for each in decided}


@pytest.mark.parametrize(
    ("share", "present", "size"),
    [(0.1, 30, 3), (0.1, 4, 1), (0.5, 5, 2), (1.0, 7, 7), (0.9, 1, 1), (0.1, 0, 0), (0.1, 100, 10)],
)
def test_the_share_is_of_those_present_and_at_least_one(share, present, size):
    """Rounded; nobody where nobody is."""
    assert sample_size(share, present) == size


def test_a_choice_follows_from_the_job_the_round_and_who_is_there():
    """The same for all who ask; others for another job or round; in the long run everybody equally often."""
    workers = Membership(20, 10.0)
    for rank in range(20):
        workers.on_join(rank, rank + 1, now=0.0)
    one, same, other = (Sampling(0.2, seed, workers) for seed in (b"job", b"job", b"other"))
    rounds = range(2000)

    found = [one.chosen_in(round_) for round_ in rounds]

    assert {mask.bit_count() for mask in found} == {4}
    assert found == [same.chosen_in(round_) for round_ in reversed(rounds)][::-1]
    assert found != [other.chosen_in(round_) for round_ in rounds]
    counts = Counter(rank for mask in found for rank in ranks_in(mask))
    assert min(counts.values()) > 300
    assert max(counts.values()) < 500


def test_who_goes_is_replaced_by_one_and_who_comes_displaces_at_most_one():
    """All others stay where they are; and who has brought its part stays chosen."""
    workers = Membership(20, 10.0)
    joined = [workers.on_join(rank, rank + 1, now=0.0) for rank in range(20)]
    sampling = Sampling(0.2, b"job", workers)
    before = sampling.chosen_in(7)
    gone = joined[ranks_in(before)[0]]

    workers.on_leave(gone, failed=False)
    after = sampling.chosen_in(7)
    assert (before & ~after).bit_count() == (after & ~before).bit_count() == 1
    assert sampling.chosen_in(7, committed=1 << gone.rank) == before, "what it has brought counts, and it as present"

    workers.on_join(gone.rank, 99, now=0.0)
    assert sampling.chosen_in(7) == before


def test_a_round_closes_with_those_who_were_chosen_and_waits_for_nobody_else():
    """The sum counts them."""
    driver, seats = sampled()
    ranks = chosen(driver, seats)
    assert len(ranks) == 3

    for rank in ranks:
        assert driver.version() == 0
        bring(driver, seats[rank], 0)

    assert (driver.version(), driver.values()) == (1, [-3.0])
    assert members(driver) == {0: ranks}
    assert chosen(driver, seats) != ranks


def test_only_who_was_chosen_misses_a_round():
    """Those who sat out have missed nothing."""
    driver, seats = sampled(quorum=2)
    ranks = chosen(driver, seats)
    for rank in seats:
        driver.push(seats[rank], 0, 1.0, learner=data_pb2.LearnerNote())
    for rank in ranks[:2]:
        commit(driver, seats[rank], 0)

    missed = [rank for rank in seats if driver.shard.learner(rank).rounds_missed]
    assert (driver.version(), missed) == (1, ranks[2:])


def test_a_quorum_is_of_those_who_were_chosen():
    """Any two of the three."""
    driver, seats = sampled(quorum=2)
    ranks = chosen(driver, seats)
    bring(driver, seats[ranks[2]], 0)
    assert driver.version() == 0
    bring(driver, seats[ranks[0]], 0)
    assert (driver.version(), driver.values()) == (1, [-2.0])


def test_if_the_chosen_die_others_take_their_places():
    """One had brought its part: that counts. With all gone but one the round is that one's."""
    driver, seats = sampled()
    first, *others = chosen(driver, seats)
    bring(driver, seats[first], 0)
    left = [seat for rank, seat in seats.items() if rank not in (first, *others)]
    driver.expire(*(seats[rank] for rank in (first, *others)), keep=left)

    assert driver.version() == 0
    there = {seat.rank: seat for seat in left}
    second = chosen(driver, there)
    assert len(second) == sample_size(0.3, 8) - 1, "of the seven that are there and the one that has brought its part"
    for rank in second:
        bring(driver, there[rank], 0)
    assert members(driver)[0] == sorted([first, *second])
    assert driver.values() == [-2.0]

    *gone, last = left
    driver.expire(*gone, keep=[last])
    assert chosen(driver, {last.rank: last}) == [last.rank]
    bring(driver, last, 1)
    assert driver.values() == [-3.0]


def test_a_round_closes_when_all_leave_who_might_have_been_chosen():
    """Nobody asks any more: the one that has brought its part is released by the leaving alone."""
    driver, seats = sampled(share=0.5, world_size=4)
    one, two = chosen(driver, seats)
    ticket = bring(driver, seats[one], 0)
    driver.leave(seats[two])
    assert not ticket.future.done()

    for rank in seats:
        if rank not in (one, two):
            driver.leave(seats[rank])

    assert ticket.future.done()
    assert (driver.version(), driver.values()) == (1, [-1.0])


def test_who_has_not_come_yet_is_not_chosen_and_who_comes_may_be():
    """With one in a job of ten every round is that one's."""
    driver, seats = sampled(ranks=(4,))
    for clock in range(3):
        assert chosen(driver, seats) == [4]
        bring(driver, seats[4], clock)
    assert driver.version() == 3

    for rank in range(4):
        seats[rank] = driver.join(rank)
        driver.declare(seats[rank])
    found = set()
    for clock in range(3, 20):
        ranks = chosen(driver, seats)
        assert len(ranks) == sample_size(0.3, 5)
        found.update(ranks)
        for rank in ranks:
            bring(driver, seats[rank], clock)
    assert found == set(range(5))
    assert driver.values() == [-(3.0 + 17 * sample_size(0.3, 5))]


def test_a_shard_that_is_started_again_says_the_same(tmp_path):
    """In the midst of a round; a push that is sent again counts once."""
    restarted, seats = sampled_on(tmp_path)
    ranks = chosen(restarted, seats)
    bring(restarted, seats[ranks[0]], 0)

    restarted.restart(*seats.values())

    assert chosen(restarted, seats) == ranks
    for rank in ranks:
        bring(restarted, seats[rank], 0)
    assert (restarted.version(), restarted.values()) == (1, [-3.0])


def sampled_on(directory):
    driver = Driver(job_spec(WORLD, aggregation="exact", size=1, reduction="sum", sample=0.3), state_dir=directory)
    return driver, {seat.rank: seat for seat in driver.start()}


@pytest.mark.parametrize("share", [-0.1, 1.5, math.nan])
def test_what_is_no_share_is_refused(share):
    """By the name of the field."""
    with pytest.raises(InvalidRequest, match="sample: must be a share above 0 and at most 1"):
        job_spec(aggregation="exact", sample=share)


@pytest.mark.parametrize("fields", [{"mode": "async"}, {"aggregation": "fast"}])
def test_a_share_of_what_has_no_decisions_is_refused(fields):
    """The message says what it needs."""
    with pytest.raises(InvalidRequest, match=r"sample: is 0\.5, but only for rounds that shard 0 decides"):
        job_spec(sample=0.5, **fields)


def test_the_share_is_a_term_of_the_job():
    """It travels, and another one is told."""
    spec = job_spec(aggregation="exact", sample=0.25)
    assert JobSpec.from_message(spec.to_message()) == spec
    assert spec.difference(job_spec(aggregation="exact")) == "sample: 0.25 in the job, none in this worker's declaration"
