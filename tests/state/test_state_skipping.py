"""Rounds that change nothing on any shard, because somebody's gradient was not finite; and the other policies."""

from __future__ import annotations

import numpy as np
import pytest
from settling import bring, clipped, commit, decision, on_shard_1, push_all, settle
from shard_driver import Driver, job_spec

from psd.contract.errors import NonFiniteGradient
from psd.v1 import job_pb2


def skipping(world_size=2, **fields):
    return job_spec(world_size, aggregation="exact", nan_policy="skip", **fields)


def test_one_infinite_gradient_skips_the_round_on_this_shard():
    """No parameter, slot or step changes; the version passes, and everybody is told."""
    driver = Driver(skipping(3, blocks=2, flags=("momentum",)))
    seats = driver.start(value=5.0)
    for seat, is_bad in zip(seats, (False, True, False), strict=True):
        driver.push(seat, 0, None if is_bad else 2.0, present=b"\0" if is_bad else b"", weight=0.0 if is_bad else 1.0)
    waits = [commit(driver, seat, 0, skip=seat is seats[1]) for seat in seats]

    assert all(ticket.future.done() for ticket in waits[:2])
    reply = driver.shard.settlement.commit_reply(0, 0)
    assert list(reply.decisions) == [job_pb2.Decision(round=0, members=b"\0")]
    page = driver.core.job.blocks[0]._page
    assert (driver.version(0), driver.version(1)) == (1, 1)
    assert (page.parameter.tolist(), page.slots[0].tolist(), page.steps.tolist()) == ([5.0] * 3, [0.0] * 3, [0])


def test_another_shard_skips_as_it_is_told():
    """It may hold all gradients: a round of nobody changes nothing."""
    driver, (a, b) = on_shard_1(skipping(blocks=2))
    driver.push(a, 0, 2.0)
    driver.push(b, 0, None, present=b"\0", weight=0.0)
    bring(driver, a, 1, decisions=[job_pb2.Decision(round=0, members=b"\0")])

    assert (driver.version(1), driver.values(1)) == (1, [0.0] * 3)
    assert driver.push(a, 0, 2.0).blocks_late == 1


def test_the_round_after_a_skipped_one_counts():
    """The version went on, and training with it."""
    driver = Driver(skipping(1))
    (a,) = driver.start()
    driver.push(a, 0, None, present=b"\0", weight=0.0)
    commit(driver, a, 0, skip=True)
    push_all(driver, [a], 1, 3.0)

    assert (driver.version(), driver.values()) == (2, [-3.0] * 3)


def test_with_a_quorum_a_late_infinity_skips_nothing():
    """The round was decided without it."""
    driver = Driver(skipping(2, quorum=1))
    a, b = driver.start()
    driver.push(a, 0, 3.0)
    commit(driver, a, 0)
    driver.push(b, 0, None, present=b"\0", weight=0.0)
    reply = commit(driver, b, 0, skip=True)

    assert list(reply.decisions) == [decision(0, 0)]
    assert driver.values() == [-3.0] * 3


def test_clipping_and_skipping_together():
    """A skipped round needs no verdict."""
    driver = Driver(clipped(2, size=1, nan_policy="skip"))
    a, b = driver.start()
    driver.push(a, 0, 3.0)
    driver.push(b, 0, None, present=b"\0", weight=0.0)
    commit(driver, b, 0, skip=True)
    commit(driver, a, 0)
    assert (driver.version(), driver.values()) == (1, [0.0])

    push_all(driver, (a, b), 1, 3.0, 3.0)
    settle(driver, b, 1)
    assert driver.values() == pytest.approx([-1.0], rel=1e-6)


def test_a_sum_that_is_not_finite_is_skipped():
    """Finite on each worker: the verdict says so, and no slot or step changes."""
    driver = Driver(clipped(2, reduction="sum", dtype="float32", clip_norm=1.0), state_dir="")
    a, b = driver.start(value=5.0)
    push_all(driver, (a, b), 0, 3e38, 3e38)

    found = settle(driver, a, 0)

    assert found.skip
    assert (driver.version(), driver.values()) == (1, [5.0] * 3)
    assert driver.core.job.blocks[0]._page.steps.tolist() == [0]


def test_nan_policies_of_a_shard():
    """Refused by name of worker, tensor and step unless it is allowed; a worker that skips sends no numbers."""
    for policy in ("refuse", "skip"):
        driver = Driver(job_spec(1, aggregation="exact", nan_policy=policy))
        (a,) = driver.start()
        with pytest.raises(NonFiniteGradient, match=r"the gradient of worker 0 at step 0 has nan in tensor 't0'") as caught:
            driver.push(a, 0, np.nan)
        assert caught.value.detail == {"rank": 0, "tensor": "t0", "clock": 0}
    driver = Driver(job_spec(1, nan_policy="allow"))
    (a,) = driver.start()
    driver.push(a, 0, [np.nan, np.inf, 1.0])
    assert str(driver.values()) == "[nan, -inf, -1.0]"
