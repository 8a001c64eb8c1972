"""Numbers that workers bring to a barrier: reduced exactly, over those that are there, once, whatever is killed."""

from __future__ import annotations

import itertools
import math
import random
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shard_driver import Driver, Fuse, Killed, Seat, job_spec

from psd.contract.config import Limits
from psd.contract.errors import BarrierTimeout, InvalidRequest, RolledBack
from psd.state.tickets import Ticket
from psd.state.workers.reducing import Brought, exact_sum, reduced
from psd.v1 import control_pb2
from psd.v1.control_pb2 import Number

SUM, MEAN, MIN, MAX = 1, 2, 3, 4


def numbers(values: dict[str, Any]) -> list[Number]:
    return [
        Number(name=name, real=value) if isinstance(value, float) else Number(name=name, integer=value)
        for name, value in values.items()
    ]


def bring(driver: Driver, seat: Seat, values: dict[str, Any], how: int = SUM, **call: Any) -> Ticket:
    return driver.arrive(seat, numbers=numbers(values), reduction=how, **call)


def answer(ticket: Ticket) -> tuple[dict[str, Any], int]:
    """The numbers, and over how many workers they are."""
    reply = ticket.future.result(0)
    return {n.name: n.real if n.HasField("real") else n.integer for n in reply.numbers}, reply.workers


def over(how: int, *values: Any) -> Any:
    (found,) = reduced([Brought(how, ("x",), (value,)) for value in values])
    return found.real if found.HasField("real") else found.integer


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


# -- arithmetic --


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_a_sum_of_floats_is_rounded_once_whatever_their_order(values: list[float], draw: random.Random) -> None:
    """Against exact fractions, also where a sum on the way is too large for a float."""
    exact = sum(map(Fraction, values))
    try:
        expected = float(exact)
    except OverflowError:
        expected = math.inf if exact > 0 else -math.inf
    shuffled = values[:]
    draw.shuffle(shuffled)

    assert exact_sum(values) == exact_sum(shuffled) == expected
    mean = exact_sum(values, len(values))
    assert bits(mean) == bits(exact_sum(shuffled, len(values)))
    assert math.isfinite(mean) or abs(exact) > 2**1023


@given(st.lists(st.floats(), min_size=2, max_size=5), st.sampled_from([SUM, MEAN, MIN, MAX]))
def test_every_order_of_arrivals_gives_the_same_bits(values: list[float], how: int) -> None:
    """NaN, infinities and both zeros included."""
    found = {bits(over(how, *order)) for order in itertools.permutations(values)}

    assert len(found) == 1 or all(map(math.isnan, (struct.unpack("<d", each)[0] for each in found)))


def test_integers_stay_integers_and_what_is_real_at_one_worker_is_real_at_all() -> None:
    """Also: NaN goes through, infinities are as in arithmetic, and of the two zeros the negative one is the smaller."""
    assert over(SUM, 2**53, 1) == 2**53 + 1
    assert over(MEAN, 1, 2) == 1.5
    assert (over(MIN, 3, -4), over(MAX, 3, -4)) == (-4, 3)
    assert [type(over(how, 1, 2)) for how in (SUM, MIN, MAX, MEAN)] == [int, int, int, float]
    assert over(SUM, 1, 0.5) == 1.5
    assert type(over(MAX, 2, 0.5)) is float
    assert math.isnan(over(MIN, 1.0, math.nan))
    assert math.isnan(over(SUM, math.inf, -math.inf))
    assert over(SUM, 1e308, math.inf, 1e308) == math.inf
    assert bits(over(MIN, 0.0, -0.0)) == bits(-0.0)
    assert bits(over(MAX, -0.0, 0.0)) == bits(0.0)
    assert over(MEAN, 1.5e308, 1.5e308) == 1.5e308


# -- events --


def test_all_get_the_same_numbers_when_the_last_one_has_come() -> None:
    """Nobody hears anything before."""
    driver = Driver(job_spec(3))
    a, b, c = driver.start()

    tickets = [bring(driver, seat, {"loss": 0.1, "count": 32}) for seat in (a, b)]
    assert not any(ticket.future.done() for ticket in tickets)
    tickets.append(bring(driver, c, {"count": 8, "loss": 0.1}))

    assert [answer(ticket) for ticket in tickets] == [({"count": 72, "loss": 0.30000000000000004}, 3)] * 3
    assert driver.core.waiting.open() == []


@pytest.mark.parametrize("end", ["leave", "fail", "expire"])
@pytest.mark.parametrize("had_come", [False, True])
def test_numbers_of_a_worker_that_is_gone_before_all_have_come_do_not_count(end: str, had_come: bool) -> None:
    """The answer says over how many workers it is."""
    driver = Driver(job_spec(3))
    a, b, c = driver.start()
    tickets = [bring(driver, a, {"x": 1})]
    if had_come:
        bring(driver, c, {"x": 100})
    else:
        tickets.append(bring(driver, b, {"x": 2}))

    driver.expire(c, keep=[a, b]) if end == "expire" else driver.leave(c, failed=end == "fail")
    if had_come:
        assert not tickets[0].future.done()
        tickets.append(bring(driver, b, {"x": 2}))

    assert [answer(ticket) for ticket in tickets] == [({"x": 3}, 2)] * 2


