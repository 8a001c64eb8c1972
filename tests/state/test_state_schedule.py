"""When shard 0 announces cuts, and how many may wait to be written."""

from __future__ import annotations

import inspect

import pytest
from shard_driver import Driver, job_spec

from psd.checkpoint import common_cut
from psd.state.cuts.cuts import UNWRITTEN_MAX
from psd.state.shard import Shard
from psd.state.tickets import Ticket
from psd.v1 import data_pb2


def started(tmp_path, **config):
    driver = Driver(job_spec(1, blocks=2, mode=config.pop("mode", "sync")), checkpoint_dir=str(tmp_path), **config)
    return driver, driver.shard.cuts.take_part(), driver.start()[0]


def steps(done):
    return [done.get_nowait().cut.step for _ in range(done.qsize())]


def test_by_steps_a_cut_is_announced_some_rounds_ahead_and_once(tmp_path):
    """The replies to pushes name it; of the rounds in between none announces it again."""
    driver, done, a = started(tmp_path, checkpoint_steps=5)

    named = [[cut.step for cut in driver.push(a, clock, 1.0).cuts] for clock in range(6)]

    assert named == [[5], [5], [5, 10], [5, 10], [5, 10], [5, 10]]
    assert steps(done) == [5]


@pytest.mark.parametrize(("mode", "ahead"), [("sync", 3), ("async", 0)])
def test_by_time_a_cut_is_announced_when_the_job_has_moved_on(tmp_path, mode, ahead):
    """A tick is enough; of a job that stands still there is no second one."""
    driver, _, a = started(tmp_path, checkpoint_secs=60, mode=mode)
    driver.push(a, 0, 1.0)
    assert driver.shard.cuts.latest() == []

    driver.time.value += 60
    driver.push(a, 1, 1.0)
    driver.time.value += 60
    driver.shard.tick()

    assert [cut.step for cut in driver.shard.cuts.latest()] == [2 + ahead]


def test_no_cut_is_announced_while_those_before_are_not_written(tmp_path):
    """The store sets the pace; what was due meanwhile comes late, not twice."""
    driver, done, a = started(tmp_path, checkpoint_steps=2, mode="async")
    driver.push(a, 0, 1.0)
    driver.push(a, 1, 1.0)
    driver.choose(*driver.shard.cuts.latest())
    snapshot = done.get_nowait()
    for clock in range(2, 7):
        driver.push(a, clock, 1.0)
    assert (snapshot.cut.step, done.qsize()) == (2, 0)

    driver.shard.cuts.release(snapshot)
    driver.push(a, 7, 1.0)
    driver.choose(*driver.shard.cuts.latest())

    assert steps(done) == [8]


def test_a_cut_that_comes_while_others_wait_to_be_written_is_missed_and_pins_nothing(tmp_path):
    """Each that waits may hold another version of every block."""
    driver, done, _ = started(tmp_path, mode="async")

    for number in range(UNWRITTEN_MAX + 1):
        driver.learn_cuts([data_pb2.Cut(id=f"c{number}", step=number)])
    driver.choose(*driver.shard.cuts.latest())

    found = [done.get_nowait() for _ in range(done.qsize())]
    assert [snapshot.why_missed.partition(":")[0] for snapshot in found] == ["", "", "earlier ones are not written yet"]
    assert [len(snapshot.pages) for snapshot in found] == [2, 2, 0]
    assert [block._page.pins for block in driver.core.job.blocks.values()] == [3, 3]


def test_nobody_outside_is_called_back():
    """A shard decides and returns: what the rim passes to it are requests, queues and futures, never what a lock might be held
    over. Only its clocks, and a test's crash points, are given to it to call."""
    desks = {type(desk) for name, desk in vars(Driver().shard).items() if not name.startswith("_")}
    kinds = [Shard, Ticket, *(kind for kind in desks if kind.__module__.startswith("psd.state."))]
    taking = [
        f"{kind.__name__}.{name}"
        for kind in kinds
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
        if any("Callable" in str(parameter.annotation) for parameter in inspect.signature(method).parameters.values())
    ]
    given = [name for name, found in inspect.signature(Shard).parameters.items() if "Callable" in str(found.annotation)]

    assert {"Admission", "Cuts", "CutSchedule", "Exchange"} <= {kind.__name__ for kind in kinds}
    assert (taking, given) == ([], ["now", "wall", "crash_point"])


def orders(driver):
    return [cut.order for cut in driver.shard.cuts.latest()]


def test_without_rounds_the_slowest_may_be_further_back_than_it_was_and_cuts_are_announced_all_the_same(tmp_path):
    """Multiples are counted from there; by time it is enough that anybody has moved."""
    driver = Driver(job_spec(2, mode="async"), checkpoint_dir=str(tmp_path), checkpoint_steps=5, checkpoint_secs=60)
    done = driver.shard.cuts.take_part()
    a, b = driver.start()
    driver.push(a, 0, 1.0)
    driver.leave(a)
    for clock in range(20):
        driver.push(b, clock, 1.0)
        if clock == 10:
            driver.choose(*driver.shard.cuts.latest())
            driver.shard.cuts.release(done.get_nowait())
    known = {cut.id for cut in driver.shard.cuts.latest()}
    driver.leave(b)
    driver.shard.cuts.release(done.get_nowait())

    a = driver.join(0)
    driver.declare(a)
    for clock in range(a.clock, 5):
        driver.push(a, clock, 1.0)

    (by_steps,) = [cut for cut in driver.shard.cuts.latest() if cut.id not in known]
    driver.choose(by_steps)
    driver.shard.cuts.release(done.get_nowait())
    driver.time.value += 60
    driver.push(a, 5, 1.0)
    assert (a.clock, by_steps.step, driver.shard.cuts.latest()[-1].step) == (1, 5, 6)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_shard_that_was_restarted_knows_which_cut_was_the_last(tmp_path, mode):
    """Or it would name another one of the same step; so with rounds, and by what all shards agree on at the end."""
    driver = Driver(job_spec(1, mode=mode), state_dir=str(tmp_path / "state"), checkpoint_dir=str(tmp_path / "stored"))
    driver.shard.cuts.take_part()
    (a,) = driver.start()
    driver.shard.schedule.announce("c1")
    before = orders(driver)
    driver.choose(*driver.shard.cuts.latest())
    last = common_cut({0: driver.shard.schedule.end_note()}, driver.layout)
    driver.shard.schedule.take_end(last)

    driver.restart(a)
    driver.shard.cuts.take_part()
    driver.shard.schedule.announce("c2")

    assert before[0] < last.order < orders(driver)[0]


def test_cuts_of_one_step_are_told_apart(tmp_path):
    """In a round that stands still, say; its vectors may have changed."""
    driver, _, _ = started(tmp_path)

    driver.shard.schedule.announce("b1")
    driver.shard.schedule.announce("a2")

    assert [(cut.step, cut.order) for cut in driver.shard.cuts.latest()] == [(3, 0), (3, 1)]
