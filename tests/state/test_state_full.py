"""A full --state-dir: what needs room is refused by name; nothing is lost, memory and disk agree, and the same call succeeds
when there is room again."""

from __future__ import annotations

import errno
import os

import pytest
from full_disk import full_disk, no_room_at
from full_state import NO_ROOM, Hoarder, assert_disk_agrees
from shard_driver import Driver, job_spec
from stored_job import STEP, begun, spec_of, store, trained

from psd.checkpoint import CheckpointDirectory
from psd.contract.config import ConfigError
from psd.contract.errors import InternalError, OutOfSpace, RolledBack, StateLost
from psd.state.durability import state_directory
from psd.state.life import Life

LOCK_BYTES = 24
"""Enough for the line in the lock file, which is there and is only written over."""


# -- barriers --


def test_a_barrier_whose_last_worker_comes_when_the_disk_is_full_is_refused_to_that_one(driver_of, tmp_path):
    """It is told, as if it had not come; the others wait for it; when it calls again, all go on."""
    driver = driver_of()
    a, b = driver.start()
    first = driver.arrive(a)

    with full_disk():
        refused = driver.arrive(b)
        again = driver.arrive(b)
    assert_disk_agrees(driver, tmp_path)

    for ticket in (refused, again):
        with pytest.raises(OutOfSpace, match=f"{tmp_path / 'state'} {NO_ROOM}"):
            ticket.future.result(0)
    assert not first.future.done()
    assert [worker.rank for worker in driver.shard.missing_for(first)] == [1]
    assert driver.core.waiting.open() == [first]
    second = driver.arrive(b)
    assert (first.future.result(0).generation, second.future.result(0).generation) == (0, 0)
    assert_disk_agrees(driver, tmp_path)
    driver.restart(a, b)
    assert driver.arrive(a).future.result(0).generation == 0


def test_calls_that_were_answered_before_the_disk_was_full_still_are(driver_of):
    """What a refused call would have displaced has not been displaced."""
    driver = driver_of()
    a, b = driver.start()
    driver.arrive(a, seq=1)
    driver.arrive(b, seq=1)
    driver.arrive(a, seq=2)

    with full_disk():
        driver.arrive(b, seq=2)

    assert (driver.arrive(a, seq=1).future.result(0).generation, driver.core.barriers.opened_count) == (0, 1)


@pytest.mark.parametrize("how", ["leave", "leaving", "expire"])
def test_a_barrier_that_a_worker_completes_by_going_is_refused_to_those_who_wait(driver_of, tmp_path, how):
    """The worker has gone all the same, and the lease clock goes on; who waits is told why, and comes again."""
    driver = driver_of(job_spec(3))
    a, b, c = driver.start()
    waiting = [driver.arrive(seat) for seat in (a, b)]

    with full_disk():
        if how == "leave":
            driver.leave(c)
        elif how == "leaving":
            driver.heartbeat(c, leaving=True)
        else:
            driver.expire(c, keep=[a, b])
        driver.heartbeat(a)
        driver.advance(1)
    assert_disk_agrees(driver, tmp_path)

    for ticket in waiting:
        with pytest.raises(OutOfSpace, match=NO_ROOM):
            ticket.future.result(0)
    assert driver.core.waiting.open() == []
    first = driver.arrive(a)
    assert [worker.rank for worker in driver.shard.missing_for(first)] == [1]
    assert (driver.arrive(b).future.result(0).generation, first.future.result(0).generation) == (0, 0)
    assert_disk_agrees(driver, tmp_path)


def test_what_has_nothing_to_write_goes_on_though_the_disk_is_full(driver_of, tmp_path):
    """Workers come, train, fall silent and leave; what is to be known of them has its place in the arena."""
    driver = driver_of(job_spec(3))
    a, b, c = driver.start()

    with full_disk():
        driver.leave(b)
        b = driver.join(1)
        driver.declare(b)
        driver.heartbeat(b, clock=0)
        for seat in (a, b):
            driver.push(seat, 0, 2.0)
        driver.expire(c, keep=[a, b])
        assert driver.pull(b, 1)[0].tolist() == [-2.0] * 3
        driver.leave(a)

    assert_disk_agrees(driver, tmp_path)
    driver.restart(b)
    assert driver.values() == [-2.0] * 3


