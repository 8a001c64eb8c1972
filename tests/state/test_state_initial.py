"""Declaring a job and providing its initial values, with injected time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from shard_driver import Driver, job_spec

from psd.contract.consistency import Consistency
from psd.contract.errors import InvalidRequest, InvalidTensor, LayoutMismatch, NonFiniteGradient, SessionFenced, SpecMismatch
from psd.contract.jobspec import GroupSpec, TensorSpec


def test_the_first_declaration_holds_and_equal_ones_join():
    """Equal specs meet; the reply has the digest that both sides compute."""
    driver = Driver()
    a, b = driver.join(0), driver.join(1)

    first, _ = driver.declare(a)
    second, ticket = driver.declare(b)

    assert first.layout_digest == second.layout_digest == driver.layout.digest
    assert (first.initializer, second.initializer) == (True, False)
    assert ticket is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"consistency": Consistency.parse("ssp:2"), "quorum": 0}, "consistency: sync in the job, ssp:2 in this"),
        ({"reduction": "sum"}, "reduce: mean in the job, sum in this"),
        ({"quorum": 1}, "quorum: 2 in the job, 1 in this"),
        ({"tensors": (TensorSpec("t0", (4,), "float64"),)}, r"shape of parameter 't0': \(3,\) in the job, \(4,\) in this"),
        ({"tensors": (TensorSpec("other", (3,), "float64"),)}, "parameter 't0': is in the job, is not in this"),
        ({"tensors": (TensorSpec("t0", (3,), "float64"), TensorSpec("u", (1,)))}, "parameter 'u': is not in the job, is in"),
        ({"groups": (GroupSpec("sgd", ("momentum",)),)}, "momentum of parameter group 0: off in the job, on in this"),
        ({"groups": (GroupSpec(), GroupSpec())}, "number of parameter groups: 1 in the job, 2 in this"),
        ({"world_size": 3, "quorum": 3}, "world_size: joined with 2, declared 3"),
    ],
)
def test_a_different_declaration_is_refused_and_named(change, words):
    """A spec that differs is refused with the difference in words, and the first one stays."""
    driver = Driver()
    a, b = driver.join(0), driver.join(1)
    driver.declare(a)

    with pytest.raises(SpecMismatch, match=words):
        driver.declare(b, dataclasses.replace(driver.spec, **change))

    assert driver.core.job.spec == driver.spec


@pytest.mark.parametrize(
    ("limit", "words"), [({"tensors_max": 1}, "--max-tensors 1"), ({"elements_max": 5}, "--max-elements 5")]
)
def test_a_job_beyond_the_limits_is_refused_by_the_flags_name(limit, words):
    """What is larger than the shard accepts is refused, naming the flag that would admit it."""
    driver = Driver(job_spec(1, blocks=2))
    object.__setattr__(driver.config, "limits", dataclasses.replace(driver.config.limits, **limit))
    seat = driver.join(0)

    with pytest.raises(InvalidTensor, match=words):
        driver.declare(seat)

    assert driver.core.job is None


def test_those_who_wait_receive_the_initial_values():
    """The others wait without polling, for the chosen worker by name, until the values are there."""
    driver = Driver(job_spec(3))
    seats = [driver.join(rank) for rank in range(3)]
    tickets = [driver.declare(seat)[1] for seat in seats]
    assert [w.rank for w in driver.shard.missing_for(tickets[1])] == [0]

    assert driver.initialize(seats[0], 5.0)

    assert [ticket and ticket.future.result(0) for ticket in tickets] == [None, 0, 0]
    assert driver.values() == [5.0] * 3
    assert driver.declare(seats[2])[0].initialized


@pytest.mark.parametrize("end", ["expire", "leave", "rejoin"])
def test_if_the_initializer_goes_the_next_one_that_waits_is_chosen(end):
    """Whichever way the initializer ends, one of those that wait becomes it, and only one."""
    driver = Driver(job_spec(3))
    a, b, c = (driver.join(rank) for rank in range(3))
    driver.declare(a)
    waits = [driver.declare(b)[1], driver.declare(c)[1]]

    if end == "expire":
        driver.expire(a, keep=[b, c])
    elif end == "leave":
        driver.leave(a, failed=True)
    else:
        driver.join(0)

    assert waits[0].future.result(0) == driver.core.initial.choice
    assert not waits[1].future.done()
    assert driver.initialize(b, 2.0)
    assert waits[1].future.result(0) == 0


def test_a_zombie_initializer_changes_nothing():
    """An initializer whose lease ran out in mid-transfer is fenced at the end; the values are those of the one chosen after."""
    driver = Driver()
    a, b = driver.join(0), driver.join(1)
    driver.declare(a)
    _, ticket = driver.declare(b)
    zombie = driver.begin_initialize(a)
    driver.offer(zombie, 1.0)
    driver.expire(a, keep=[b])
    assert ticket.future.result(0) > zombie.choice

    with pytest.raises(SessionFenced):
        driver.shard.admission.end_initialize(zombie)
    assert not driver.core.life.has_values
    assert driver.initialize(b, 2.0)

    assert driver.values() == [2.0] * 3


def test_a_later_joiner_never_overwrites():
    """Whoever offers values to a shard that has them is told so, and nothing changes."""
    driver = Driver()
    _a, b = driver.start(value=1.0)

    assert driver.initialize(b, 2.0, choice=driver.core.initial.choice + 1) is False

    assert driver.values() == [1.0] * 3


def test_a_worker_that_was_not_chosen_is_refused():
    """Shard 0 takes values from the worker that it chose and from no other."""
    driver = Driver()
    a, b = driver.join(0), driver.join(1)
    driver.declare(a)
    driver.declare(b)

    with pytest.raises(InvalidRequest, match=r"worker 1 was not chosen.*worker 0 was"):
        driver.begin_initialize(b)
    with pytest.raises(InvalidRequest, match=r"choice: worker 0 was chosen under the number \d+, got 5"):
        driver.begin_initialize(a, choice=5)


@pytest.mark.parametrize("sessions", [(1, 2), (2, 1)])
def test_above_shard_zero_the_worker_chosen_later_replaces_the_dead_ones_values(sessions):
    """A dead initializer may have filled shard 1 already. Its successor's values replace them, whatever the order in which
    the two had joined: otherwise the job would start from two workers' values."""
    driver = Driver(job_spec(2, blocks=2), shard=1, shards=2)
    dead, successor = driver.join(0, session=sessions[0]), driver.join(1, session=sessions[1])
    driver.declare(dead)
    driver.declare(successor)
    assert driver.initialize(dead, 1.0, choice=1)

    assert driver.initialize(successor, 2.0, choice=2)
    assert driver.initialize(successor, 3.0, choice=2), "the same call again: accepted, and not done again"
    assert driver.initialize(dead, 1.0, choice=1) is False, "a zombie that sends again"

    assert driver.values(1) == [2.0] * 3


