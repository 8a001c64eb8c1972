"""Cuts of jobs without rounds: who says when positions are chosen, which pushes are in, which are held, and when a cut is given
up."""

from __future__ import annotations

from queue import SimpleQueue

import pytest
from shard_driver import Driver, job_spec, tables_spec

from psd.contract.errors import SessionFenced
from psd.state.cuts.positions import HOLD_S_MAX
from psd.state.cuts.snapshots import Snapshot
from psd.state.desks.cut_schedule import AGAIN_S
from psd.v1 import data_pb2

CUT = data_pb2.Cut(id="c1", step=0, created_at=5.0)


def started(world_size=2, *, mode="async", **spec):
    """A shard with two blocks, its workers, and the queue of what is to be stored."""
    driver = Driver(job_spec(world_size, blocks=2, mode=mode, **spec))
    done = driver.shard.cuts.take_part()
    return driver, driver.start(), done


def say(driver, seat, *, position=None, ready=False):
    """What a heartbeat of a worker says of the cut."""
    cut = data_pb2.Cut(id="c1", ready=ready, position=position)
    driver.heartbeat(seat, driver.worker(seat.rank).clock)
    driver.shard.learn(seat.caller, [cut])


def begin(driver, seat, clock, position=None):
    """Begin a push, with the worker's position if it has one; what it waits for."""
    header = driver.header(seat, clock)
    if position is not None:
        header.cuts.add(id="c1", position=position)
    push = driver.shard.exchange.begin_push(header)
    return push, driver.shard.exchange.hold(push)


def finish(driver, push):
    for block in (0, 1):
        assert driver.push_block(push, block, 1.0) is None
    driver.shard.exchange.end_push(push)


@pytest.mark.parametrize("mode", ["async", "ssp:2"])
def test_a_cut_has_the_pushes_before_each_workers_position_and_none_beyond(mode):
    """One that is in the midst is waited for; one that is beyond is held until then, and goes on."""
    driver, (a, b), done = started(mode=mode)
    driver.push(a, 0, 1.0, client_state=b"a after 0")
    half, _ = begin(driver, b, 0)
    driver.push_block(half, 0, 1.0)
    driver.learn_cuts([CUT])

    say(driver, a, position=1)
    say(driver, b, position=1)
    beyond, ticket = begin(driver, a, 1, position=1)
    assert (done.empty(), ticket.future.done()) == (True, False)
    driver.push_block(half, 1, 1.0)
    driver.shard.exchange.end_push(half)

    snapshot = done.get_nowait()
    assert ticket.future.done()
    assert driver.shard.exchange.hold(beyond) is None
    finish(driver, beyond)
    assert {index: page.version for index, page in snapshot.pages.items()} == {0: 2, 1: 2}
    assert (snapshot.cut.step, snapshot.worker_clocks, snapshot.client_states) == (1, {0: 1, 1: 1}, {0: b"a after 0"})


def test_positions_are_asked_for_when_every_live_worker_has_heard_from_all_shards():
    """Shard 0 says so, in its replies; until then nobody chooses, and nobody is held."""
    driver, (a, b), _ = started()
    driver.learn_cuts([CUT])

    def told():
        return [(cut.waits, cut.ready) for cut in driver.shard.cuts.latest()]

    say(driver, a, ready=True)
    assert told() == [(True, False)]
    assert begin(driver, a, 0)[1] is None
    say(driver, b, ready=True)
    assert told() == [(True, True)]
    say(driver, a, position=0)
    say(driver, b, position=0)
    assert told() == [(False, False)]


def test_of_two_cuts_one_after_the_other_is_asked_for_and_the_later_one_has_the_greater_order():
    """Whoever chooses a position in both chooses no earlier one in the second."""
    driver, (a, b), done = started()
    second = data_pb2.Cut(id="a2", created_at=5.0)
    driver.learn_cuts([CUT, second])

    def hear_of_both():
        for seat in (a, b):
            driver.shard.learn(seat.caller, [data_pb2.Cut(id=cut.id, ready=True) for cut in (CUT, second)])
        return [(cut.id, cut.order) for cut in driver.shard.cuts.latest() if cut.ready]

    assert hear_of_both() == [("c1", 1)]
    driver.choose(CUT)
    assert hear_of_both() == [("a2", 2)]
    driver.choose(second)

    assert [done.get_nowait().cut.order for _ in range(2)] == [1, 2]
    assert driver.core.job.arena.word("cut_order") == 2


