"""Rounds that wait for a verdict: measured by all shards, judged once, applied alike; and rounds that are skipped."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from settling import bring, clipped, commit, decision, measure, norm_of, on_shard_1, push_all, settle, verdict
from shard_driver import Driver, Fuse, Killed, job_spec

from psd.contract.errors import InvalidRequest, StateLost, WrongShard
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.v1 import job_pb2

LAMB = (1.0, 0.0, 0.0, 0.0, 0.0)  # lr, beta1, beta2, eps, weight_decay: the direction is the gradient's sign


def lamb_spec(world_size=1, **fields):
    return JobSpec(world_size, (TensorSpec("t", (3,), "float64"),), (GroupSpec("lamb"),), aggregation="exact", **fields)


# -- clipping --


def test_a_decided_round_closes_with_its_verdict_and_not_before():
    """Two blocks of three elements, mean 2 everywhere: the norm is sqrt(24)."""
    driver = Driver(clipped(blocks=2))
    a, b = driver.start()
    reply = push_all(driver, (a, b), 0, 1.0, 3.0)
    assert not reply.HasField("verdict")
    assert driver.version() == 0

    found = measure(driver, a, 0)
    assert norm_of(found) == math.sqrt(24)
    assert measure(driver, b, 0) == found, "asked again, answered again"
    reply = commit(driver, a, 0, measures=[found.measure])
    scale = 1 / (math.sqrt(24) + 1e-6)
    assert reply.verdict == verdict(0, scale)
    assert driver.version() == 0
    bring(driver, b, 1, verdict=reply.verdict)

    assert [driver.version(block) for block in (0, 1)] == [1, 1]
    assert [driver.values(block) for block in (0, 1)] == [[-scale * 2.0] * 3] * 2
    assert measure(driver, a, 0).is_closed


def test_the_norm_is_of_the_mean_and_not_of_each_workers_gradient():
    """PEERS 35: opposite gradients of norm 100 whose mean is short are not clipped."""
    driver = Driver(clipped(size=1, clip_norm=1.0))
    a, b = driver.start()
    push_all(driver, (a, b), 0, 100.0, -99.0)

    assert settle(driver, a, 0).scale == 1.0
    assert driver.values() == [-0.5]


def test_a_shard_measures_only_its_part():
    """PEERS 35: a shard that clipped by its own norm would not clip at all here."""
    driver, seats = on_shard_1(clipped(1, blocks=2, size=1, clip_norm=1.0), world_size=1)
    driver.push(seats[0], 0, 1.0)

    found = measure(driver, seats[0], 0, decisions=[decision(0, 0)])
    assert norm_of(found) == 1.0
    bring(driver, seats[0], 1, verdict=verdict(0, 1 / math.sqrt(2)))

    assert driver.values(1) == [-1 / math.sqrt(2)]


def test_momentum_and_steps_see_the_clipped_gradient():
    """The slots are what one process on the clipped gradient has."""
    driver = Driver(clipped(1, size=1, clip_norm=1.0, flags=("momentum",)))
    (a,) = driver.start()
    for clock in range(2):
        push_all(driver, [a], clock, 3.0, scalars=(1.0, 0.5, 0.0, 0.0))
        settle(driver, a, clock)

    scale = 1 / (3 + 1e-6)
    page = driver.core.job.blocks[0]._page
    assert page.slots[0].tolist() == [0.5 * (scale * 3) + scale * 3]
    assert page.steps.tolist() == [2]


def test_a_measure_says_whose_gradients_are_lost():
    """Decided, and the shard was killed: the worker that is named has to send its gradient again."""
    driver, (a, b) = on_shard_1(clipped(blocks=2))
    driver.push(b, 0, 3.0)

    reply = measure(driver, b, 0, decisions=[decision(0, 0, 1)])
    assert (reply.is_open, list(reply.missing), reply.HasField("measure")) == (True, [0], False)
    assert measure(driver, b, 1).is_open, "as is a round that comes later"
    driver.push(a, 0, 1.0)

    assert norm_of(measure(driver, b, 0)) == math.sqrt(12)


def test_a_verdict_may_come_before_the_gradients(driver_of):
    """The shard was killed after the verdict was known: it needs nothing but the gradients."""
    driver, (a, b) = on_shard_1(clipped(blocks=2))
    bring(driver, b, 1, decisions=[decision(0, 0, 1)], verdict=verdict(0, 0.5))
    driver.push(a, 0, 1.0)
    assert driver.version(1) == 0
    driver.push(b, 0, 3.0)

    assert (driver.version(1), driver.values(1)) == (1, [-1.0] * 3)


def test_what_was_measured_is_not_changed_by_a_late_gradient():
    """A stranger's push for a round that has been measured is no part of it."""
    driver = Driver(clipped(3, quorum=2, clip_norm=100.0))
    a, b, c = driver.start()
    driver.push(a, 0, 1.0)
    driver.push(b, 0, 3.0)
    for seat in (a, b):
        commit(driver, seat, 0)
    measured = measure(driver, a, 0)

    driver.push(c, 0, 50.0)
    assert measure(driver, a, 0) == measured
    settle(driver, a, 0)

    assert driver.values() == [-2.0] * 3