def test_a_worker_that_joins_anew_counts_once_with_its_latest_numbers() -> None:
    """Its call goes on under the session as which it was begun; a call of its successor is another one."""
    driver = Driver()
    a, b = driver.start()
    bring(driver, a, {"x": 1.0}, seq=4)
    again = driver.join(0)
    ticket = bring(driver, again, {"x": 1.0}, seq=4, session=a.session)
    lost = bring(driver, again, {"x": 2.0}, seq=4, session=a.session)
    assert isinstance(ticket.future.exception(0), BarrierTimeout)

    assert answer(bring(driver, b, {"x": 10.0})) == answer(lost) == ({"x": 12.0}, 2)
    assert answer(bring(driver, again, {"x": 7.0}, seq=4, session=a.session)) == ({"x": 12.0}, 2), "answered again, not counted"
    assert not bring(driver, again, {"x": 7.0}, seq=1).future.done()


def test_who_withdraws_is_waited_for_again() -> None:
    """After a time-out a worker may come with other numbers."""
    driver = Driver()
    a, b = driver.start()
    gone = bring(driver, a, {"x": 5})
    gone.fail(BarrierTimeout("too late"))
    driver.shard.withdraw(gone)

    ticket = bring(driver, b, {"x": 1})
    assert not ticket.future.done()

    assert answer(bring(driver, a, {"x": 2}, seq=2)) == answer(ticket) == ({"x": 3}, 2)


@pytest.mark.parametrize(
    ("values", "how", "text"),
    [
        ({"y": 1}, SUM, "worker 1 brings 'y', and worker 0 does not"),
        ({"x": 1, "z": 1}, SUM, "worker 1 brings 'z', and worker 0 does not"),
        ({"x": 1}, MAX, 'worker 1 asks for "max", worker 0 for "sum"'),
        ({}, 0, 'worker 1 asks for none, worker 0 for "sum"'),
    ],
)
def test_who_brings_other_numbers_is_refused_and_the_others_go_on_waiting(values: dict[str, Any], how: int, text: str) -> None:
    """It hears the first difference, and may come again."""
    driver = Driver()
    a, b = driver.start()
    waiting = bring(driver, a, {"x": 1})
    wrong = bring(driver, b, values, how)

    with pytest.raises(InvalidRequest, match=text):
        wrong.future.result(0)
    driver.shard.withdraw(wrong)
    assert not waiting.future.done()

    assert answer(bring(driver, b, {"x": 1}, seq=2)) == answer(waiting) == ({"x": 2}, 2)


@pytest.mark.parametrize(
    ("brought", "how", "text"),
    [
        ([], SUM, "numbers: expected 1 to 4"),
        (
            [Number(name=f"n{i}", real=1.0) for i in range(5)],
            SUM,
            r"expected 1 to 4 \(the shard's --max-reduced-numbers\), got 5",
        ),
        ([Number(name="x", real=1.0)], 0, "reduction: is 0"),
        ([Number(name="x", real=1.0)], 9, "reduction: is 9"),
        ([Number(name="x")], SUM, "numbers: 'x' has no value"),
        ([Number(name="x", real=1.0), Number(name="x", integer=1)], SUM, "numbers: 'x' is there twice"),
        ([Number(name="", real=1.0)], SUM, "name: expected 1 to 8 bytes"),
        ([Number(name="x" * 9, real=1.0)], SUM, "name: expected 1 to 8 bytes"),
        ([Number(name="x\n", real=1.0)], SUM, "control characters"),
        ([Number(name="x", integer=-(2**62))], SUM, "may not fit into 64 bits"),
    ],
)
def test_wrong_numbers_are_refused_by_field(brought: list[Number], how: int, text: str) -> None:
    """Nobody has come then, and nothing is kept."""
    driver = Driver(limits=Limits(name_bytes_max=8, reduced_numbers_max=4))
    a, _b = driver.start()

    with pytest.raises(InvalidRequest, match=text):
        driver.arrive(a, numbers=brought, reduction=how)

    assert driver.core.barriers._barriers == {}
    assert driver.core.waiting.open() == []


