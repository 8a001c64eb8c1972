"""A job of vectors alone that becomes one that trains: the vectors, and their workers, survive whatever comes between."""

from __future__ import annotations

import pytest
from full_disk import full_disk, no_room_at
from shard_driver import Driver, Fuse, Killed, tables_spec

from psd.contract.consistency import Consistency
from psd.contract.errors import CheckpointCorrupt, OutOfSpace
from psd.contract.jobspec import JobSpec
from psd.contract.layout import Layout
from psd.contract.vectors import spec_message
from psd.state.durability import leftovers, state_directory
from psd.state.life import Life
from psd.v1 import vectors_pb2
from psd_core.vector import VectorSpec
from psd_core.vector_operations import Operations

VECTORS_ALONE = JobSpec(1, (), (), Consistency.parse("async"))
TRAINS = tables_spec(1, tables=1, blocks=2)


@pytest.fixture
def driver_of(tmp_path):
    """Makes drivers of a job of one vector, of threes."""

    def make(crash_point=None):
        driver = Driver(VECTORS_ALONE, state_dir=str(tmp_path / "state"))
        if crash_point is not None:
            driver.core.storage._crash_point = crash_point
        (seat,) = driver.start()
        request = vectors_pb2.VectorChange(caller=seat.caller, session=seat.session, seq=1)
        request.vector.CopyFrom(spec_message(VectorSpec("x", 10)))
        driver.shard.vectors.create(request)
        driver.core.storage.vectors.run([Operations.fill("x", 3.0)])
        driver.layout = Layout(TRAINS, 1)
        return driver, seat

    return make


def assert_vectors_go_on(driver, seat):
    """They are there, their worker is, and the job can still become one that trains."""
    assert driver.core.storage.vectors.read("x").tolist() == [3.0] * 10
    driver.heartbeat(seat)
    driver.declare(seat, TRAINS)
    if not driver.core.life.has_values:
        driver.initialize(seat, 1.0)
    assert driver.values() == [1.0] * 3
    assert driver.core.storage.vectors.read("x").tolist() == [3.0] * 10


def test_a_job_that_has_no_room_to_grow_at_any_step_stays_as_it_is(driver_of, monkeypatch):
    """Also its notes; the same declaration is taken when there is room."""
    monkeypatch.setattr(state_directory, "boot_id", lambda _: b"this life")
    driver, seat = driver_of()
    ticket = driver.arrive(seat)
    files = sorted(driver.core.storage.directory.iterdir())

    failing, refused = 1, True
    while refused:
        with no_room_at(failing, monkeypatch) as calls:
            try:
                driver.declare(seat, TRAINS)
            except OutOfSpace:
                failing += 1
            else:
                refused = False
        if refused:
            assert (driver.core.life.now, sorted(driver.core.storage.directory.iterdir())) == (Life.SERVING, files), calls[-1]
            driver.heartbeat(seat)
    assert failing > 5
    driver.initialize(seat, 1.0)
    assert_vectors_go_on(driver, seat)
    driver.restart(seat)
    assert driver.arrive(seat).future.result(0).generation == ticket.future.result(0).generation
    assert_vectors_go_on(driver, seat)


def test_a_job_whose_parameters_cannot_be_read_when_it_grows_stays_as_it_is(driver_of, monkeypatch):
    """They are to come from --parameters-only, and are not those of the job."""
    driver, seat = driver_of()

    def fail(_):
        raise CheckpointCorrupt("block 1")

    with monkeypatch.context() as context:
        context.setattr(driver.shard.admission, "_give_values", fail)
        with pytest.raises(CheckpointCorrupt, match="block 1"):
            driver.declare(seat, TRAINS)

    assert driver.core.declared().spec == VECTORS_ALONE
    driver.restart(seat)
    assert_vectors_go_on(driver, seat)


def test_a_shard_that_is_killed_before_a_grown_job_has_its_values_has_the_vectors(driver_of):
    """At every step: its next process has the job of vectors alone, or the grown one with its values."""
    steps, dies = 1, True
    while dies:
        fuse = Fuse()
        driver, seat = driver_of(fuse)
        fuse.steps = steps
        try:
            driver.declare(seat, TRAINS)
            driver.initialize(seat, 1.0)
        except Killed:
            steps += 1
        else:
            dies = False
        fuse.steps = 0
        driver.restart(seat)
        assert_vectors_go_on(driver, seat)
        driver.shard.close(keep=False)
    assert steps > 10


def test_a_shard_that_is_killed_while_it_gives_a_grown_job_up_does_not_take_it_for_one_that_grows(driver_of, monkeypatch):
    """As when it goes back to a checkpoint: what is left is no job any more."""
    driver, seat = driver_of()
    driver.declare(seat, TRAINS)
    driver.initialize(seat, 1.0)

    def die(_):
        raise Killed

    with monkeypatch.context() as context:
        context.setattr(leftovers, "remove_notes", die)
        with pytest.raises(Killed):
            driver.shard.close(keep=False)
    driver.restart()

    assert (driver.shard.is_recovered, driver.core.storage.vectors) == (False, None)


def test_a_disk_that_is_full_when_a_shard_is_restarted_in_growth_is_named(driver_of, tmp_path):
    """It needs room for the arena of the job of vectors alone; with that it goes on."""
    driver, seat = driver_of()
    driver.declare(seat, TRAINS)

    with full_disk(24), pytest.raises(state_directory.ConfigError, match=r"--state-dir: .* has no room"):
        driver.restart()
    driver._start()
    driver.resume(seat)
    assert_vectors_go_on(driver, seat)
