"""A full --state-dir: what needs room is refused by name; nothing is lost, memory and disk agree, and the same call succeeds
when there is room again."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import shutil

import pytest
from full_disk import full_disk
from settling import bring, clipped, commit, decision, measure, push_all
from shard_driver import Driver, job_spec
from stored_job import STEP, begun, spec_of, store, trained

from psd.checkpoint import CheckpointDirectory
from psd.contract.config import ConfigError
from psd.contract.errors import InternalError, OutOfSpace, RolledBack, StateLost
from psd.state import storage
from psd.state.rounds import Outcome
from psd.state.tickets import Ticket
from psd_core.arena import ArenaFull

LOCK_BYTES = 24
"""Enough for the line in the lock file, which is there and is only written over."""

NO_ROOM = "has no room for the shard's notes: File too large"


@pytest.fixture
def driver_of(tmp_path):
    """Makes drivers with a directory of their own."""
    return lambda spec=None, **arguments: Driver(spec, state_dir=str(tmp_path / "state"), **arguments)


def durable(driver):
    """What outlives the process."""
    core = driver.core
    if core.job is None:
        return None
    verdicts, decisions = core.job.verdicts, core.job.decisions
    pages = [core.job.arena.current(slot) for slot in range(len(core.job.blocks))]
    return (
        [(p.version, p.parameter.tobytes(), p.steps.tobytes(), p.sessions.tobytes(), p.clocks.tobytes()) for p in pages if p],
        [(w.state, w.session, w.clock) for w in core.members.workers],
        (core.run_id, core.timeline, core.restored_from, core.initial.is_set),
        core.barriers._opened,
        None if verdicts is None else verdicts._latest,
        None if decisions is None else decisions.latest(),
    )


def assert_disk_agrees(driver, tmp_path):
    """What a process finds that is started with what is on the disk now is what this one holds."""
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    if (tmp_path / "state").exists():
        shutil.copytree(tmp_path / "state", copy)
    assert not list(copy.glob("*.new")), "nothing half-written takes the room that there is"
    twin = Driver(driver.spec, shard=driver.config.shard_index, shards=driver.config.shard_count, state_dir=str(copy))
    assert durable(twin) == durable(driver)


class Hoarder:
    """Holds all pages of a shard that could be written to."""

    def __init__(self, driver):
        self._arena = driver.core.job.arena
        self._pages = []
        with pytest.raises(ArenaFull):
            while True:
                self._pages.append(self._arena.spare(0))

    def give_back(self):
        while self._pages:
            self._arena.discard(self._pages.pop())


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
    assert (first.future.result(0), second.future.result(0)) == (0, 0)
    assert_disk_agrees(driver, tmp_path)
    driver.restart(a, b)
    assert driver.arrive(a).future.result(0) == 0


def test_calls_that_were_answered_before_the_disk_was_full_still_are(driver_of):
    """What a refused call would have displaced has not been displaced."""
    driver = driver_of()
    a, b = driver.start()
    driver.arrive(a, seq=1)
    driver.arrive(b, seq=1)
    driver.arrive(a, seq=2)

    with full_disk():
        driver.arrive(b, seq=2)

    assert (driver.arrive(a, seq=1).future.result(0), driver.core.barriers.opened_count) == (0, 1)


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
    assert (driver.arrive(b).future.result(0), first.future.result(0)) == (0, 0)
    assert_disk_agrees(driver, tmp_path)


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
    assert driver.arrive(a).future.result(0) == 0


def test_a_private_shard_keeps_no_notes(tmp_path):
    """Nobody would read them; so its memory may be as full as it likes."""
    driver = Driver()
    a, b = driver.start()
    first = driver.arrive(a)

    with full_disk():
        driver.arrive(b)

    assert first.future.result(0) == 0


# -- the job --


DECLARE_CALLS = 15
"""Calls of the system that a declaration makes, of those below."""


@contextlib.contextmanager
def no_room_at(failing, monkeypatch):
    """The n-th call that could need room finds none; yields the calls that are made."""
    names = ("open", "mkdir", "ftruncate", "posix_fallocate", "pwrite", "rename", "replace", "fsync")
    made = []

    def limited(*args, call, **kwargs):
        made.append(call)
        if len(made) == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return call(*args, **kwargs)

    with monkeypatch.context() as patch:
        for owner, name in ((io, "open"), *((os, name) for name in names)):
            patch.setattr(owner, name, functools.partial(limited, call=getattr(owner, name)))
        yield made


def test_a_job_that_has_no_room_at_any_step_leaves_nothing_and_can_be_declared_again(driver_of, tmp_path, monkeypatch):
    """Whichever call of the system says so."""
    monkeypatch.setattr(storage, "_boot_id", lambda: b"this life")
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


def test_a_directory_that_is_not_fit_for_a_job_is_named_to_whoever_declares_it(tmp_path):
    """One that cannot be made, and one that another shard was faster to take."""
    (tmp_path / "file").touch()
    drivers = [Driver(state_dir=str(tmp_path / name)) for name in ("file/state", "shared", "shared")]
    drivers[1].start()

    for driver, words in ((drivers[0], "Not a directory"), (drivers[2], "is in use by process")):
        seat = driver.join(0)
        with pytest.raises(InternalError, match=rf"--state-dir: cannot use {tmp_path}.*{words}"):
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


# -- rounds --


def test_a_gradient_that_completes_a_round_without_room_is_refused_and_not_counted(driver_of, tmp_path):
    """Nor is the round lost: sent again when there is room, it counts, once."""
    driver = driver_of()
    a, b = driver.start()
    driver.push(a, 0, 1.0)

    with full_disk():
        hoarder = Hoarder(driver)
        push = driver.begin_push(b, 0)
        with pytest.raises(OutOfSpace, match=f"block 0: no room for its next version: no space for .* in {tmp_path}"):
            driver.push_block(push, 0, 3.0)
    assert_disk_agrees(driver, tmp_path)
    hoarder.give_back()
    driver.push(b, 0, 3.0)

    assert (driver.version(), driver.values()) == (1, [-2.0] * 3)


@pytest.mark.parametrize("how", ["leave", "expire"])
@pytest.mark.parametrize("asks", [True, False], ids=["its workers ask again", "nobody asks"])
def test_a_round_that_a_worker_completes_by_going_is_applied_when_there_is_room(driver_of, tmp_path, how, asks):
    """Who waits for it is told why it does not come; the lease clock, or the next one that asks, applies it."""
    driver = driver_of(job_spec(3))
    a, b, c = driver.start()
    for seat in (a, b):
        driver.push(seat, 0, 2.0)
    waiting = driver.pull(a, 1)[0]
    assert isinstance(waiting, Ticket)

    with full_disk():
        hoarder = Hoarder(driver)
        if how == "leave":
            driver.leave(c)
        else:
            driver.expire(c, keep=[a, b])
        driver.advance(1)
        assert waiting.future.done(), "it asks again"
        with pytest.raises(OutOfSpace, match="block 0: no room for its next version"):
            driver.pull(a, 1)
        assert driver.version() == 0
        assert driver.core.job.lacks_space
    assert_disk_agrees(driver, tmp_path)
    hoarder.give_back()
    if asks:
        assert driver.pull(a, 1)[0].tolist() == [-2.0] * 3
    else:
        driver.advance(1)

    assert (driver.version(), driver.core.job.lacks_space) == (1, False)
    assert driver.values() == [-2.0] * 3


def test_a_round_that_is_no_longer_complete_when_there_is_room_waits_again(driver_of):
    """Its worker has come back meanwhile, in that very round: nothing of it may be left out for the lack of room."""
    driver = driver_of(job_spec(2))
    a, b = driver.start()
    driver.push(a, 0, 2.0)
    with full_disk():
        hoarder = Hoarder(driver)
        driver.leave(b)
    b = driver.join(1)
    driver.declare(b)
    hoarder.give_back()

    waiting = driver.pull(a, 1)[0]

    assert isinstance(waiting, Ticket)
    assert not waiting.future.done()
    assert not driver.core.job.lacks_space
    driver.push(b, 0, 4.0)
    assert driver.values() == [-3.0] * 3


def test_lent_gradients_that_have_no_room_are_taken_over_and_applied_later(driver_of):
    """Over shared memory: the call ends with the refusal, and the worker's memory is its own again."""
    driver = driver_of()
    a, b = driver.start()
    pushes = [driver.begin_push(seat, 0) for seat in (a, b)]
    gradients = [driver.lend_block(push, 0, value) for push, value in zip(pushes, (1.0, 3.0), strict=True)]

    with full_disk():
        hoarder = Hoarder(driver)
        with pytest.raises(OutOfSpace):
            driver.pull(a, 1)
        for push, gradient in zip(pushes, gradients, strict=True):
            driver.shard.exchange.take_over(push)
            gradient[:] = 1e9
    hoarder.give_back()

    assert driver.pull(a, 1)[0].tolist() == [-2.0] * 3
    assert pushes[1].outcomes[Outcome.COUNTED] == 1