@pytest.mark.parametrize("is_restarted", [False, True])
def test_above_shard_zero_a_dead_initializer_that_begins_late_changes_nothing(is_restarted, tmp_path):
    """Its lease has run out at shard 0 and not here, and its successor's values came before its own: they stay, although nobody
    has read them yet, also over a restart. Otherwise the shards would start from two workers' values."""
    driver = Driver(job_spec(2, blocks=2), shard=1, shards=2, state_dir=str(tmp_path / "state"))
    late, successor = driver.join(0, session=1), driver.join(1, session=2)
    driver.declare(late)
    driver.declare(successor)
    assert driver.initialize(successor, 2.0, choice=2)
    if is_restarted:
        driver.restart(late, successor)

    assert driver.initialize(late, 1.0, choice=1) is False

    assert driver.values(1) == [2.0] * 3


def test_values_of_a_dead_initializer_are_replaced_after_a_restart_too(tmp_path):
    """A shard that was killed with the values of a worker that has died since takes those of its successor."""
    driver = Driver(job_spec(2, blocks=2), shard=1, shards=2, state_dir=str(tmp_path / "state"))
    dead, successor = driver.join(0, session=1), driver.join(1, session=2)
    driver.declare(dead)
    driver.declare(successor)
    assert driver.initialize(dead, 1.0, choice=1)
    driver.restart(successor)

    assert driver.initialize(successor, 2.0, choice=2)

    assert driver.values(1) == [2.0] * 3


