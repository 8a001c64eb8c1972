"""Whose scalars a round has: those of the worker that has been in the job longest, whatever order they come in."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from shard_driver import Driver, job_spec

from psd.contract.errors import InvalidRequest, ScalarsDisagree
from psd.contract.jobspec import GroupSpec
from psd.contract.verdicts import Verdict
from psd.v1 import control_pb2

LAMB = (0.1, 0.9, 0.999, 1e-6, 0.0)  # lr, beta1, beta2, eps, weight_decay


def sgd(lr):
    return (lr, 0.0, 0.0, 0.0)


def told(reply):
    """What a reply says of scalars that gave way, or None."""
    if not reply.HasField("overruled"):
        return None
    found = reply.overruled
    return found.round, found.rank, (found.group, found.scalar), found.own, found.held


def returned(driver, rank, *, clock):
    """A worker whose process was started again: it joins at the open round."""
    seat = driver.join(rank)
    driver.declare(seat)
    assert seat.clock == clock
    return seat


def trained(driver, steps, *, lr=0.5):
    """The workers after some rounds of gradient 1."""
    seats = driver.start()
    for clock, seat in itertools.product(range(steps), seats):
        driver.push(seat, clock, 1.0, scalars=sgd(lr))
    return seats


@pytest.mark.parametrize("is_newcomer_first", [True, False])
def test_the_scalars_of_a_worker_that_returns_give_way(is_newcomer_first):
    """A restarted worker whose schedule begins anew pushes lr 1 where the others are at 0.25: nobody ends, and 0.25 holds."""
    driver = Driver(job_spec(2))
    stayed, _ = trained(driver, 2)
    back = returned(driver, 1, clock=2)

    order = [(back, 1.0, 2), (stayed, 0.25, 0)]
    for seat, lr, since in order if is_newcomer_first else order[::-1]:
        driver.push(seat, 2, 4.0, scalars=sgd(lr), since=since)

    assert driver.values() == [-2.0] * 3
    assert driver.core.counters.requests_refused == 0


def test_a_worker_whose_scalars_gave_way_is_told_both_values():
    """At once where the others were there first; otherwise with its next push. The others are told nothing."""
    driver = Driver(job_spec(2))
    stayed, _ = trained(driver, 2)
    back = returned(driver, 1, clock=2)

    assert told(driver.push(back, 2, 1.0, scalars=sgd(1.0), since=2)) is None, "nobody else has spoken"
    assert told(driver.push(stayed, 2, 1.0, scalars=sgd(0.25))) is None
    assert told(driver.push(back, 3, 1.0, scalars=sgd(0.75), since=2)) == (2, 0, (0, 0), 1.0, 0.25)
    assert told(driver.push(stayed, 3, 1.0, scalars=sgd(0.75))) is None
    assert told(driver.push(stayed, 4, 1.0, scalars=sgd(0.125))) is None
    assert told(driver.push(back, 4, 1.0, scalars=(0.125, 0.0, 0.5, 0.0), since=2)) == (4, 0, (0, 2), 0.5, 0.0)
    assert driver.version() == 5


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("aggregation", ["fast", "exact"])
def test_the_order_does_not_matter(order, aggregation):
    """Three workers that came at different clocks, of which the last rank has been there longest; in two blocks."""
    driver = Driver(job_spec(3, blocks=2, aggregation=aggregation))
    seats = driver.start()

    for rank in order:
        driver.push(seats[rank], 0, 1.0, scalars=sgd([8.0, 4.0, 2.0][rank]), since=[1, 1, 0][rank])
    if aggregation == "exact":
        driver.core.declared().participant.follow([(0, 0b111)])

    assert (driver.values(0), driver.values(1)) == ([-2.0] * 3, [-2.0] * 3)


def test_a_round_of_some_has_the_scalars_of_those_whose_gradients_it_counts():
    """Exact: the decision leaves out the worker that has been there longest, on every shard alike."""
    driver = Driver(job_spec(3, aggregation="exact", quorum=2))
    oldest, _, newest = seats = driver.start()

    for seat in seats:
        driver.push(seat, 0, 1.0, scalars=sgd([8.0, 4.0, 2.0][seat.rank]), since=[0, 1, 1][seat.rank])
    for seat in (newest, seats[1]):
        driver.shard.settlement.commit(control_pb2.CommitRequest(caller=seat.caller, clock=0))

    assert driver.values() == [-4.0] * 3
    assert oldest.rank == 0


def test_with_a_quorum_those_who_are_there_first_speak():
    """Fast: the round does not wait for the worker that has been there longest, so it cannot have its scalars."""
    driver = Driver(job_spec(3, quorum=2))
    oldest, second, newest = driver.start()

    driver.push(newest, 0, 1.0, scalars=sgd(2.0), since=1)
    driver.push(second, 0, 1.0, scalars=sgd(4.0), since=1)
    late = driver.push(oldest, 0, 1.0, scalars=sgd(8.0))

    assert driver.values() == [-4.0] * 3
    assert late.blocks_late == 1


@pytest.mark.usefixtures("no_small_blocks")
def test_a_gradient_that_is_lent_speaks_as_any_other():
    """Over shared memory the gradient that completes a round is applied by whoever asks for the result first."""
    driver = Driver(job_spec(2))
    a, b = driver.start()

    first = driver.begin_push(b, 0, scalars=sgd(8.0), since=1)
    driver.lend_block(first, 0, 1.0)
    last = driver.begin_push(a, 0, scalars=sgd(2.0))
    driver.lend_block(last, 0, 1.0)

    assert driver.values() == [0.0] * 3
    driver.pull(a, 1)
    assert driver.values() == [-2.0] * 3


def test_a_shard_that_was_killed_knows_by_the_push_who_has_been_there_longest(tmp_path):
    """Who came when travels with the pushes, and so is the same on all shards, also on one that has forgotten."""
    driver = Driver(job_spec(2), state_dir=str(tmp_path / "state"))
    stayed, _ = trained(driver, 2)
    back = returned(driver, 1, clock=2)
    driver.restart(stayed, back)

    driver.push(back, 2, 1.0, scalars=sgd(1.0), since=2)
    driver.push(stayed, 2, 1.0, scalars=sgd(0.25))

    assert driver.values() == [-1.25] * 3


def test_workers_that_came_at_the_same_clock_agree_by_rank():
    """After the job has gone back to a checkpoint, say: their schedules may be a step apart, and that ends nobody."""
    driver = Driver(job_spec(2))
    seats = trained(driver, 2)

    driver.push(seats[1], 2, 1.0, scalars=sgd(4.0), since=2)
    driver.push(seats[0], 2, 1.0, scalars=sgd(2.0), since=2)

    assert driver.values() == [-3.0] * 3
    assert told(driver.push(seats[1], 3, 1.0, scalars=sgd(2.0), since=2)) == (2, 0, (0, 0), 4.0, 2.0)


def test_workers_that_were_there_from_the_start_must_agree():
    """That is a mistake in the configuration. A newcomer that pushes before them does not hide it."""
    driver = Driver(job_spec(3))
    a, b, newcomer = trained(driver, 1)

    driver.push(newcomer, 1, 1.0, scalars=sgd(1.0), since=1)
    driver.push(a, 1, 1.0, scalars=sgd(0.5))
    before = driver.fingerprint()
    with pytest.raises(ScalarsDisagree, match=r"scalars\[0\]\.lr: in round 1 worker 1 says 0\.25, worker 0 said 0\.5;"):
        driver.begin_push(b, 1, scalars=sgd(0.25))

    assert driver.fingerprint() == before
    driver.push(b, 1, 1.0, scalars=sgd(0.5))
    assert driver.values() == [-1.0] * 3


def test_a_worker_that_is_gone_speaks_no_more_unless_its_gradient_counts():
    """It has brought a block of the next round, which was not open yet: the one that came after it speaks."""
    driver = Driver(job_spec(3))
    a, b, c = driver.start()
    early = driver.begin_push(a, 1, scalars=sgd(8.0))
    assert driver.push_block(early, 0, 1.0) is not None, "round 1 is not open"
    driver.leave(a, failed=True)

    driver.push(b, 0, 1.0)
    driver.push(c, 0, 1.0)
    driver.push(c, 1, 1.0, scalars=sgd(1.0), since=1)
    reply = driver.push(b, 1, 1.0, scalars=sgd(2.0), since=1)

    assert told(reply) is None
    assert driver.values() == [-3.0] * 3


@pytest.mark.parametrize("mode", ["async", "ssp:3"])
def test_without_rounds_each_push_has_its_own_scalars(mode):
    """There is nothing to agree on, and nobody to be told."""
    driver = Driver(job_spec(2, mode=mode))
    a, b = driver.start()

    replies = [driver.push(a, 0, 1.0, scalars=sgd(2.0)), driver.push(b, 0, 1.0, scalars=sgd(4.0), since=1)]

    assert driver.values() == [-6.0] * 3
    assert [told(reply) for reply in replies] == [None, None]


def test_a_worker_cannot_have_come_after_the_step_that_it_pushes():
    """A field of the protocol, and so with a limit."""
    driver = Driver(job_spec(1))
    (seat,) = driver.start()
    driver.push(seat, 0, 1.0, since=1)
    before = driver.fingerprint()

    with pytest.raises(InvalidRequest, match=r"since: 3 is beyond clock 1"):
        driver.begin_push(seat, 1, since=3)

    assert driver.fingerprint() == before


def test_a_round_that_is_measured_has_the_same_scalars_in_its_measure_and_in_its_update():
    """LAMB's directions depend on scalars, and so does what is found on them: here the weight decay, which is one of them."""
    spec = replace(job_spec(2, aggregation="exact"), groups=(GroupSpec("lamb"),))
    measures = []
    for since in (0, 1):
        driver = Driver(spec)
        stayed, back = driver.start(value=1.0)
        job = driver.core.declared()
        driver.push(back, 0, 1.0, scalars=LAMB if since == 0 else (0.5, 0.5, 0.5, 1e-6, 0.25), since=since)
        driver.push(stayed, 0, 1.0, scalars=LAMB)
        job.participant.follow([(0, 0b11)])
        measures.append(job.blocks[0].measure(0, Verdict(0, scale=1.0)))

    assert isinstance(measures[0], list)
    assert measures[0] == measures[1]