def test_a_decision_stands_though_its_round_has_no_room(driver_of, tmp_path):
    """Exact: it is recorded and told; the round closes when there is room."""
    driver = driver_of(job_spec(2, aggregation="exact"))
    a, b = driver.start()
    for seat in (a, b):
        driver.push(seat, 0, 2.0)
    commit(driver, a, 0)

    with full_disk():
        hoarder = Hoarder(driver)
        reply = commit(driver, b, 0)
        with pytest.raises(OutOfSpace):
            driver.pull(b, 1)
    assert [(d.round, d.members) for d in reply.decisions] == [(0, b"\x03")]
    assert_disk_agrees(driver, tmp_path)
    hoarder.give_back()

    assert driver.pull(b, 1)[0].tolist() == [-2.0] * 3
    assert_disk_agrees(driver, tmp_path)


def test_without_rounds_a_gradient_that_has_no_room_is_refused_and_counts_when_it_is_sent_again(driver_of, tmp_path):
    """Once."""
    driver = driver_of(job_spec(1, mode="async"))
    (a,) = driver.start()

    with full_disk():
        hoarder = Hoarder(driver)
        push = driver.begin_push(a, 0)
        with pytest.raises(OutOfSpace):
            driver.push_block(push, 0, 1.0)
    assert_disk_agrees(driver, tmp_path)
    hoarder.give_back()
    driver.push(a, 0, 1.0)

    assert (driver.version(), driver.values()) == (1, [-1.0] * 3)


