"""While a checkpoint is read, however slowly, nobody waits for it but those who come to join, to declare or to roll back.

The store of these tests does not answer at all; so whoever took the shard's lock over a read would hold up the others for ever.
"""

from __future__ import annotations

import pytest
from blocked_store import BlockedStore
from shard_driver import Driver
from stored_job import STEP, begun, spec_of, store, trained

from psd.checkpoint import CheckpointDirectory
from psd.contract.errors import RolledBack, ShardRestarted, StateLost
from psd.rim.views import shard_status
from psd.state.life import Life
from psd.state.shard import ShardState
from psd.v1 import control_pb2


@pytest.fixture
def restored(tmp_path):
    """A shard on the timeline that begins with a checkpoint, two workers that have joined, and the directory."""
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"))
    name = store(trained("sync", 2, 1), directory)
    (driver,) = begun(directory, name, "sync", 2, 1)
    return driver, [driver.join(rank) for rank in range(2)], directory


def reload(driver: Driver, how: str):
    """What has the shard read its checkpoint again."""
    if how == "redeclare":
        seat = driver.join(0)
        return lambda: driver.declare(seat, spec_of("async", 2))
    if how == "lost round":
        driver.core._on_lost(StateLost("worker 0's"))
        return driver.shard.tick
    name = driver.core.restored_from
    return lambda: driver.rollback(name, 2)


def status(driver: Driver) -> control_pb2.StatusReply:
    return shard_status(driver.shard, "", None)


@pytest.mark.parametrize("how", ["rollback", "lost round", "redeclare"])
def test_while_a_checkpoint_is_checked_the_shard_is_what_it_was(restored, how):
    """Leases are renewed, the status tells, a session is resumed, a barrier is entered, a new bulk connection is opened."""
    driver, (_, b), directory = restored
    call = reload(driver, how)
    before = driver.core.life.now
    blocked = BlockedStore(directory, lambda: True)

    with blocked.while_reading(call) as meanwhile:
        assert meanwhile(driver.heartbeat, b) == []
        assert meanwhile(status, driver).life == before.value
        assert meanwhile(driver.resume, b, timeline=1).clock == STEP
        assert meanwhile(driver.arrive, b).future.done() is False
        assert meanwhile(lambda: driver.shard.schedule.is_training)

    assert driver.version() == STEP


@pytest.mark.parametrize("how", ["rollback", "lost round"])
def test_while_a_checkpoint_is_loaded_workers_of_the_life_before_are_refused_at_once(restored, how):
    """They learn that the job goes back, and an operator sees it."""
    driver, (_, b), directory = restored
    waits = driver.arrive(b)
    blocked = BlockedStore(directory, lambda: driver.core.life.now is Life.LOADING)

    with blocked.while_reading(reload(driver, how)) as meanwhile:
        assert isinstance(waits.future.exception(0), RolledBack)
        with pytest.raises(ShardRestarted):
            meanwhile(driver.heartbeat, b)
        with pytest.raises(ShardRestarted):
            meanwhile(driver.begin_push, b, STEP)
        with pytest.raises(RolledBack):
            meanwhile(driver.resume, b, timeline=1)
        found = meanwhile(status, driver)
        assert (found.life, found.state) == (control_pb2.LIFE_CYCLE_LOADING, ShardState.RESTORING.value)
        meanwhile(driver.shard.admission.leave, b.caller, failed=True)
        assert not meanwhile(lambda: driver.shard.schedule.is_training)

    assert driver.version() == STEP


def test_while_a_job_is_loaded_that_is_declared_anew_the_others_keep_their_leases(restored):
    """Their sessions go on. Who declares waits, and finds the job as it was declared first."""
    driver, (_, b), directory = restored
    blocked = BlockedStore(directory, lambda: driver.core.life.now is Life.LOADING)

    with blocked.while_reading(reload(driver, "redeclare")) as meanwhile:
        assert meanwhile(driver.heartbeat, b, clock=STEP) == []
        assert meanwhile(status, driver).life == control_pb2.LIFE_CYCLE_LOADING
        assert meanwhile(driver.advance, 1) == []

    reply, _ = driver.declare(b, spec_of("async", 2))
    assert (reply.initialized, reply.clock, driver.core.life.now) == (True, STEP, Life.SERVING)


def test_a_second_rollback_that_comes_meanwhile_changes_nothing(restored):
    """Two workers have found the shard as it was, and both bring it back; the second waits, and sees that it is done."""
    driver, _, directory = restored
    found, name = driver.core.incarnation, driver.core.restored_from
    blocked = BlockedStore(directory, lambda: driver.core.life.now is Life.LOADING)

    with blocked.while_reading(lambda: driver.rollback(name, 2)):
        pass
    incarnation = driver.core.incarnation
    driver.rollback(name, 2, incarnation=found)
    driver.rollback(name, 3, incarnation=found)

    assert (driver.core.timeline, driver.core.incarnation) == (2, incarnation)