def test_each_choice_has_a_larger_number_than_all_before_it():
    """Also than those of an earlier process of shard 0: it is at least the chosen worker's session."""
    driver = Driver(job_spec(3))
    a, b, c = (driver.join(rank) for rank in range(3))
    first = driver.declare(a)[0].choice
    assert driver.declare(a)[0].choice == first, "declared again"
    waits = [driver.declare(seat)[1] for seat in (c, b)]

    driver.leave(a, failed=True)
    driver.leave(c, failed=True)

    second, third = (ticket.future.result(0) for ticket in waits)
    assert a.session <= first < second < third


def test_without_the_number_of_a_choice_no_values_are_taken():
    """A client that does not know of choices is refused by the field's name."""
    driver = Driver(job_spec(1, blocks=2), shard=1, shards=2)
    seat = driver.join(0, session=1)
    driver.declare(seat)

    with pytest.raises(InvalidRequest, match="choice: must be the number"):
        driver.shard.admission.begin_initialize(seat.caller, driver.layout.digest, 0)


def test_above_shard_zero_values_that_began_earlier_do_not_win():
    """A transfer that began before the successor's and ends after it is dropped."""
    driver = Driver(job_spec(2, blocks=2), shard=1, shards=2)
    dead, successor = driver.join(0, session=1), driver.join(1, session=2)
    driver.declare(dead)
    driver.declare(successor)
    slow = driver.begin_initialize(dead, choice=1)
    driver.offer(slow, 1.0)

    assert driver.initialize(successor, 2.0, choice=2)
    assert driver.shard.admission.end_initialize(slow) is False

    assert driver.values(1) == [2.0] * 3


@pytest.mark.parametrize("use", ["push", "pull"])
def test_values_that_somebody_may_have_read_are_final(use):
    """Once anybody pulled or pushed, no offer changes the parameters, also not after all have joined again."""
    driver = Driver(job_spec(1, blocks=2), shard=1, shards=2)
    seat = driver.join(0, session=1)
    driver.declare(seat)
    driver.initialize(seat, 1.0)
    driver.pull(seat, 0) if use == "pull" else driver.push(seat, 0, 0.0)

    again = driver.join(0, session=2)
    driver.declare(again)

    assert driver.initialize(again, 9.0, choice=9) is False
    assert driver.values(1) == [1.0] * 3


def test_initial_values_come_whole_or_not_at_all():
    """A call that lacks a block, or has a wrong one, is refused by the field's name, and the next one may set them."""
    driver = Driver(job_spec(1, blocks=2))
    seat = driver.join(0)
    driver.declare(seat)
    desk = driver.shard.admission
    init = driver.begin_initialize(seat)
    good = memoryview(np.zeros(3).tobytes())

    desk.initialize_block(init, 0, good)
    with pytest.raises(InvalidRequest, match="block: 1 is missing"):
        desk.end_initialize(init)
    with pytest.raises(InvalidTensor, match="block 0: payload has 8 bytes, expected 3 x 8 = 24"):
        desk.initialize_block(init, 0, good[:8])
    with pytest.raises(NonFiniteGradient, match="tensor 't1'"):
        desk.initialize_block(init, 1, memoryview(np.array([0, 0, np.nan]).tobytes()))
    with pytest.raises(InvalidRequest, match="block: 2 is not on shard 0"):
        desk.initialize_block(init, 2, good)
    with pytest.raises(LayoutMismatch, match="layout_digest"):
        desk.begin_initialize(seat.caller, b"x" * 16, init.choice)
    assert not driver.core.life.has_values

    assert driver.initialize(seat)


def test_a_waiter_that_gave_up_is_not_chosen():
    """A declaration whose call has ended is passed over when a new initializer is needed."""
    driver = Driver(job_spec(3))
    a, b, c = (driver.join(rank) for rank in range(3))
    driver.declare(a)
    gone, waits = driver.declare(b)[1], driver.declare(c)[1]
    gone.fail(InvalidRequest("the caller hung up"))

    driver.leave(a, failed=True)

    assert waits.future.result(0) == driver.core.initial.choice