def test_a_verdict_that_cannot_be_kept_is_not_told(driver_of, tmp_path):
    """Whoever brought the measures brings them again."""
    driver = driver_of(clipped())
    a, b = driver.start()
    push_all(driver, (a, b), 0, 1.0, 3.0)
    found = measure(driver, a, 0)

    with full_disk(), pytest.raises(OutOfSpace, match=NO_ROOM):
        commit(driver, a, 0, measures=[found.measure])
    assert_disk_agrees(driver, tmp_path)
    assert not commit(driver, b, 0).HasField("verdict")

    reply = commit(driver, b, 0, measures=[found.measure])
    assert reply.verdict.is_final
    assert_disk_agrees(driver, tmp_path)
    bring(driver, b, 1, verdict=reply.verdict, decisions=[decision(0, 0, 1)])
    assert driver.version() == 1


# -- going back --


@pytest.mark.parametrize("how", ["rollback", "redeclare", "lost round"])
def test_a_shard_that_has_no_room_to_go_back_holds_nothing_and_goes_back_when_there_is_some(tmp_path, how):
    """What it had is given up by then, in memory as on the disk; its workers are sent to bring it to the checkpoint again."""
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"))
    name = store(trained("sync", 2, 1), directory)
    (driver,) = begun(directory, name, "sync", 2, 1, state_dir=str(tmp_path / "state"))
    seat = driver.join(0)
    driver.core.initial.is_read = how != "redeclare"

    with full_disk():
        if how == "lost round":
            driver.core.lost_round = StateLost("worker 0's")
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

    assert "will not be believed if the machine goes down" in caplog.text
    assert not list((tmp_path / "state").glob("*.new"))
    driver.restart(a, b)
    assert (driver.shard.is_recovered, driver.version()) == (True, 1)
