"""The end of a job at one step, as a worker asks for it: in every order of events, once, whatever is killed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from shard_driver import Driver, Fuse, Killed, Seat, job_spec

from psd.contract.errors import InvalidRequest, NotDeclared, SessionFenced, WrongShard
from psd.v1 import job_pb2


@dataclass
class Loop:
    """A worker's program: it pushes at its clock until it has heard that the job ends there, and leaves."""

    driver: Driver
    seat: Seat
    clock: int = 0
    ends_at: int = 0
    has_left: bool = False

    def hear(self, orders: job_pb2.JobOrders | None) -> None:
        self.ends_at = orders.ends_at if orders is not None else 0

    @property
    def may_go_on(self) -> bool:
        """True unless it waits for the others: for a round to close, or for those whom the bound lets it not outrun."""
        if self.has_left or self.ends_at == self.clock:
            return not self.has_left
        driver = self.driver
        if driver.core.job.policy.has_rounds:
            return driver.version() >= self.clock
        slowest = driver.core.members.min_clock()
        return slowest is None or driver.core.job.policy.lag(self.clock) <= slowest

    def step(self) -> None:
        if self.ends_at and self.clock >= self.ends_at:
            self.has_left = True
            self.driver.leave(self.seat)
            return
        reply = self.driver.push(self.seat, self.clock, 1.0)
        self.clock = reply.clock
        self.hear(reply.orders)

    def stop(self) -> None:
        self.hear(self.driver.shard.stop(self.seat.caller))

    def join_anew(self) -> None:
        self.seat = self.driver.join(self.seat.rank)
        reply, _ = self.driver.declare(self.seat)
        self.clock = reply.clock
        self.hear(self.driver.core.orders.current)  # as JoinReply has them

    def resume(self) -> None:
        """Meet the shard again after it was killed, and bring what only its memory had."""
        if not self.has_left:
            self.hear(self.driver.resume(self.seat).orders)
            if self.driver.core.job.policy.has_rounds and self.clock and self.driver.version() == self.clock - 1:
                self.driver.push(self.seat, self.clock - 1, 1.0)


@pytest.mark.parametrize("mode", ["sync", "ssp:1", "async"])
def test_all_workers_make_the_same_steps_in_whatever_order_things_happen(mode: str, tmp_path: Path) -> None:
    """Drawn orders of steps, stops by any workers, returns of workers as new sessions, and kills of the shard."""
    stopped_late = 0
    for seed in range(40):
        draw = random.Random(seed)
        driver = Driver(job_spec(3, mode=mode), state_dir=str(tmp_path / f"{seed}"))
        loops = [Loop(driver, seat) for seat in driver.start()]
        begins, first_stop = draw.randrange(12), None
        for number in range(2000):
            left = [loop for loop in loops if not loop.has_left]
            if not left:
                break
            one, what = draw.choice(left), draw.random()
            if number >= begins and (first_stop is None or what < 0.1):
                one.stop()
                first_stop = one.ends_at if first_stop is None else first_stop
            elif what < 0.15:
                one.join_anew()
            elif what < 0.2:
                driver.restart()
                for loop in loops:
                    loop.resume()
            elif one.may_go_on:
                one.step()
        assert all(loop.has_left for loop in loops), seed
        ended = {loop.clock for loop in loops}
        assert len(ended) == 1, (seed, ended)
        assert ended <= {first_stop}, "the first word is the earliest"
        stopped_late += first_stop > 2
        driver.shard.close(keep=False)
    assert stopped_late > 10


@pytest.mark.parametrize(("mode", "expected"), [("sync", 3), ("ssp:4", 6), ("async", 6)])
def test_the_step_is_the_earliest_that_no_worker_may_have_begun(mode: str, expected: int) -> None:
    """With rounds: who has pushed for the open one hears with its next push. Without: counted from the foremost."""
    driver = Driver(job_spec(2, mode=mode))
    a, b = driver.start()
    for clock in range(1 if mode == "sync" else 4):
        driver.push(a, clock, 1.0)
    driver.push(b, 0, 1.0)
    if mode == "sync":
        driver.push(a, 1, 1.0)

    assert driver.shard.stop(b.caller).ends_at == expected
    told = driver.push(b, 1, 1.0).orders
    assert (told.ends_at, told.asked_by) == (expected, 1)