def test_what_a_disk_says_that_is_not_full_is_told_too(tmp_path):
    """With its words; the barrier opens when it works again."""

    class Broken:
        is_on = False

        def __call__(self, step):
            if self.is_on and step.startswith("storage."):
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    driver = Driver(state_dir=str(tmp_path / "state"))
    broken = Broken()
    driver.core.storage._crash_point = broken
    a, b = driver.start()
    first = driver.arrive(a)

    broken.is_on = True
    refused = driver.arrive(b)
    driver.leave(b)
    driver.advance(1)
    broken.is_on = False

    for ticket in (refused, first):
        with pytest.raises(InternalError, match=f"{tmp_path / 'state' / 'barriers'} cannot be written: Input/output error"):
            ticket.future.result(0)
    assert driver.arrive(a).future.result(0).generation == 0


def test_a_private_shard_keeps_no_notes(tmp_path):
    """Nobody would read them; so its memory may be as full as it likes."""
    driver = Driver()
    a, b = driver.start()
    first = driver.arrive(a)

    with full_disk():
        driver.arrive(b)

    assert first.future.result(0).generation == 0


# -- the job --


DECLARE_CALLS = 14
"""Calls of the system that a declaration makes, of those that `no_room_at` counts."""


def test_a_job_that_has_no_room_at_any_step_leaves_nothing_and_can_be_declared_again(driver_of, tmp_path, monkeypatch):
    """Whichever call of the system says so."""
    monkeypatch.setattr(state_directory, "boot_id", lambda _: b"this life")
    driver = driver_of()
    a, b = driver.join(0), driver.join(1)

    for failing in range(1, DECLARE_CALLS + 1):
        with (
            pytest.raises(OutOfSpace, match=f"{tmp_path / 'state'} .*No space left on device"),
            no_room_at(failing, monkeypatch) as made,
        ):
            driver.declare(a)
        assert (driver.core.job, driver.core.storage.arena) == (None, None), made[-1]
        assert not (tmp_path / "state").exists(), made[-1]
    with no_room_at(DECLARE_CALLS + 1, monkeypatch) as made:
        driver.declare(a)
    assert len(made) == DECLARE_CALLS

    driver.declare(b)
    assert driver.initialize(a)
    assert_disk_agrees(driver, tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [("file", "Not a directory"), ("file/state", "Not a directory"), ("/proc/self", None), ("/proc/self/state", None)],
)
def test_a_directory_in_which_no_file_can_be_made_is_refused_at_the_start(tmp_path, name, words):
    """Not when the first job is declared; /proc takes nobody's files, not even root's."""
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=rf"--state-dir: cannot use {tmp_path / name}: {words or '.+'}"):
        Driver(state_dir=str(tmp_path / name))


def test_a_directory_that_is_tried_at_the_start_is_left_as_it_was(tmp_path):
    """Also on a disk that is merely full, which may have room when a job is declared."""
    Driver(state_dir=str(tmp_path / "new"))
    with full_disk():
        Driver(state_dir=str(tmp_path / "full"))

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["orders", "table-users.csv", "vectors/mine", "vectors", "client-state-of-mine"])
def test_a_directory_with_files_of_somebody_else_is_refused_before_one_is_lost(tmp_path, name):
    """What has a name that a shard would use would be removed by the first job."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")

    with pytest.raises(ConfigError, match="is no file of a shard, and has the name of one; name an empty directory"):
        Driver(state_dir=str(tmp_path))
    assert path.read_text() == "mine"


def test_a_directory_that_another_shard_was_faster_to_take_is_named_to_whoever_declares_a_job(tmp_path):
    """Both were started when it was free."""
    faster, driver = (Driver(state_dir=str(tmp_path / "shared")) for _ in range(2))
    faster.start()
    seat = driver.join(0)

    with pytest.raises(InternalError, match=rf"--state-dir: cannot use {tmp_path}.*is in use by process"):
        driver.declare(seat)
    assert driver.core.job is None


def test_initial_values_that_have_no_room_are_refused_all_together(driver_of, tmp_path):
    """Another choice's values, over those that a dead initializer has left: until there is room, these stand."""
    driver = driver_of(job_spec(1, blocks=6), shard=1, shards=2)
    seat = driver.join(0, session=5)
    driver.declare(seat)
    assert driver.initialize(seat, 1.0, choice=1)
    own = [plan.index for plan in driver.layout.blocks_of(1)]

    init = driver.begin_initialize(seat, choice=2)
    driver.offer(init, 2.0)
    arena = driver.core.job.arena
    with full_disk():
        hoarder = Hoarder(driver)
        arena.discard(hoarder._pages.pop())
        with pytest.raises(OutOfSpace, match="no room for its next version: no space for"):
            driver.shard.admission.end_initialize(init)
    hoarder.give_back()

    assert [driver.values(index)[0] for index in own] == [1.0] * len(own)
    assert driver.core.initial.has(1)
    assert_disk_agrees(driver, tmp_path)
    assert driver.shard.admission.end_initialize(init)
    assert [driver.values(index)[0] for index in own] == [2.0] * len(own)
    assert_disk_agrees(driver, tmp_path)


