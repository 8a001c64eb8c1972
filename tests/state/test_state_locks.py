"""The rules of the locks, which every test checks (tests/checked_locks.py): a broken one is noticed; the page that has them."""

from __future__ import annotations

import re

import checked_locks
import pytest
from shard_driver import Driver
from source_tree import ROOT

from psd.state import locks
from psd.state.locks import Level


@pytest.fixture
def broken():
    """The rules that the test itself breaks."""
    yield checked_locks.broken
    checked_locks.broken.clear()


def test_a_lock_above_one_that_is_held_is_refused(broken):
    """Two threads that take them in two orders wait for each other, some day."""
    driver = Driver()
    driver.start()
    block = driver.core.job.blocks[0]

    with block.lock, pytest.raises(AssertionError, match="SHARD 0 is taken by a thread that holds BLOCK 0"):
        driver.core.lock.acquire()
    assert broken
    with driver.core.lock, block.lock:
        pass


def test_locks_of_one_level_are_refused_together_but_blocks_in_their_order(broken):
    """As Job.pin_all takes them."""
    first, second = (locks.new(Level.BLOCK, index) for index in range(2))
    leaves = [locks.new(Level.LEAF) for _ in range(2)]

    with first, second:
        pass
    for held, taken in ((second, first), leaves):
        with held, pytest.raises(AssertionError, match="is taken by a thread that holds"):
            taken.acquire()
    assert len(broken) == 2


def test_a_method_that_needs_a_lock_is_refused_without_it(broken):
    """Wherever psd calls it; here a shard's core, whose own method is called as it must not be."""
    driver = Driver()
    driver.start()

    with pytest.raises(AssertionError, match=r"Barriers\.on_session_end is called by psd\.state\.core without the lock SHARD"):
        type(driver.core).on_session_end(driver.core, driver.core.members.workers[0])
    assert broken


def test_the_page_on_locks_has_them_in_their_order():
    """Each with what it is for."""
    page = (ROOT / "docs" / "design" / "life-of-a-push.md").read_text()

    assert re.findall(r"^\| ([A-Z]+) \|", page, re.MULTILINE) == [level.name for level in Level]
