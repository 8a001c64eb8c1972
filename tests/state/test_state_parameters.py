"""Parameters that all workers load in the midst of a job: who sets them, who waits, what a block makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from full_disk import full_disk
from shard_driver import Driver, Seat, job_spec

from psd.contract.errors import InvalidRequest, OutOfSpace
from psd.state.tickets import Ticket
from psd.v1 import control_pb2, data_pb2
from psd_core.arena import StoreFull


def set_parameters(driver: Driver, seat: Seat, value: float, *, clock: int = 0, seq: int = 1, but: int = -1) -> None:
    request = data_pb2.ParametersRequest(caller=seat.caller, layout_digest=driver.layout.digest, clock=clock, seq=seq)
    blocks = driver.layout.blocks_of(0)
    for block in [blocks[0] if block.index == but else block for block in blocks]:
        request.parameters.add(block=block.index, payload=np.full(block.length, value, block.dtype).tobytes())
    driver.shard.parameters.set(request)


def load(driver: Driver, seat: Seat, *, digest: int = 0, seq: int = 1, **fields: Any) -> Ticket | None:
    return driver.shard.parameters.load(
        control_pb2.LoadRequest(caller=seat.caller, digest=bytes([digest] * 16), seq=seq, **fields)
    )


def outcome(ticket: Ticket | None) -> bool | None:
    """True: sets the values. False: they are set. None: waits."""
    return False if ticket is None else ticket.future.result() if ticket.future.done() else None


def test_set_then_values_survive_the_shards_restart_and_versions_stay(tmp_path):
    """The next round is the one that it was."""
    driver = Driver(state_dir=str(tmp_path))
    seats = driver.start()
    for seat in seats:
        driver.push(seat, 0, 1.0)

    set_parameters(driver, seats[0], 7, clock=1)
    driver.restart(*seats)
    assert (driver.values(), driver.version()) == ([7, 7, 7], 1)
    for seat in seats:
        driver.push(seat, 1, 2.0)
    assert driver.values() == [5, 5, 5]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_set_when_the_call_is_sent_again_late_then_no_update_is_lost(mode):
    """A gradient that came after it counts on top."""
    driver = Driver(job_spec(1, mode=mode))
    (seat,) = driver.start()
    set_parameters(driver, seat, 7)
    driver.push(seat, 0, 1.0)

    set_parameters(driver, seat, 7)
    assert driver.values() == [6, 6, 6]


def test_set_when_there_is_room_for_some_blocks_alone_then_none_is_set():
    """Nor is one that stands twice in the call waited for."""
    driver = Driver(job_spec(1, blocks=6))
    (seat,) = driver.start()
    arena, spares = driver.core.job.arena, []
    with full_disk():
        with pytest.raises(StoreFull):
            while True:
                spares.append(arena.spare(0))
        arena.discard(spares.pop())
        with pytest.raises(OutOfSpace, match="block 1: no room"):
            set_parameters(driver, seat, 7)
        assert [driver.values(block)[0] for block in range(6)] == [0] * 6
    for page in spares:
        arena.discard(page)
    set_parameters(driver, seat, 7, seq=2)
    set_parameters(driver, seat, 9, seq=3, but=5)

    assert [driver.values(block)[0] for block in range(6)] == [9, 9, 9, 9, 9, 7]


def test_load_then_one_sets_and_the_others_wait_for_it():
    """Whose answer is lost is answered again."""
    driver = Driver(job_spec(3))
    first, second, third = driver.start()
    tickets = [load(driver, seat) for seat in (third, second)]
    assert [outcome(ticket) for ticket in tickets] == [None, None]
    assert outcome(load(driver, first)) is True
    assert outcome(load(driver, first)) is True  # its answer was lost
    assert [outcome(ticket) for ticket in tickets] == [None, None]

    load(driver, first, is_set=True)
    load(driver, first, is_set=True)
    assert [outcome(ticket) for ticket in tickets] == [False, False]
    assert outcome(load(driver, second)) is False


def test_load_when_the_chosen_worker_dies_then_another_one_sets_and_its_successor_waits():
    """Nobody waits for the dead one, and nothing is set twice."""
    driver = Driver(job_spec(3))
    first, second, third = driver.start()
    tickets = {seat.rank: load(driver, seat) for seat in (first, second, third)}
    driver.leave(first, failed=True)
    assert (outcome(tickets[1]), outcome(tickets[2])) == (True, None)

    successor = driver.join(0)
    driver.declare(successor)
    waiting = load(driver, successor)
    load(driver, second, is_set=True)
    assert (outcome(waiting), outcome(tickets[2])) == (False, False)


def test_load_when_the_shard_is_restarted_after_it_then_is_not_done_twice(tmp_path):
    """Some workers have heard, and go on: nobody else comes."""
    driver = Driver(state_dir=str(tmp_path))
    first, second = driver.start()
    load(driver, second)
    load(driver, first)
    load(driver, first, is_set=True)

    driver.restart(first, second)
    assert outcome(load(driver, second)) is False
    assert outcome(load(driver, second, digest=1, seq=2)) is None


def test_loads_at_one_clock_when_a_worker_has_died_amid_them_then_its_successor_waits_for_nobody(tmp_path):
    """It makes all of them again, and those of before it have gone on. The last load alone was known, so it waited in vain."""
    driver = Driver(state_dir=str(tmp_path))
    first, second = driver.start()
    load(driver, second)
    load(driver, first)
    load(driver, first, is_set=True)
    driver.leave(second, failed=True)
    assert outcome(load(driver, first, digest=1, seq=2, resets_slots=True)) is True
    load(driver, first, digest=1, seq=2, resets_slots=True, is_set=True)

    successor = driver.join(1)
    driver.declare(successor)
    for _ in range(2):
        assert outcome(load(driver, successor)) is False
        assert outcome(load(driver, successor, digest=1, seq=2, resets_slots=True)) is False
        driver.restart(first, successor)
    assert outcome(load(driver, successor, seq=3, resets_slots=True)) is None


def test_loads_of_other_values_at_one_clock_when_a_worker_has_died_after_them_then_its_successor_makes_each_again():
    """As a program does that trains with an average of its parameters, evaluates, and goes on with its own. The last load of a
    kind alone was known, so the successor waited for the first one, and the others for its gradient."""
    driver = Driver(job_spec(2))
    first, second = driver.start()
    for seq, digest in enumerate([1, 2, 1, 3], 1):
        waits = load(driver, second, digest=digest, seq=seq)
        assert outcome(load(driver, first, digest=digest, seq=seq)) is True, "what was loaded before is loaded again"
        load(driver, first, digest=digest, seq=seq, is_set=True)
        assert outcome(waits) is False
    driver.leave(second, failed=True)

    successor = driver.join(1)
    driver.declare(successor)
    for seq, digest in enumerate([1, 2, 1, 3], 1):
        assert outcome(load(driver, successor, digest=digest, seq=seq)) is False
        assert outcome(load(driver, successor, digest=digest, seq=seq)) is False, "its answer was lost"
    assert outcome(load(driver, successor, digest=2, seq=5)) is None, "that is a new one"
    assert outcome(load(driver, first, digest=2, seq=5)) is True


def test_load_of_other_values_than_those_that_wait_have_then_is_refused():
    """Else each worker would believe that the job has its own."""
    driver = Driver()
    first, second = driver.start()
    waiting = load(driver, first)
    ticket = load(driver, second, digest=1)
    assert ticket is not None
    with pytest.raises(InvalidRequest, match="worker 1 was given other values to load than worker 0"):
        ticket.future.result(0)
    assert outcome(waiting) is None
