"""What is asked without a lock: each thing is looked at once, since it may be another one at the next look."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from shard_driver import Driver
from stored_job import begun, store, trained

from psd.checkpoint import CheckpointDirectory
from psd.contract.errors import NotDeclared, StateLost
from psd.state.aggregation.block import BlockState
from psd.state.aggregation.exact_rounds import ExactRound
from psd.state.aggregation.rounds import Contribution
from psd.state.life import Life


class GoneAtASecondLook(BlockState):
    """A block whose open round is closed by another call between two looks at it."""

    _round = property(lambda self: self.__dict__["rounds"].pop(0))


@pytest.mark.usefixtures("no_small_blocks")
def test_a_round_that_closes_while_a_reader_asks_for_it_is_no_defect():
    """Another thread applies the round that is due just when this one has seen it."""
    driver = Driver()
    a, b = driver.start()
    block = driver.core.job.blocks[0]
    for seat in (a, b):
        driver.lend_block(driver.begin_push(seat, 0), 0, 1.0)
    due = block._round
    assert due.is_due

    del block.__dict__["_round"]
    opened = block._open_round(1)
    block.__dict__["rounds"] = [due, opened, opened]
    block.__class__ = GoneAtASecondLook

    assert block.read(1) is None


class GoneAtOnce:
    """What is there at the first look and never again."""

    def __init__(self, value):
        self._found = [value]

    def __get__(self, _instance, _owner):
        return self._found.pop() if self._found else None


@pytest.mark.parametrize(("name", "ask"), [("job", lambda core: core.declared()), ("membership", lambda core: core.members)])
def test_a_job_that_is_given_up_while_somebody_asks_for_it_is_none_or_whole(monkeypatch, name, ask):
    """A shard that goes back to a checkpoint may hold no job for a while."""
    driver = Driver()
    driver.start()
    value = getattr(driver.core, name)
    monkeypatch.delattr(driver.core, name)
    monkeypatch.setattr(type(driver.core), name, GoneAtOnce(value), raising=False)

    assert ask(driver.core) is value
    with pytest.raises(NotDeclared):
        ask(driver.core)


def test_a_shard_whose_job_is_given_up_is_asked_whether_it_trains(monkeypatch):
    """By the lease clock, which must not end by that."""
    driver = Driver()
    driver.start()
    value = driver.core.job
    monkeypatch.delattr(driver.core, "job")
    monkeypatch.setattr(type(driver.core), "job", GoneAtOnce(value), raising=False)

    assert driver.shard.schedule.is_training
    assert not driver.shard.schedule.is_training


class FreshArrays:
    """BlockAccumulators that keep nothing."""

    def lend(self):
        return np.empty(3)

    def give_back(self, array):
        pass


@pytest.mark.usefixtures("no_small_blocks")
def test_who_is_missing_from_a_round_can_be_asked_while_gradients_come_and_go():
    """Status asks without the block's lock."""
    driver = Driver()
    driver.start()
    block = driver.core.job.blocks[0]
    workers = 200
    waited = (1 << workers) - 1
    setting = replace(block._round._setting, accumulators=FreshArrays(), members=SimpleNamespace(waited_in=lambda _: waited))
    round_ = ExactRound(0, setting)
    done = threading.Event()
    faults: list[Exception] = []

    def ask() -> None:
        while not done.is_set():
            try:
                round_.missing()
            except RuntimeError as error:
                faults.append(error)
                return

    asking = threading.Thread(target=ask)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        asking.start()
        for _ in range(10):
            for rank in range(workers):
                round_.take(Contribution(rank, 1, 0, 1.0, np.ones(3), None, ()))
            round_.end()
    finally:
        done.set()
        sys.setswitchinterval(interval)
        asking.join()

    assert faults == []


def test_a_lost_round_that_another_worker_has_seen_to_meanwhile_takes_nobody_back_again(tmp_path):
    """The lease clock has seen that the shard must go back, and waits for the lock under which it just does."""
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"))
    name = store(trained("exact", 2, 1), directory)
    (driver,) = begun(directory, name, "exact", 2, 1)
    core, incarnation = driver.core, driver.core.incarnation
    core.become(Life.SERVING)
    core._on_lost(StateLost("worker 0's"))

    class Taken:
        """The lock, which another call has had until now."""

        def __enter__(self):
            core.life.now = Life.SERVING

        def __exit__(self, *_):
            pass

    core.job_lock, lock = Taken(), core.job_lock
    driver.shard.restoration.give_up_lost_round()
    core.job_lock = lock

    assert (core.is_tentative, core.timeline, core.incarnation) == (False, 1, incarnation)