def test_the_largest_integers_are_exact() -> None:
    """Of a sum, those that fit for any number of workers; of a minimum, all of 64 bits."""
    driver = Driver()
    a, b = driver.start()
    most = 2**62 - 1
    bring(driver, a, {"x": most})
    assert answer(bring(driver, b, {"x": most})) == ({"x": 2 * most}, 2)
    bring(driver, a, {"x": 2**63 - 1}, MIN, seq=2)
    assert answer(bring(driver, b, {"x": -(2**63)}, MIN, seq=2)) == ({"x": -(2**63)}, 2)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_shard_that_dies_as_it_stores_the_answer_gives_it_or_takes_all_numbers_again(steps: int, tmp_path: Path) -> None:
    """Before it is stored nobody has heard it; after, everybody hears the same, also a worker that has changed its numbers."""
    fuse = Fuse()
    driver = Driver(state_dir=str(tmp_path / "state"), crash_point=fuse)
    a, b = driver.start()
    for seat in (a, b):
        bring(driver, seat, {"before": 1}, seq=1)
    bring(driver, a, {"x": 0.1}, seq=2)
    fuse.steps = steps
    with pytest.raises(Killed):
        bring(driver, b, {"x": 0.2}, seq=2)
    driver.restart(a, b)

    tickets = [bring(driver, a, {"x": 0.4}, seq=2), bring(driver, b, {"x": 0.2}, seq=2)]

    expected = 0.6000000000000001 if steps == 1 else 0.30000000000000004
    assert [answer(ticket) for ticket in tickets] == [({"x": expected}, 2)] * 2
    driver.restart(a, b)
    assert answer(bring(driver, a, {"x": 5.0}, seq=2)) == ({"x": expected}, 2)


def test_what_is_kept_of_an_answer_is_kept_once_for_all_workers(tmp_path: Path) -> None:
    """Of each worker the last call alone, as of any barrier."""
    driver = Driver(job_spec(40), state_dir=str(tmp_path / "state"))
    seats, sizes = driver.start(), []
    values = {f"number {number:03}": float(number) for number in range(200)}
    for seq in range(1, 6):
        for seat in seats:
            bring(driver, seat, values, seq=seq)
        sizes.append(len(driver.core.storage.load_barriers()))

    assert max(sizes) < 200 * 32 + 40 * 40
    driver.restart(*seats)
    sums = {name: 40 * value for name, value in values.items()}
    assert [answer(bring(driver, seat, values, seq=5)) for seat in seats] == [(sums, 40)] * 40


def test_in_whatever_order_workers_come_again_leave_and_shards_are_killed_each_counts_once(tmp_path: Path) -> None:
    """Drawn orders. Worker r brings 10 to the power of r: the answer shows who is in it, and how often."""
    over_fewer = 0
    for seed in range(60):
        draw = random.Random(seed)
        driver = Driver(job_spec(4), state_dir=str(tmp_path / f"{seed}"))
        seats = dict(enumerate(driver.start()))
        heard: dict[int, tuple[dict[str, Any], int]] = {}
        tickets: dict[int, Ticket] = {}
        for _ in range(500):
            if len(heard) == len(seats):
                break
            rank = draw.choice(sorted(seats.keys() - heard.keys()))
            what = draw.random()
            if what < 0.1:
                driver.restart(*seats.values())
                tickets.clear()
            elif what < 0.15 and len(seats) > 1:
                driver.leave(seats.pop(rank))
                tickets.pop(rank, None)
            elif what < 0.3 and rank in tickets:
                tickets.pop(rank)  # its answer is lost
            else:
                tickets[rank] = bring(driver, seats[rank], {"x": 10**rank}, seq=1)
            for other, ticket in list(tickets.items()):
                if ticket.future.done() and ticket.future.exception(0) is None and draw.random() < 0.7:
                    heard[other] = answer(tickets.pop(other))
        assert len(heard) == len(seats), seed
        answers = list(heard.values())
        assert answers.count(answers[0]) == len(answers), seed
        (found, workers) = answers[0]
        digits = [int(digit) for digit in f"{found['x']:04}"]
        assert (max(digits), sum(digits)) == (1, workers), seed
        assert all(digits[3 - rank] for rank in heard), seed
        over_fewer += workers < 4
        driver.shard.close(keep=False)
    assert 5 < over_fewer < 60


def test_a_job_that_goes_back_ends_the_wait(tmp_path: Path) -> None:
    """No arrival counts any more; who calls again brings its numbers anew."""
    driver = Driver()
    a, _b = driver.start()
    ticket = bring(driver, a, {"x": 1})
    for waiting in driver.core.waiting.open():
        waiting.fail(RolledBack("the job goes back", timeline=1, checkpoint=""))
    driver.shard.withdraw(ticket)

    assert driver.core.barriers.missing("b") == 0b11
    assert isinstance(ticket.future.exception(0), RolledBack)


def test_a_reply_without_numbers_is_that_of_a_barrier() -> None:
    """Its generation, and nothing else."""
    driver = Driver(job_spec(1))
    (a,) = driver.start()

    assert driver.arrive(a).future.result(0) == control_pb2.BarrierReply(generation=0)
