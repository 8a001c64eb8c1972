"""Publications: readers carry shard 0's last decision to shards that are behind it, and can do nothing else by that."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from queue import SimpleQueue

import pytest
from shard_driver import Driver, job_spec

from psd.contract.errors import CutMissed, InvalidRequest
from psd.contract.jobspec import GroupSpec
from psd.contract.tokens import parse_tokens
from psd.v1 import control_pb2, data_pb2, job_pb2

MEMBERS = b"\1"


def seal(words):
    return hashlib.sha256(b"of the shards" + words).digest()


def publication():
    spec = job_spec(1, blocks=2, dtype="float32", aggregation="exact", reduction="sum")
    return replace(spec, groups=(GroupSpec("published"),) * 2)


def shards_with_a_put(*, commits=True):
    """Two shards that have a put, shard 0 alone knowing that it counts."""
    drivers = [Driver(publication(), shard=shard, shards=2) for shard in range(2)]
    seats, choice = [], 0
    for driver in drivers:
        driver.shard.settlement.seal = seal
        seat = driver.join(session=seats[0].caller.session if seats else 0, run_id="mine")
        seats.append(seat)
        reply, _ = driver.declare(seat)
        choice = choice or reply.choice
        driver.initialize(seat, choice=choice)
        push = driver.begin_push(seat, 0, scalars=())
        driver.push_block(push, driver.config.shard_index, 5.0)
        driver.shard.exchange.end_push(push)
    if commits:
        drivers[0].shard.settlement.commit(control_pb2.CommitRequest(caller=seats[0].caller, clock=0))
    return drivers


def described(driver):
    return driver.shard.describe(control_pb2.DescribeRequest(shard_index=driver.config.shard_index, shard_count=2))


def read(driver, **fields):
    """Ask for version 1; what has come of it."""
    done = SimpleQueue()
    request = data_pb2.ReadRequest(layout_digest=driver.layout.digest, cut=data_pb2.Cut(id="c1", step=1), timeline=0)
    request.MergeFrom(data_pb2.ReadRequest(**fields))
    snapshot = driver.shard.begin_read(request, done)
    driver.shard.cuts.abandon(snapshot)
    return done.qsize()


def test_a_put_that_shard_0_has_decided_is_there_when_a_reader_says_so():
    """At a shard whose publisher could not say so any more; saying it again changes nothing."""
    first, second = shards_with_a_put()
    told = described(first)
    assert (told.decision.round, told.decision.members) == (0, MEMBERS)
    assert not described(second).HasField("decision")
    assert (first.version(0), second.version(1), read(second)) == (1, 0, 0)

    assert read(second, decision=told.decision, seal=told.seal) == 1

    assert (second.version(1), second.values(1)) == (1, [5.0] * 3)
    assert read(second, decision=told.decision, seal=told.seal) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda told: {"decision": told.decision, "seal": b""},
        lambda told: {"decision": job_pb2.Decision(round=0), "seal": told.seal},
        lambda told: {"decision": job_pb2.Decision(round=1, members=MEMBERS), "seal": told.seal},
    ],
)
def test_a_decision_that_shard_0_has_not_taken_changes_nothing(change):
    """A reader cannot publish what was never committed, nor have a put passed over."""
    first, second = shards_with_a_put()

    assert read(second, **change(described(first))) == 0

    assert second.version(1) == 0


def test_a_decision_from_another_life_of_the_store_changes_nothing():
    """The first life's versions had the same numbers."""
    told = described(shards_with_a_put()[0])
    _, second = shards_with_a_put(commits=False)
    second.core.declared().arena.set_word("initialized", 77)

    assert read(second, decision=told.decision, seal=told.seal) == 0

    assert second.version(1) == 0


def test_a_decision_is_refused_where_it_makes_no_sense():
    """Of another timeline, or of none, of workers that do not exist, or of a job that trains."""
    first, second = shards_with_a_put()
    told = described(first)
    with pytest.raises(CutMissed, match="timeline"):
        read(second, decision=told.decision, seal=told.seal, timeline=1)
    request = data_pb2.ReadRequest(layout_digest=second.layout.digest, cut=data_pb2.Cut(id="c", step=1))
    request.decision.CopyFrom(told.decision)
    with pytest.raises(InvalidRequest, match="decision: is for publications, and with a timeline"):
        second.shard.begin_read(request, SimpleQueue())
    with pytest.raises(InvalidRequest, match="members: names worker 1"):
        read(second, decision=job_pb2.Decision(round=0, members=b"\2"), seal=told.seal)
    driver = Driver(job_spec(1, aggregation="exact"))
    driver.start()
    assert not driver.shard.describe(control_pb2.DescribeRequest(shard_count=1)).HasField("decision")
    with pytest.raises(InvalidRequest, match="decision: is for publications"):
        read(driver, decision=told.decision, seal=told.seal)


def test_readers_cannot_make_a_seal():
    """It depends on all tokens that may change something, and on no reader's."""
    lines = ["publisher " + "p" * 20, "worker " + "w" * 20]
    theirs = parse_tokens("\n".join(lines), "tokens").seal(b"words")

    assert parse_tokens("\n".join([*reversed(lines), "reader " + "r" * 20]), "tokens").seal(b"words") == theirs
    assert parse_tokens(lines[0], "tokens").seal(b"words") != theirs
    assert parse_tokens("\n".join(lines), "tokens").seal(b"others") != theirs