def test_a_round_whose_workers_are_gone_is_settled_by_whoever_comes():
    """Decided, and nobody had measured it: the next worker does, although it has no part in it."""
    driver = Driver(clipped(2, size=1))
    a, b = driver.start()
    push_all(driver, (a, b), 0, 4.0, 4.0)
    driver.expire(a, b)

    again = driver.join(0)
    driver.declare(again)
    assert again.clock == 1
    assert driver.version() == 0
    settle(driver, again, 0)

    assert driver.values() == pytest.approx([-1.0], rel=1e-6)


def test_a_gradient_that_was_lost_with_its_session_is_reported_to_those_that_measure():
    """The worker has joined again, beyond that round, and waits for its own lost gradient; its clock says none will come."""
    driver, (_a, b) = on_shard_1(clipped(blocks=2))
    driver.push(b, 0, 3.0)
    assert measure(driver, b, 0, decisions=[decision(0, 0, 1)]).is_open

    again = driver.join(0, session=9)
    driver.declare(again)

    for seat in (again, b):
        with pytest.raises(StateLost) as caught:
            measure(driver, seat, 0, clock=1)
        assert caught.value.detail["ranks"] == [0]


# -- the verdict stands --


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_verdict_stands_wherever_shard_0_dies_after_it(driver_of, steps):
    """Before it is kept, the round is as it was; afterwards it is answered, also when a page could not be measured again."""
    driver = driver_of(clipped(blocks=2))
    fuse = Fuse()
    a, b = driver.start()
    driver.restart(a, b, crash_point=fuse)
    push_all(driver, (a, b), 0, 1.0, 3.0)
    measured = measure(driver, a, 0)
    fuse.steps = steps

    with pytest.raises(Killed):
        reply = commit(driver, a, 0, measures=[measured.measure])
        bring(driver, a, 1, verdict=reply.verdict)
    driver.restart(a, b)
    known = commit(driver, b, 0, without_waiting=True)
    for seat, value in ((a, 1.0), (b, 3.0)):
        if driver.version(1) == 0:
            driver.push(seat, 0, value)
    bring(driver, b, 0, decisions=known.decisions)
    if known.HasField("verdict"):
        bring(driver, b, 1, verdict=known.verdict)
    else:
        assert steps == 1
        assert settle(driver, b, 0).scale == 1 / (math.sqrt(24) + 1e-6)

    assert [driver.version(block) for block in (0, 1)] == [1, 1]
    assert driver.values(0) == driver.values(1) == [-2 / (math.sqrt(24) + 1e-6)] * 3


def test_the_first_verdict_holds_against_whoever_offers_another():
    """A broken worker's measures come late."""
    driver = Driver(clipped(1, size=1))
    (a,) = driver.start()
    push_all(driver, [a], 0, 3.0)
    first = commit(driver, a, 0, measures=[measure(driver, a, 0).measure]).verdict

    reply = commit(driver, a, 0, measures=[job_pb2.Measure(is_finite=True, squares=[b""])])

    assert reply.verdict == first
    bring(driver, a, 1, verdict=verdict(0, 0.25))
    bring(driver, a, 1, verdict=first)
    assert driver.values() == [-0.75], "a shard takes the first verdict on a round that it is told"


def test_a_new_round_needs_a_verdict_of_its_own():
    """That of the round before, brought again, does not close it."""
    driver = Driver(clipped(1, size=1))
    (a,) = driver.start()
    push_all(driver, [a], 0, 2.0)
    first = settle(driver, a, 0)
    push_all(driver, [a], 1, 2.0)

    bring(driver, a, 2, verdict=first)
    assert driver.version() == 1
    assert not commit(driver, a, 1).HasField("verdict")
    settle(driver, a, 1)

    assert driver.version() == 2


# -- LAMB --


def test_lamb_measures_updates_and_steps_by_their_ratio():
    """Parameters of 2, directions of 1: the ratio is 2, the step lr * 2 * 1."""
    driver = Driver(lamb_spec())
    (a,) = driver.start(value=2.0)
    push_all(driver, [a], 0, [3.0, -5.0, 7.0], scalars=LAMB)

    found = settle(driver, a, 0)

    assert list(found.ratios) == [math.sqrt(12) / math.sqrt(3)]
    assert driver.values() == [0.0, 4.0, 0.0]