def test_whoever_asks_again_changes_nothing_but_an_operator_may_put_the_end_forward() -> None:
    """Without rounds psdctl drain ends each worker before its next step."""
    driver = Driver(job_spec(2, mode="async"))
    a, b = driver.start()
    driver.push(a, 0, 1.0)
    first = driver.shard.stop(a.caller)
    driver.push(a, 1, 1.0)

    assert driver.shard.stop(b.caller) == driver.shard.stop(a.caller) == first
    assert (first.ends_at, first.asked_by) == (3, 0)
    assert driver.shard.end_job() == 1
    drained = driver.shard.stop(b.caller)
    assert (drained.ends_at, drained.HasField("asked_by")) == (1, False)


def test_a_worker_that_is_gone_does_not_put_the_end_off() -> None:
    """The foremost one has expired, and nobody waits for it."""
    driver = Driver(job_spec(2, mode="async"))
    a, b = driver.start()
    for clock in range(50):
        driver.push(a, clock, 1.0)
    driver.expire(a, keep=[b])

    assert driver.shard.stop(b.caller).ends_at == 2


def test_a_worker_that_joins_after_it_hears_of_it_and_when_all_have_left_it_is_forgotten() -> None:
    """Else whoever trains on after the end would be sent away. What has ended the job is still known then."""
    driver = Driver()
    a, b = driver.start()
    driver.shard.scale_learning_rate(0.5)
    ends_at = driver.shard.stop(a.caller).ends_at
    b = driver.join(1)
    assert driver.resume(b).orders.ends_at == ends_at
    driver.leave(a)
    driver.shard.tick()
    assert driver.shard.status().ended_by is None

    driver.leave(b)
    driver.shard.tick()

    status = driver.shard.status()
    assert (status.ended_by.ends_at, status.ended_by.asked_by) == (ends_at, 0)
    assert (status.orders.ends_at, [rate.scale for rate in status.orders.learning_rates]) == (0, [0.5])
    assert driver.join(0).clock == 0


@pytest.mark.parametrize("steps", [1, 2])
def test_a_shard_that_dies_while_it_stores_the_order_has_it_or_not_and_the_call_sent_again_counts_once(
    steps: int, tmp_path: Path
) -> None:
    """Whichever it is, all workers hear the same with their next pushes."""
    fuse = Fuse()
    driver = Driver(state_dir=str(tmp_path / "state"), crash_point=fuse)
    a, b = driver.start()
    fuse.steps = steps
    with pytest.raises(Killed):
        driver.shard.stop(a.caller)
    driver.restart(a, b)

    before = driver.core.orders.current
    assert (before is not None) == (steps == 2)
    ends_at = driver.shard.stop(a.caller).ends_at
    for clock in range(ends_at):
        replies = [driver.push(seat, clock, 1.0) for seat in (a, b)]
        assert [reply.orders.ends_at for reply in replies] == [2, 2]


def test_what_cannot_be_ended_is_refused() -> None:
    """Nothing is declared; another shard is asked; the session has ended; there are no steps on shard 0."""
    driver = Driver()
    with pytest.raises(NotDeclared):
        driver.shard.stop(driver.join(0).caller)
    driver = Driver()
    a, _b = driver.start()
    driver.join(0)
    with pytest.raises(SessionFenced):
        driver.shard.stop(a.caller)
    driver = Driver(shard=1, shards=2)
    seat = driver.join(0, session=1)
    with pytest.raises(WrongShard, match="orders are given to shard 0"):
        driver.shard.stop(seat.caller)
    driver = Driver(job_spec(2, blocks=1), shards=3)
    seats = driver.start() if driver.layout.shard_of(0) else []
    for seat in seats:
        with pytest.raises(InvalidRequest, match="no trained blocks"):
            driver.shard.stop(seat.caller)
