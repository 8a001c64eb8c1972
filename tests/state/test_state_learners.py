"""Learners on a shard: what they say of themselves, how it fares, and what no learner says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from settling import commit
from shard_driver import Driver, job_spec

from psd.contract.errors import InvalidRequest
from psd.v1 import data_pb2


def note(**fields):
    return data_pb2.LearnerNote(**fields)


def learners(world_size=2, **fields):
    driver = Driver(job_spec(world_size, quorum=1, aggregation="exact", size=1, **fields))
    return driver, driver.start()


def test_a_learner_is_known_by_its_last_push():
    """Steps, tokens, and how many exchanges old its base was."""
    driver, (a, _b) = learners()
    driver.push(a, 0, 1.0, learner=note(steps=50, tokens=800, step_s=0.25, base=0))
    commit(driver, a, 0)
    driver.push(a, 1, 1.0, learner=note(steps=100, tokens=1600, step_s=0.5, base=0))

    known = driver.shard.learner(0)
    assert (known.note.steps, known.note.tokens, known.note.step_s, known.base_age) == (100, 1600, 0.5, 1)
    assert driver.shard.learner(1) is None


def test_the_fastest_learner_that_lives_sets_the_pace():
    """One that has not measured its steps says nothing; one that is gone no longer counts."""
    driver, (a, b) = learners()
    assert driver.push(a, 0, 1.0, learner=note()).fastest_step_s == 0
    assert driver.push(a, 0, 1.0, learner=note(step_s=2.0)).fastest_step_s == 2
    assert driver.push(b, 0, 1.0, learner=note(step_s=0.5)).fastest_step_s == 0.5

    driver.expire(b, keep=[a])

    assert driver.push(a, 0, 1.0, learner=note(step_s=2.0)).fastest_step_s == 2


def test_parts_in_a_merge_and_missed_rounds_are_counted():
    """By weight, among those whose differences count; a round that is decided without a learner is one that it has missed."""
    driver, (a, b, c) = learners(3, grace=5.0)
    for seat, weight in ((a, 1.0), (b, 3.0), (c, 4.0)):
        driver.push(seat, 0, 1.0, weight=weight, learner=note())
    for seat in (a, b):
        commit(driver, seat, 0)
    driver.time.value += 5
    driver.shard.tick()

    found = [driver.shard.learner(rank) for rank in range(3)]
    assert [each.merge_percent for each in found] == [25, 75, 0]
    assert [each.rounds_missed for each in found] == [0, 0, 1]


@pytest.mark.parametrize("field", ["tokens", "step_s", "of_tokens"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_note_with_a_number_that_no_learner_has_is_refused(field, value):
    """By the field's name; nothing is counted."""
    driver, (a, _b) = learners()
    with pytest.raises(InvalidRequest, match=rf"learner\.{field}: must be finite and >= 0"):
        driver.push(a, 0, 1.0, learner=note(**{field: value}))
    assert driver.shard.learner(0) is None


@pytest.mark.parametrize(
    ("norms", "words"),
    [
        ([], "norms: expected 1, one for each tensor that merges by rda, got 0"),
        ([1.0, 2.0], "norms: expected 1"),
        ([-1.0], "norms: must be finite and >= 0, got -1.0 for tensor 't0'"),
        ([math.nan], "norms: must be finite and >= 0, got nan"),
    ],
)
def test_norms_that_no_difference_has_are_refused(norms, words):
    """Before anything is counted."""
    spec = job_spec(2, aggregation="exact", size=1)
    driver = Driver(replace(spec, tensors=(replace(spec.tensors[0], merge="rda"),)))
    a, _b = driver.start()
    with pytest.raises(InvalidRequest, match=words):
        driver.push(a, 0, 1.0, norms=norms)


def test_who_only_asks_learns_what_is_decided_and_commits_nothing():
    """So a learner finds the open round; together with what belongs to a push it is refused."""
    driver, (a, b) = learners()
    driver.push(a, 0, 1.0)
    commit(driver, a, 0)

    reply = commit(driver, b, 0, only_ask=True)
    assert [decision.round for decision in reply.decisions] == [0]
    assert commit(driver, b, 1, only_ask=True).decisions == reply.decisions
    assert driver.core.job.coordinator.next_round == 1
    for fields in ({"only_wait": True}, {"measures": [{}]}):
        with pytest.raises(InvalidRequest, match="only_ask: a worker that only asks neither skips nor waits"):
            commit(driver, b, 1, only_ask=True, **fields)
