"""A checkpoint that was whole when it was looked at, and cannot be read to its end after all."""

from __future__ import annotations

from pathlib import Path

import pytest
from shard_driver import Driver
from stored_job import STEP, begun, spec_of, store, trained

from psd.checkpoint import CheckpointDirectory
from psd.contract.errors import CheckpointCorrupt, CheckpointFailed, NotDeclared, RolledBack, ShardRestarted, StateLost
from psd.state.aggregation.block import BlockState
from psd.state.life import Life


@pytest.fixture
def directory(tmp_path):
    return CheckpointDirectory(str(tmp_path / "checkpoints"))


def raising(error):
    def fail(*_):
        raise error

    return fail


@pytest.mark.parametrize("how", ["rollback", "redeclare", "lost round", "rollback after a lost round"])
def test_a_shard_that_could_not_go_back_is_tentative(directory, monkeypatch, how):
    """It has nothing then, and must not begin from anybody's initial values; the next rollback repairs it."""
    name = store(trained("sync", 2, 1), directory)
    (driver,) = begun(directory, name, "sync", 2, 1)
    seat = driver.join(0)
    if how != "redeclare":
        driver.core.become(Life.SERVING)

    with monkeypatch.context() as context:
        context.setattr(BlockState, "restore", raising(CheckpointFailed("the network is gone")))
        if "lost round" in how:
            driver.core._on_lost(StateLost("worker 0's"))
        if how == "lost round":
            driver.advance(1)
        else:
            with pytest.raises(CheckpointFailed, match="the network is gone"):
                driver.rollback(name, 2) if "rollback" in how else driver.declare(seat, spec_of("async", 2))

    driver.advance(1)
    with pytest.raises(ShardRestarted):
        driver.heartbeat(seat)
    with pytest.raises(RolledBack):
        driver.resume(seat, timeline=1)
    with pytest.raises(NotDeclared, match="waits to be told"):
        driver.declare(driver.join(0))
    driver.rollback(name, 2)
    reply, _ = driver.declare(driver.join(0))
    assert (reply.initialized, reply.clock, driver.version()) == (True, STEP, STEP)


def test_a_shard_whose_only_checkpoint_it_is_begins_without_one(directory, monkeypatch):
    """It finds out when it has read half of it."""
    store(trained("sync", 2, 1), directory)

    with monkeypatch.context() as context:
        context.setattr(BlockState, "restore", raising(CheckpointCorrupt("block 1")))
        fresh = Driver(spec_of("sync", 2), directory=directory)

    assert (fresh.shard.restored_from, fresh.core.restored_from, fresh.core.is_tentative) == (None, "", False)
    fresh.start(value=3.0)
    assert set(fresh.values()) == {3.0}


@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_a_shard_that_is_sent_to_a_checkpoint_that_it_cannot_read_names_another(directory, how):
    """A shard that has lost everything has begun from it; this one lives on, and stays as it is. Then they can agree."""
    job = trained("sync", 2, 2)
    older, newer = store(job, directory, "a1"), store(job, directory, "b1")
    lost, there = begun(directory, newer, "sync", 2, 2)
    asked, other = (newer, older) if how == "damaged" else (older, newer)
    for path in Path(directory.location, asked).iterdir():
        if how == "gone":
            path.unlink()
        elif path.suffix != ".json":
            path.write_bytes(bytes(path.stat().st_size))

    with pytest.raises(CheckpointCorrupt) as refused:
        there.rollback(asked, 2)

    assert (refused.value.detail["instead"], there.core.restored_from, there.core.timeline) == (other, newer, 1)
    for driver in (lost, there):
        driver.rollback(other, 3)
    assert {(driver.core.restored_from, driver.core.timeline) for driver in (lost, there)} == {(other, 3)}
