"""An arena that is replaced or closed while somebody holds something of it: of every kind, in every way that there is."""

from __future__ import annotations

import gc
import weakref

import pytest
from held_pages import BLOCKS, KINDS, SIZE, Holder, OpenCutPages
from shard_driver import Driver
from stored_job import STEP, Cluster, store

from psd.checkpoint import CheckpointDirectory
from psd.contract.config import ConfigError
from psd.contract.errors import StateLost


@pytest.fixture
def directory(tmp_path):
    return CheckpointDirectory(str(tmp_path / "checkpoints"))


@pytest.fixture(autouse=True)
def _blocks_are_large(request):
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and getattr(callspec.params.get("kind"), "is_large", False):
        request.getfixturevalue("no_small_blocks")


def stored(kind, directory, **config):
    """A shard at STEP, its workers, and its checkpoint."""
    driver = Driver(kind.spec, run_id="mine", directory=directory, **config)
    seats = driver.start(value=7.0)
    cluster = Cluster("exact" if kind.spec.aggregation == "exact" else "sync", [driver], [[seat] for seat in seats])
    for clock in range(STEP):
        for seat in seats:
            driver.push(seat, clock, 1.0)
        if cluster.mode == "exact":
            cluster.close_round(clock)
    return driver, seats, store(cluster, directory)


def file_of(driver):
    """What the arena's file is, and takes."""
    status = (driver.core.storage.directory / "arena").stat()
    return status.st_ino, status.st_size, status.st_blocks


def pages_of(driver):
    """Everything in the arena."""
    job = driver.core.declared()
    pages = [job.arena.current(slot) for slot in range(BLOCKS)]
    arrays = [[*p.arrays, p.steps, p.sessions, p.clocks] for p in pages]
    return [(page.version, [array.tobytes() for array in each]) for page, each in zip(pages, arrays, strict=True)]


def roll_back(driver, name, _seats):
    driver.rollback(name, 1)


def lose_a_round(driver, name, _seats):
    driver.core._on_lost(StateLost("worker 0's gradient is gone"))
    driver.advance(1)
    assert driver.core.is_tentative
    driver.rollback(name, 1)


def declare_otherwise(driver, _name, seats):
    """Possible only before anybody has declared the job that was restored; see `Restored`."""
    fields = {name: getattr(driver.spec, name) for name in ("world_size", "tensors", "groups", "consistency")}
    driver.declare(seats[0], type(driver.spec)(**fields, aggregation=driver.spec.aggregation, reduction="sum"))


WHERE = ["in memory", "in --state-dir"]
REPLACED = [
    (kind, replace, WHERE[(way + number) % 2])
    for way, replace in enumerate([roll_back, lose_a_round, declare_otherwise])
    for number, kind in enumerate(KINDS)
]
"""Each kind in each way; each kind, and each way, in either place."""


@pytest.mark.parametrize(("kind", "replace", "where"), REPLACED)
def test_what_is_held_of_an_arena_that_is_replaced_stays_and_is_given_back_without_a_trace(
    kind, replace, where, directory, tmp_path
):
    """The new arena's file is not touched, neither its length nor its holes, and its pages hold the checkpoint's numbers."""
    config = {"state_dir": str(tmp_path / "state")} if where == "in --state-dir" else {}
    driver, seats, name = stored(kind, directory, **config)
    if replace is declare_otherwise:
        driver.rollback(name, 1)
        seats = [driver.join(rank) for rank in range(driver.spec.world_size)]
    holder: Holder = kind(driver, seats)
    before, old = holder.seen(), driver.core.job

    replace(driver, name, seats)

    assert driver.core.job is not old
    file, pages = file_of(driver), pages_of(driver)
    assert holder.seen() == before
    holder.give_back()
    assert (file_of(driver), pages_of(driver)) == (file, pages)
    assert all(set(driver.values(index)) == {7.0 - STEP} for index in range(BLOCKS))
    assert len(driver.values()) == SIZE
    if where == "in --state-dir":
        driver.restart(directory=directory)
        assert pages_of(driver) == pages


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_held_of_an_arena_that_was_removed_stays_and_is_given_back_without_a_trace(kind, directory, tmp_path):
    """The job is done; the next one begins in the same directory."""
    config = {"state_dir": str(tmp_path / "state")}
    driver, seats, _ = stored(kind, directory, **config)
    holder = kind(driver, seats)
    before = holder.seen()

    driver.shard.close(keep=False)
    successor = Driver(kind.spec, run_id="mine", **config)
    successor.start(value=3.0)

    file, pages = file_of(successor), pages_of(successor)
    assert holder.seen() == before
    holder.give_back()
    assert (file_of(successor), pages_of(successor)) == (file, pages)
    assert all(set(successor.values(index)) == {3.0} for index in range(BLOCKS))


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_else_has_an_arena_that_was_closed_before_its_last_page_is_back(kind, directory, tmp_path):
    """The shard ends and another process goes on with what it leaves: it would write where the first one still reads."""
    config = {"state_dir": str(tmp_path / "state")}
    driver, seats, _ = stored(kind, directory, **config)
    holder = kind(driver, seats)
    before, job, pages = holder.seen(), driver.core.job, pages_of(driver)

    driver.shard.close(keep=True)

    is_held = job.arena._blocks.pool._in_hands > 0
    assert is_held == (kind.__name__ in ("PulledPages", "SnapshotPages", "UpdateInFlight"))
    if is_held:
        with pytest.raises(ConfigError, match="in use by process"):
            Driver(kind.spec, run_id="mine", **config)
    assert holder.seen() == before
    holder.give_back()
    successor = Driver(kind.spec, run_id="mine", **config)
    assert successor.shard.is_recovered
    assert pages_of(successor) == pages


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not OpenCutPages])
def test_an_arena_that_was_replaced_is_gone_with_the_last_one_who_holds_something(kind, directory):
    """Nor does anything else keep its memory: a job may go back many times."""
    driver, seats, name = stored(kind, directory)
    holder = kind(driver, seats)
    arena = weakref.ref(driver.core.job.arena)

    driver.rollback(name, 1)
    holder.give_back()
    del holder, seats
    gc.collect()

    assert arena() is None