def test_lamb_after_clipping_is_measured_twice():
    """First gradients, then updates under the scale that follows."""
    driver = Driver(lamb_spec(clip_norm=1.0))
    (a,) = driver.start(value=2.0)
    push_all(driver, [a], 0, [3.0, -5.0, 7.0], scalars=(1.0, 0.0, 0.0, 1e6, 0.0))
    first = commit(driver, a, 0, measures=[measure(driver, a, 0).measure]).verdict
    assert (first.is_final, list(first.ratios)) == (False, [])

    found = settle(driver, a, 0)

    assert found.scale == first.scale == 1 / (math.sqrt(83) + 1e-6)
    direction = np.array([3.0, -5.0, 7.0]) * found.scale / 1e6
    np.testing.assert_allclose(found.ratios, math.sqrt(12) / np.linalg.norm(direction), rtol=1e-5)


def test_lamb_leaves_what_has_no_gradient():
    """No step is counted either."""
    driver = Driver(lamb_spec())
    (a,) = driver.start(value=2.0)
    driver.push(a, 0, None, present=b"\0", scalars=LAMB)
    commit(driver, a, 0)

    assert list(settle(driver, a, 0).ratios) == [1.0]
    assert (driver.version(), driver.values()) == (1, [2.0] * 3)
    assert driver.core.job.blocks[0]._page.steps.tolist() == [0]


# -- what is refused --


def refused(call: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        call()


def test_requests_that_make_no_sense_are_refused_by_name():
    """Measures and verdicts of jobs without them, of other rounds, or out of range."""
    plain, driver, exact = Driver(job_spec(1)), Driver(clipped(1)), Driver(job_spec(1, aggregation="exact"))
    (p,), (a,), (e,) = plain.start(), driver.start(), exact.start()
    nothing = job_pb2.Measure(is_finite=True, squares=[b""])
    refused(lambda: measure(plain, p, 0), "round: only a job with rounds that has clip_norm")
    refused(lambda: measure(exact, e, 0), "round: only a job with rounds that has clip_norm")
    refused(lambda: commit(exact, e, 0, skip=True), "skip: the job's nan_policy is refuse, not skip")
    refused(lambda: commit(exact, e, 0, measures=[nothing]), "measures: only a job with rounds that has clip_norm")
    refused(lambda: bring(exact, e, 0, verdict=verdict(0)), "verdict: only a job with rounds that has clip_norm")
    refused(lambda: commit(driver, a, 0, measures=[nothing]), "measures: round 0 is not decided yet")
    refused(
        lambda: bring(driver, a, 0, verdict=job_pb2.Verdict(scale=1)), r"verdict\.is_final: updates are still to be measured"
    )
    refused(lambda: bring(driver, a, 0, verdict=verdict(0, math.nan)), r"verdict\.scale: must be from 0 to 1")
    refused(lambda: measure(driver, a, 0, clock=99999), "clock: 99999 of worker 0 is beyond")
    push_all(driver, [a], 0, 1.0)
    refused(lambda: commit(driver, a, 0, measures=[nothing] * 2), "measures: expected those of 1 shards, got 2")
    refused(
        lambda: commit(driver, a, 0, measures=[nothing], verdict=verdict(5)),
        r"verdict\.round: the measures are of round 0, got 5",
    )
    other, seats = on_shard_1(clipped(1, blocks=2), world_size=1)
    with pytest.raises(WrongShard, match="rounds are decided by shard 0"):
        commit(other, seats[0], 0, measures=[nothing])


def test_a_push_is_scaled_by_its_worker_only_without_rounds():
    """There the worker has the whole gradient; in rounds nobody has."""
    driver = Driver(job_spec(1, mode="async", clip_norm=1.0))
    (a,) = driver.start()

    def push(driver, seat, scale):
        header = driver.header(seat, 0)
        header.scale = scale
        push = driver.shard.exchange.begin_push(header)
        driver.push_block(push, 0, 2.0)

    for scale in (-0.5, 1.5, math.nan):
        refused(lambda scale=scale: push(driver, a, scale), "scale: must be from 0 to 1")
    push(driver, a, 0.25)
    assert driver.values() == [-0.5] * 3
    for spec in (clipped(1), job_spec(1, mode="async")):
        other = Driver(spec)
        (seat,) = other.start()
        refused(lambda other=other, seat=seat: push(other, seat, 0.5), "scale: only in a job without rounds that has clip_norm")


def test_memory_is_given_back():
    """After many rounds, with skipped ones and late workers, no more is lent than one round needs."""
    driver = Driver(clipped(3, quorum=2, blocks=2, nan_policy="skip"))
    seats = driver.start()
    lent = driver.lent_accumulators()

    for clock in range(20):
        for seat in seats:
            driver.push(seat, clock, 1.0)
        for seat in seats[:2]:
            commit(driver, seat, clock, skip=clock % 5 == 2)
        if clock % 5 != 2:
            settle(driver, seats[0], clock)

    assert driver.version() == 20
    assert lent == set()