def test_another_shard_has_the_order_from_the_workers():
    """So that all parts have one name, and whoever announces the next cut knows of it."""
    driver = Driver(job_spec(1, blocks=2, mode="async"), shard=1, shards=2)
    done = driver.shard.cuts.take_part()
    seat = driver.join(0, session=1)
    driver.declare(seat)
    driver.initialize(seat)
    driver.learn_cuts([CUT])

    driver.shard.learn(seat.caller, [data_pb2.Cut(id="c1", position=0, order=7)])

    assert done.get_nowait().cut.order == driver.core.job.arena.word("cut_order") == 7


def test_another_shard_than_the_first_asks_nobody():
    """It would not know of workers that the first one knows of."""
    driver = Driver(job_spec(1, blocks=2, mode="async"), shard=1, shards=2)
    driver.shard.cuts.take_part()
    seat = driver.join(0, session=1)
    driver.declare(seat)
    driver.initialize(seat)
    driver.learn_cuts([CUT])

    say(driver, seat, ready=True)

    assert [(cut.waits, cut.ready) for cut in driver.shard.cuts.latest()] == [(True, False)]


@pytest.mark.parametrize("end", ["leaves", "expires", "is kicked"])
def test_a_worker_that_is_gone_is_not_waited_for(end):
    """What counts of one that has left is what it has finished; of another one, what has counted."""
    driver, (a, b), done = started()
    driver.push(b, 0, 1.0)
    driver.learn_cuts([CUT])
    say(driver, a, position=0)
    _, ticket = begin(driver, a, 0, position=0)

    if end == "leaves":
        driver.leave(b)
    elif end == "expires":
        driver.time.value += 1
        driver.worker(1).last_seen -= 2 * driver.config.lease_s
        driver.shard.tick()
    else:
        driver.shard.admission.kick(1, b.session)

    assert ticket.future.done()
    assert done.get_nowait().worker_clocks == ({0: 0, 1: 1} if end == "leaves" else {0: 0})


def test_a_worker_that_joins_anew_chooses_again():
    """Its earlier position may be no place of its new session."""
    driver, (a, b), done = started()
    driver.push(a, 0, 1.0)
    driver.push(b, 0, 1.0)
    driver.learn_cuts([CUT])
    say(driver, a, position=1)
    _, held = begin(driver, a, 1, position=1)
    again = driver.join(0)
    driver.declare(again)
    with pytest.raises(SessionFenced):
        held.future.result(0)

    say(driver, b, position=1)
    assert done.empty()
    say(driver, again, position=1)

    assert done.get_nowait().worker_clocks == {0: 1, 1: 1}


def test_a_cut_that_holds_pushes_for_long_is_given_up_and_tried_again(tmp_path):
    """Nobody waits for longer; the next one may find all workers awake."""
    driver = Driver(job_spec(2, blocks=2, mode="async"), checkpoint_dir=str(tmp_path), checkpoint_steps=1)
    done = driver.shard.cuts.take_part()
    a, b = driver.start()
    driver.push(a, 0, 1.0)
    driver.push(b, 0, 1.0)
    (first,) = driver.shard.cuts.latest()
    header = driver.header(a, 1)
    header.cuts.add(id=first.id, position=1)
    ticket = driver.shard.exchange.hold(driver.shard.exchange.begin_push(header))
    assert ticket.kind.name == "CUT"
    assert driver.shard.missing_for(ticket) == [driver.worker(1)]

    driver.advance(HOLD_S_MAX + 1)

    assert ticket.future.done()
    driver.heartbeat(a), driver.heartbeat(b)
    driver.advance(AGAIN_S - HOLD_S_MAX)
    given_up = done.get_nowait()
    assert (given_up.cut.id, "workers [1]" in given_up.why_missed, given_up.pages) == (first.id, True, {})
    names = {cut.id: cut.waits for cut in driver.shard.cuts.latest()}
    assert names[first.id] is False
    assert list(names.values()) == [False, True]
    assert [block._page.pins for block in driver.core.job.blocks.values()] == [1, 1]