# -- going back --


@pytest.mark.parametrize("how", ["rollback", "redeclare", "lost round"])
def test_a_shard_that_has_no_room_to_go_back_holds_nothing_and_goes_back_when_there_is_some(tmp_path, how):
    """What it had is given up by then, in memory as on the disk; its workers are sent to bring it to the checkpoint again."""
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"))
    name = store(trained("sync", 2, 1), directory)
    (driver,) = begun(directory, name, "sync", 2, 1, state_dir=str(tmp_path / "state"))
    seat = driver.join(0)
    if how != "redeclare":
        driver.core.become(Life.SERVING)

    with full_disk():
        if how == "lost round":
            driver.core._on_lost(StateLost("worker 0's"))
            driver.advance(1)
        else:
            with pytest.raises(OutOfSpace, match=f"{tmp_path / 'state'} has no room for this job's parameters"):
                driver.rollback(name, 2) if how == "rollback" else driver.declare(seat, spec_of("async", 2))
    assert (driver.core.job, driver.core.storage.arena) == (None, None)
    assert not (tmp_path / "state").exists()

    with pytest.raises(RolledBack):
        driver.resume(seat, timeline=1)
    driver.advance(1)
    driver.rollback(name, 2)
    reply, _ = driver.declare(driver.join(0))
    assert (reply.initialized, reply.clock, driver.version()) == (True, STEP, STEP)
    assert_disk_agrees(driver, tmp_path)


# -- the process --


def test_a_shard_that_was_killed_goes_on_though_the_disk_is_full(driver_of):
    """Nothing has to be written for that."""
    driver = driver_of()
    a, b = driver.start()
    for seat in (a, b):
        driver.push(seat, 0, 2.0)

    with full_disk(LOCK_BYTES):
        driver.restart(a, b)
        for seat in (a, b):
            driver.push(seat, 1, 2.0)

    assert (driver.shard.is_recovered, driver.version()) == (True, 2)


def test_a_shard_that_had_ended_is_not_started_on_a_full_disk(driver_of, tmp_path):
    """It could not note that the arena is in use again, and that it is not to be believed if the machine goes down."""
    driver = driver_of()
    a, b = driver.start()
    driver.push(a, 0, 2.0)
    driver.shard.close(keep=True)
    note = (tmp_path / "state" / "boot").read_bytes()

    with full_disk(LOCK_BYTES), pytest.raises(ConfigError, match=rf"--state-dir: {tmp_path / 'state'} {NO_ROOM}"):
        Driver(state_dir=str(tmp_path / "state"))
    assert (tmp_path / "state" / "boot").read_bytes() == note
    driver.restart(a, b)

    assert driver.shard.is_recovered


def test_a_shard_ends_in_order_though_the_disk_is_full(driver_of, tmp_path, caplog):
    """It says what it could not note, and leaves everything to its next process."""
    driver = driver_of()
    a, b = driver.start()
    for seat in (a, b):
        driver.push(seat, 0, 2.0)

    with full_disk():
        driver.shard.close(keep=True)

    assert "will not be used if the machine goes down" in caplog.text
    assert not list((tmp_path / "state").glob("*.new"))
    driver.restart(a, b)
    assert (driver.shard.is_recovered, driver.version()) == (True, 1)
