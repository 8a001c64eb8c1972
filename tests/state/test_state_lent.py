"""Gradients that lie in the workers' memory: what is read where it lies, who applies the update, and what is copied in time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from shard_driver import SGD, Driver, Seat, job_spec

from psd.contract.errors import OutOfSpace
from psd.state.desks.transfers import Push
from psd.state.tickets import Ticket
from psd_core.arena import StoreFull

pytestmark = pytest.mark.usefixtures("no_small_blocks")


def lend(driver: Driver, seat: Seat, value: float, *, clock: int = 0, **header: Any) -> tuple[Push, Any]:
    """A push of the first block, lent, and its memory."""
    push = driver.begin_push(seat, clock, **header)
    return push, driver.lend_block(push, 0, value)


def read(driver: Driver, push: Push) -> Any:
    """What the answer to a push finds: numbers, or what it waits for."""
    exchange = driver.shard.exchange
    block = push.job.block(0)
    found = exchange.read(block, exchange.begin_answer(push))
    if isinstance(found, Ticket):
        return found
    numbers = found[1].parameter.tolist()
    block.unpin(found[1])
    return numbers


def test_a_complete_round_is_applied_by_whoever_reads_first():
    """The one who waits is told when the last gradient is there, and applies it; nothing is copied for that."""
    driver = Driver()
    a, b = driver.start()
    first, _ = lend(driver, a, 2.0)
    wait = read(driver, first)

    second, _ = lend(driver, b, 4.0)

    assert isinstance(wait, Ticket)
    assert wait.future.done()
    assert driver.version() == 0
    assert read(driver, first) == [-3.0] * 3
    assert driver.version() == 1
    assert read(driver, second) == [-3.0] * 3


@pytest.mark.parametrize("weights", [(1.0, 3.0), (2.0, 2.0), (0.0, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_lent_gradients_make_the_same_update_as_copied_ones(weights, reduction):
    """To the bit, whatever the weights."""
    found = []
    for is_lent in (True, False):
        driver = Driver(job_spec(2, reduction=reduction))
        seats = driver.start()
        for seat, weight, value in zip(seats, weights, (0.1, 0.7), strict=True):
            if is_lent:
                push, _ = lend(driver, seat, value, weight=weight)
            else:
                driver.push(seat, 0, value, weight=weight)
        found.append(read(driver, push) if is_lent else driver.values())

    assert found[0] == found[1]


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_call_that_ends_before_it_reads_takes_its_memory_with_it(leaver):
    """Before the memory changes the update is applied, or the gradient copied, whichever of the two calls ends."""
    driver = Driver()
    a, b = driver.start()
    calls = [lend(driver, a, 2.0), lend(driver, b, 4.0)]

    calls[leaver][0].loan.end()
    calls[leaver][1].fill(np.nan)

    assert read(driver, calls[1 - leaver][0]) == [-3.0] * 3


def test_the_last_call_to_end_applies_what_nobody_reads():
    """All workers hang up between their gradients and the answer: the round they completed is not left open."""
    driver = Driver()
    calls = [lend(driver, seat, value) for seat, value in zip(driver.start(), (2.0, 4.0), strict=True)]

    for push, memory in calls:
        push.loan.end()
        memory.fill(np.nan)

    assert (driver.version(), driver.values()) == (1, [-3.0] * 3)


def test_a_push_of_the_next_round_finds_the_complete_one_applied():
    """Nobody has read yet, but the worker goes on: its next gradient counts in the next round."""
    driver = Driver()
    a, b = driver.start()
    lend(driver, a, 2.0)
    lend(driver, b, 4.0)

    driver.push(a, 1, 1.0)

    assert (driver.version(), driver.values()) == (1, [-3.0] * 3)


def test_a_late_gradient_of_a_complete_round_is_late():
    """A quorum of one: the round is complete, if not applied, and takes nobody else."""
    driver = Driver(job_spec(2, quorum=1))
    a, b = driver.start()
    lend(driver, a, 2.0)

    reply = driver.push(b, 0, 4.0)

    assert (reply.blocks_late, driver.values()) == (1, [-2.0] * 3)


def test_a_lent_gradient_that_is_sent_again_counts_once():
    """The answer was lost: the second attempt finds its gradient in the round that is complete, and reads."""
    driver = Driver()
    a, b = driver.start()
    lend(driver, a, 2.0)
    lend(driver, b, 4.0)

    again, _ = lend(driver, b, 4.0)

    assert read(driver, again) == [-3.0] * 3
    assert driver.shard.exchange.end_push(again).blocks_duplicate == 1


def test_when_there_is_no_space_then_the_reader_is_told_and_nothing_is_lost(monkeypatch):
    """The arena is full while a complete round is read, and while the call ends; later there is room again."""
    driver = Driver()
    a, b = driver.start()
    first, _ = lend(driver, a, 2.0)
    second, memory = lend(driver, b, 4.0)
    arena = driver.core.job.arena
    with monkeypatch.context() as full:

        def spare(slot: int) -> Any:
            raise StoreFull("no space")

        full.setattr(arena, "spare", spare)
        with pytest.raises(OutOfSpace, match="block 0: no room"):
            read(driver, second)
        second.loan.end()
        memory.fill(np.nan)
        with pytest.raises(OutOfSpace, match="block 0: no room"):
            read(driver, first)

    assert read(driver, first) == [-3.0] * 3


def test_the_dedup_window_has_all_who_made_up_the_round():
    """After a kill -9 the arena knows both sessions, so that neither push counts again."""
    driver = Driver()
    a, b = driver.start()
    lend(driver, a, 2.0)
    second, _ = lend(driver, b, 4.0)
    read(driver, second)

    page = driver.core.job.blocks[0]._page

    assert [(int(page.sessions[seat.rank]), int(page.clocks[seat.rank])) for seat in (a, b)] == [(a.session, 1), (b.session, 1)]
    assert driver.push(a, 0, 2.0, scalars=SGD).blocks_duplicate == 1
