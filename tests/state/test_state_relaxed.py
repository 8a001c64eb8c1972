"""Asynchronous and stale-synchronous training, with injected time and with threads."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from shard_driver import Driver, job_spec

from psd.state.tickets import Ticket, WaitKind


def test_async_applies_each_push_at_once():
    """Without rounds every gradient is an update of its own; mean and weights make no difference."""
    driver = Driver(job_spec(2, mode="async"))
    a, b = driver.start()

    driver.push(a, 0, 2.0, weight=5.0)
    driver.push(a, 1, 3.0)
    driver.push(b, 0, 4.0)
    driver.push(b, 1, 100.0, weight=0.0)

    assert driver.values() == [-9.0] * 3


def test_async_duplicates_are_counted_once_also_after_later_pushes():
    """A repeated push, the last one or an older one, changes nothing."""
    driver = Driver(job_spec(2, mode="async"))
    a, _b = driver.start()
    for clock in (0, 1, 1, 0, 2, 1):
        driver.push(a, clock, 1.0)

    assert driver.values() == [-3.0] * 3


def test_a_fenced_sessions_last_block_does_not_turn_back_the_dedup_window():
    """A block that was checked before its session ended, and arrives after the new session's, is dropped; what the new
    session repeats is still known."""
    driver = Driver(job_spec(1, mode="async"))
    (old,) = driver.start()
    push = driver.begin_push(old, 0)
    contribute = driver.core.job.blocks[0].contribute
    held = []
    driver.core.job.blocks[0].contribute = lambda part: held.append(part) or contribute(part)
    driver.push_block(push, 0, 1.0)
    late = held[0]

    new = driver.join(0)
    driver.push(new, 5, 10.0)
    contribute(late)
    driver.push(new, 5, 10.0)

    assert driver.values() == [-11.0] * 3


@pytest.mark.parametrize("seed", range(5))
def test_async_integer_sums_are_exact_for_any_interleaving(seed):
    """Integer gradients, lr 1: the end is the sum, in whatever order blocks and duplicates of eight workers mix."""
    rng = random.Random(seed)
    driver = Driver(job_spec(8, blocks=3, mode="async", dtype="float32"))
    seats = driver.start()
    total = 0
    pending = []
    for seat in seats:
        pushes = []
        for clock in range(6):
            value = rng.randrange(-50, 50)
            total += value
            pushes += [(seat, clock, value, block) for block in range(3) for _ in range(rng.choice((1, 1, 2)))]
        pending.append(pushes)

    while any(pending):
        seat, clock, value, block = rng.choice([p for p in pending if p]).pop(0)
        driver.push_block(driver.begin_push(seat, clock), block, float(value))

    assert [driver.values(b) for b in range(3)] == [[float(-total)] * 3] * 3, f"seed {seed}"


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_integer_sums_are_exact_with_threads(mode):
    """Eight threads push at once, each push twice: the sum is exact, and every round has every worker once."""
    driver = Driver(job_spec(8, blocks=4, size=500, mode=mode, reduction="sum", dtype="float32"))
    seats = driver.start()

    def work(seat):
        for clock in range(20):
            for _ in range(2):
                push = driver.begin_push(seat, clock)
                for block in range(4):
                    while (ticket := driver.push_block(push, block, float(seat.rank + 1))) is not None:
                        ticket.future.result(100)
                driver.shard.exchange.end_push(push)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, seats))

    assert [driver.values(b) for b in range(4)] == [[-20.0 * 36] * 500] * 4
    assert driver.version() == (160 if mode == "async" else 20)
    assert driver.core.waiting.open() == []


def test_ssp_holds_a_worker_back_at_its_bound():
    """With ssp:1 a worker may read and push one step ahead of the slowest, waits beyond, and goes on when that one moves."""
    driver = Driver(job_spec(2, mode="ssp:1"))
    a, b = driver.start()
    driver.push(a, 0, 1.0)
    assert driver.pull(a, 1)[0].tolist() == [-1.0] * 3
    driver.push(a, 1, 1.0)

    ticket = driver.pull(a, 2)[0]

    assert isinstance(ticket, Ticket)
    assert ticket.kind is WaitKind.STALENESS
    assert [w.rank for w in driver.shard.missing_for(ticket)] == [1]
    assert driver.shard.exchange.gate(driver.begin_push(a, 2), 2) is not None
    driver.push(b, 0, 1.0)
    assert ticket.future.result(0) is None
    assert driver.pull(a, 2)[0].tolist() == [-3.0] * 3


@pytest.mark.parametrize("end", ["leave", "expire"])
def test_a_worker_that_is_gone_does_not_hold_the_gate(end):
    """Finished means clock = infinity, and an expired worker is not waited for: the gate opens."""
    driver = Driver(job_spec(2, mode="ssp:0"))
    a, b = driver.start()
    driver.push(a, 0, 1.0)
    ticket = driver.pull(a, 1)[0]

    driver.leave(b) if end == "leave" else driver.expire(b, keep=[a])

    assert ticket.future.result(0) is None


def test_an_absent_worker_holds_the_gate():
    """A worker that has not joined yet is waited for, by rank."""
    driver = Driver(job_spec(2, mode="ssp:0"))
    (a,) = driver.start(0)
    driver.push(a, 0, 1.0)

    ticket = driver.pull(a, 1)[0]

    assert [w.rank for w in driver.shard.missing_for(ticket)] == [1]


@pytest.mark.parametrize("has_joined", [False, True])
def test_a_worker_that_the_others_have_waited_for_begins_where_they_did(has_joined):
    """It comes, or declares, when another one is at the bound: both make as many steps, and end together."""
    driver = Driver(job_spec(2, mode="ssp:1"))
    late = driver.join(1) if has_joined else None
    (a,) = driver.start(0)
    for clock in range(2):
        driver.push(a, clock, 1.0)
    ticket = driver.pull(a, 2)[0]

    late = late if late is not None else driver.join(1)

    assert driver.declare(late)[0].clock == late.clock == 0
    assert not ticket.future.done()
    driver.push(late, 0, 1.0)
    assert ticket.future.result(0) is None


def test_a_worker_that_comes_back_joins_beside_the_slowest():
    """Under ssp a rejoining worker enters at the slowest live clock, so that it neither holds the others nor runs ahead."""
    driver = Driver(job_spec(3, mode="ssp:5"))
    a, b, c = driver.start()
    driver.expire(c, keep=[a, b])
    for clock in range(4):
        driver.push(a, clock, 1.0)
    for clock in range(3):
        driver.push(b, clock, 1.0)

    again = driver.join(2)

    assert driver.declare(again)[0].clock == 3
    assert driver.core.members.min_clock() == 3


def test_min_clock_is_the_slowest_after_any_event():
    """The clock that is kept at hand is the one that a search finds, after steps, skips, joins and deaths."""
    rng = random.Random(3)
    driver = Driver(job_spec(5, mode="ssp:100"))
    seats = driver.start()
    members = driver.core.members

    for _ in range(300):
        rank = rng.randrange(5)
        event = rng.choice(("push", "push", "push", "skip", "join", "leave"))
        worker = members.workers[rank]
        if event == "join":
            seats[rank] = driver.join(rank)
            driver.declare(seats[rank])
        elif worker.state.name != "LIVE":
            continue
        elif event == "push":
            driver.push(seats[rank], worker.clock, 1.0)
        elif event == "skip":
            driver.heartbeat(seats[rank], worker.clock + 2)
        else:
            driver.leave(seats[rank])
        assert members.min_clock() == min((w.clock for w in members.workers if w.is_waited_for), default=None)