def test_a_cut_that_another_shard_cannot_have_is_given_up_and_tried_again(tmp_path):
    """Also one whose part is taken here: there will be no such checkpoint."""
    driver = Driver(job_spec(1, blocks=2, mode="async"), checkpoint_dir=str(tmp_path), checkpoint_steps=1)
    done = driver.shard.cuts.take_part()
    (a,) = driver.start()
    driver.push(a, 0, 1.0)
    (first,) = driver.shard.cuts.latest()
    driver.choose(first)
    driver.shard.cuts.release(done.get_nowait())

    driver.shard.learn(a.caller, [data_pb2.Cut(id=first.id, given_up=True)])
    driver.shard.learn(a.caller, [data_pb2.Cut(id="other", given_up=True)])

    assert [(cut.id, cut.given_up) for cut in driver.shard.cuts.latest()] == [(first.id, True)]
    driver.heartbeat(a)
    driver.advance(AGAIN_S)
    assert [cut.given_up for cut in driver.shard.cuts.latest()] == [True, False]


def test_a_job_of_one_worker_takes_its_cut_with_its_next_message():
    """Nobody is held for it, nor it for anybody: it chooses at once, and is asked for no word that it is ready."""
    driver, (a,), done = started(world_size=1)
    driver.push(a, 0, 1.0)
    driver.learn_cuts([CUT])
    assert [(cut.waits, cut.ready, cut.order) for cut in driver.shard.cuts.latest()] == [(True, True, 1)]

    push, held = begin(driver, a, 1, position=1)

    assert (done.get_nowait().worker_clocks, held) == ({0: 1}, None)
    finish(driver, push)


def test_a_push_that_a_cut_is_to_have_passes_the_staleness_bound():
    """Those that it would wait for may be held for the very cut."""
    driver, (a, b), done = started(mode="ssp:0")
    driver.push(a, 0, 1.0)
    push, _ = begin(driver, a, 1)
    gate = driver.shard.exchange.gate(push, 1)
    assert not gate.future.done()
    driver.learn_cuts([CUT])
    say(driver, b, position=0)
    say(driver, a, position=2)

    assert gate.future.done()
    assert driver.shard.exchange.gate(push, 1) is None
    finish(driver, push)

    assert done.get_nowait().worker_clocks == {0: 2, 1: 0}


def test_a_shard_that_comes_back_takes_no_part_in_a_cut_that_lies_behind(tmp_path):
    """The others took it long ago; workers still carry it."""
    driver = Driver(job_spec(1, blocks=2, mode="async"), state_dir=str(tmp_path))
    (a,) = driver.start()
    for clock in range(3):
        driver.push(a, clock, 1.0)
    driver.restart(a)
    done = driver.shard.cuts.take_part()

    driver.learn_cuts([CUT])
    say(driver, a, position=1)

    missed = done.get_nowait()
    assert (missed.why_missed, missed.pages) == ("worker 0 is at step 3, beyond the cut's 1", {})


def test_a_readers_cut_is_told_to_workers_and_begun_nowhere_else():
    """A shard that its call has not reached yet stores nothing for it."""
    driver, (a, _), stored = started()
    read: SimpleQueue[Snapshot | None] = SimpleQueue()
    request = data_pb2.ReadRequest(run_id=a.caller.run_id, layout_digest=driver.layout.digest, cut=CUT)
    snapshot = driver.shard.begin_read(request, read)
    (told,) = driver.shard.cuts.latest()
    assert (told.is_read, told.waits) == (True, True)

    other, (c, _), other_stored = started()
    other.shard.learn(c.caller, [told])
    assert (other.shard.cuts.latest(), other_stored.empty()) == ([], True)

    driver.choose(CUT)
    assert read.get_nowait() is snapshot
    assert snapshot.positions.digest != 0
    driver.shard.cuts.abandon(snapshot)
    assert (stored.empty(), driver.shard.cuts.latest()) == (True, [])


def test_rows_are_cut_at_the_same_positions():
    """Their snapshots begin when the pages are pinned."""
    driver = Driver(tables_spec(1, mode="async", blocks=1))
    done = driver.shard.cuts.take_part()
    (a,) = driver.start()
    driver.push_rows(a, 0, {0: ([1], [1.0])}, client_state=b"at 0")
    driver.learn_cuts([CUT])
    driver.choose(CUT, position=2)
    assert done.empty()

    driver.push_rows(a, 1, {0: ([1], [1.0])}, client_state=b"at 1")
    driver.push_rows(a, 2, {0: ([1], [1.0])}, client_state=b"at 2")

    snapshot = done.get_nowait()
    (row,) = [row for batch in snapshot.tables[0] for row in batch.rows]
    assert (row[0], snapshot.cut.step, snapshot.client_states) == (-2.0, 2, {0: b"at 1"})
    driver.shard.cuts.release(snapshot)
