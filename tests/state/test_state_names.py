"""The name of a push, (rank, session, clock): whose gradient counts when a worker joins anew, or another takes its rank."""

import pytest
from shard_driver import Driver, job_spec

from psd.contract.errors import InvalidRequest
from psd.state.shard import Shard
from psd.v1 import control_pb2


def commit(driver: Driver, seat, clock: int) -> None:
    driver.shard.settlement.commit(control_pb2.CommitRequest(caller=seat.caller, clock=clock, without_waiting=True))


def test_a_gradient_that_was_acknowledged_counts_when_its_worker_is_replaced_within_the_round():
    """Worker 0 has pushed, and its process dies; the next one of the rank pushes before the round has closed. Both count: the
    second one's gradient once, in the round after."""
    driver = Driver(job_spec(2, blocks=2, reduction="sum"))
    a, b = driver.start()
    assert driver.push(a, 0, 1.0).blocks_counted == 2

    successor = driver.join(0)
    assert driver.declare(successor)[0].clock == 1
    waits = driver.push_block(driver.begin_push(successor, 1), 0, 10.0)
    assert waits is not None, "round 0 is still open"
    driver.push(b, 0, 100.0)
    assert waits.future.done()
    assert driver.push(successor, 1, 10.0).blocks_counted == 2
    driver.push(b, 1, 1000.0)

    assert [driver.values(block) for block in (0, 1)] == [[-1111.0] * 3] * 2


def test_a_block_that_is_counted_while_the_rank_joins_again_is_told_so():
    """The session is checked first and the gradient added later; a join between the two has promised the round to nobody."""
    driver = Driver(job_spec(2, blocks=1))
    a, b = driver.start()
    push = driver.begin_push(a, 0)
    contribute = driver.core.job.blocks[0].contribute

    def join_first(part):
        driver.join(0)
        return contribute(part)

    driver.core.job.blocks[0].contribute = join_first
    driver.push_block(push, 0, 50.0)
    driver.core.job.blocks[0].contribute = contribute
    successor = driver.join(0)
    assert driver.declare(successor)[0].clock == 0
    assert driver.push(successor, 0, 2.0).blocks_counted == 1
    driver.push(b, 0, 4.0)

    assert driver.values() == [-3.0] * 3


def test_a_push_keeps_its_name_when_its_worker_joins_anew():
    """The lease has run out in the middle of a push; the worker comes back and completes it, each block once."""
    driver = Driver(job_spec(2, blocks=2, reduction="sum"))
    a, b = driver.start()
    driver.push_block(driver.begin_push(a, 0), 0, 2.0)
    driver.expire(a, keep=[b])

    again = driver.join(0)
    driver.declare(again)
    reply = driver.push(again, 0, 2.0, session=a.session)
    driver.push(b, 0, 4.0)

    assert (reply.blocks_counted, reply.blocks_duplicate) == (1, 1)
    assert [driver.values(block) for block in (0, 1)] == [[-6.0] * 3] * 2
    reply = driver.push(again, 0, 2.0, session=a.session)
    assert reply.blocks_duplicate == 2, "counted in a page of that name"
    assert driver.push(again, 1, 1.0).blocks_counted == 2, "the next push is the new session's"


def test_without_rounds_a_push_keeps_its_name_too():
    """What one block has applied is not applied again by the new session."""
    driver = Driver(job_spec(1, blocks=2, mode="async"))
    (a,) = driver.start()
    driver.push_block(driver.begin_push(a, 0), 0, 2.0)

    again = driver.join(0)
    driver.declare(again)
    reply = driver.push(again, 0, 2.0, session=a.session)

    assert (reply.blocks_counted, reply.blocks_duplicate) == (1, 1)
    assert [driver.values(block) for block in (0, 1)] == [[-2.0] * 3] * 2


def test_a_push_cannot_have_been_begun_by_a_later_session():
    """Refused, and nothing has changed."""
    driver = Driver()
    a, _ = driver.start()
    before = driver.fingerprint()
    with pytest.raises(InvalidRequest, match=r"session: .* is later than the caller"):
        driver.begin_push(a, 0, session=a.session + 1)
    assert driver.fingerprint() == before


def counts(shard: Shard) -> tuple[int, int]:
    return shard._core.counters.pushes_accepted, shard._core.counters.pushes_late


def test_exact_aggregation_says_staged_until_it_is_decided_what_counts():
    """Quorum 1 of 2: both are kept, one counts, and the shard counts them as what they are."""
    driver = Driver(job_spec(2, blocks=2, aggregation="exact", quorum=1))
    a, b = driver.start()
    replies = [driver.push(seat, 0, 2.0) for seat in (a, b)]
    assert [(reply.blocks_staged, reply.blocks_counted) for reply in replies] == [(2, 0), (2, 0)]
    assert counts(driver.shard) == (0, 0)

    commit(driver, a, 0)

    assert counts(driver.shard) == (1, 1)
    assert driver.push(b, 0, 2.0).blocks_late == 2
    assert counts(driver.shard) == (1, 2)


def test_another_shard_counts_them_when_it_hears_of_the_decision():
    """Shards other than shard 0 learn what rounds are made of from the workers."""
    driver = Driver(job_spec(2, blocks=2, aggregation="exact", quorum=1), shard=1, shards=2)
    seats = [driver.join(rank, session=rank + 1) for rank in range(2)]
    for seat in seats:
        driver.declare(seat)
    driver.initialize(seats[0])
    for seat in seats:
        driver.push(seat, 0, 2.0)
    assert counts(driver.shard) == (0, 0)
    header = driver.header(seats[1], 1)
    header.decisions.add(round=0, members=b"\x02")
    driver.shard.exchange.begin_push(header)
    assert counts(driver.shard) == (1, 1)


def test_after_the_decision_a_gradient_that_is_not_in_it_is_late():
    """It is told at once, instead of being kept."""
    driver = Driver(job_spec(3, blocks=1, aggregation="exact", quorum=1), shard=0)
    a, b, c = driver.start()
    driver.push(a, 0, 2.0)
    commit(driver, a, 0)
    assert [driver.push(seat, 0, 9.0).blocks_late for seat in (b, c)] == [1, 1]
    assert driver.values() == [-2.0] * 3
