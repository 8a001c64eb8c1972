"""Files of a shard that had ended in order, and were changed since: nothing of them is believed, and the file is named."""

from __future__ import annotations

import dataclasses
import re
import shutil

import numpy as np
import pytest
from shard_driver import Driver, tables_spec
from stored_job import STEP, begun, store, trained

from psd.checkpoint import CheckpointDirectory
from psd.contract.config import ConfigError, Limits
from psd.contract.errors import RolledBack
from psd.contract.vectors import spec_message
from psd.state.core import ShardCore
from psd.state.durability.state_directory import Storage
from psd.state.shard import Shard
from psd.v1 import vectors_pb2
from psd_core.vector import VectorSpec
from psd_core.vector_operations import Operations

SMALL = Limits(workers_max=1, table_bytes_max=1 << 19, push_ids_max=16)
SAMPLES = 12
"""Bytes of each file that are changed in turn."""

FILES = {"arena", "boot", "barriers", "orders", "client-state-0", "table-0", "table-1"} | {
    f"vectors/{name}" for name in ("catalog", "log", "record", "vector-0")
}


@pytest.fixture
def ended(tmp_path):
    """A shard that has ended in order, and has left one file of each kind: its driver, and by file the bytes that count."""
    spec = tables_spec(1, blocks=2, flags=("momentum",), size=3000)
    driver = Driver(spec, state_dir=str(tmp_path / "state"), limits=SMALL)
    (seat,) = driver.start(value=3.0)
    driver.push_rows(seat, 0, {0: ([1, 2], 2.0), 1: ([1], 2.0)}, client_state=b"mine")
    driver.arrive(seat)
    driver.core.orders.scale_learning_rate(0.5, 1)
    request = vectors_pb2.VectorChange(caller=seat.caller, session=seat.session, seq=1)
    request.vector.CopyFrom(spec_message(VectorSpec("x", 5000)))
    driver.shard.vectors.create(request)
    driver.core.storage.vectors.run([Operations.fill("x", 3.0)])
    arena = driver.core.storage.arena
    pages = [arena.current(block).place for block in range(len(arena.shapes))]
    used = [*range(arena.front_bytes), *(at for page in pages for at in range(page.offset, page.offset + page.kind.size))]
    driver.seat = seat
    driver.shard.close(keep=True)
    places = {}
    for path in (tmp_path / "state").rglob("*"):
        if path.is_file() and path.name != "lock":
            data = np.frombuffer(path.read_bytes(), np.uint8)
            counts = np.array(used) if path.name == "arena" else np.arange(len(data))
            places[str(path.relative_to(tmp_path / "state"))] = counts[data[counts] != 0]
    return driver, places


def refusal(driver):
    """What a process says that is to go on with the directory."""
    with pytest.raises(ConfigError) as refused:
        Storage(driver.config, None).recover(lambda: False)
    return str(refused.value)


def goes_on(driver):
    driver.restart(driver.seat)
    assert driver.shard.is_recovered
    assert driver.core.storage.vectors.read("x").tolist() == [3.0] * 5000


def test_a_byte_that_has_changed_is_found_in_every_file_and_the_file_is_named(ended, tmp_path):
    """Parameters, slots, versions, members; superblock, index, heads and rows of a table; vectors; notes."""
    driver, places = ended
    assert {re.sub(r"^(client-state-0).*", r"\1", name) for name in places} == FILES

    for name, counts in places.items():
        path = tmp_path / "state" / name
        for place in counts[:: max(1, len(counts) // SAMPLES)]:
            with path.open("r+b", buffering=0) as file:
                file.seek(place)
                (before,) = file.read(1)
                file.seek(place)
                file.write(bytes([before ^ 1]))
                message = refusal(driver)
                file.seek(place)
                file.write(bytes([before]))
            assert message.startswith(f"--state-dir: {path}: "), (name, place)
            assert "Remove the directory to start without it" in message
    goes_on(driver)


@pytest.mark.parametrize("how", ["cut off", "emptied", "missing", "a page of zeros"])
def test_a_torn_file_is_found_and_named(ended, tmp_path, how):
    """Whichever part of it never reached the disk."""
    driver, places = ended

    for name, counts in places.items():
        path = tmp_path / "state" / name
        if how == "missing" and name in ("arena", "boot"):
            continue  # as if there had been no job, or as if the machine had gone down
        copy = shutil.copy2(path, tmp_path / "copy")
        if how == "missing":
            path.unlink()
        elif how == "a page of zeros":
            start = int(counts[-1]) // 4096 * 4096
            with path.open("r+b") as file:
                file.seek(start)
                file.write(bytes(min(4096, path.stat().st_size - start)))
        else:
            with path.open("r+b") as file:
                file.truncate(int(counts[-1]) if how == "cut off" else 0)
        message = refusal(driver)
        shutil.copy2(copy, path)
        assert message.startswith(f"--state-dir: {path}: "), (name, message)
    goes_on(driver)


@pytest.mark.parametrize("file", ["arena", "client-state-0-0-0"])
def test_a_shard_whose_files_are_damaged_goes_back_to_a_checkpoint(tmp_path, caplog, file):
    """If there is one: it says which file it was, is tentative, and its workers bring all shards there."""
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"))
    name = store(trained("sync", 2, 1), directory)
    (driver,) = begun(directory, name, "sync", 2, 1, state_dir=str(tmp_path / "state"))
    seat = driver.join(0)
    driver.declare(seat)
    driver.core.client_states.begin({0: b"mine"})
    arena = driver.core.storage.arena
    place = arena.current(0).place.offset + 5000 if file == "arena" else 12
    driver.shard.close(keep=True)
    path = tmp_path / "state" / file
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)

    empty = CheckpointDirectory(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match=rf"{path}: .*checksum.*; this shard cannot go on with it"):
        driver.restart(directory=empty)
    assert path.read_bytes() == data
    driver._start(directory=directory)

    assert f"{path}: " in caplog.text
    assert "going back to a checkpoint" in caplog.text
    assert (driver.shard.is_recovered, driver.core.is_tentative, driver.version()) == (False, True, STEP)
    with pytest.raises(RolledBack):
        driver.resume(seat, timeline=1)


def test_a_byte_of_the_note_on_the_boot_that_has_changed_is_damage_whichever_it_is(ended, tmp_path, caplog):
    """Also one of those by which the note is told from other files: with a checkpoint the shard goes back to that."""
    driver, _ = ended
    boot, copy = tmp_path / "state" / "boot", tmp_path / "copy"
    shutil.copytree(tmp_path / "state", copy)

    for place in (*range(13), boot.stat().st_size - 1):
        data = bytearray((copy / "boot").read_bytes())
        data[place] ^= 1
        shutil.rmtree(tmp_path / "state", ignore_errors=True)
        shutil.copytree(copy, tmp_path / "state")
        boot.write_bytes(data)
        assert Storage(driver.config, None).recover(lambda: True) is None, place
        assert not (tmp_path / "state" / "arena").exists(), place
    assert f"{boot}: is cut off or was changed" in caplog.text


@pytest.mark.parametrize("file", ["arena", "table-1", "vectors/log", "vectors/catalog", "vectors/vector-0"])
def test_a_byte_that_has_changed_under_a_killed_shard_lets_it_go_back_to_a_checkpoint(ended, tmp_path, caplog, file):
    """There is no seal, and what is found when the file is opened is damage all the same."""
    driver, _ = ended
    goes_on(driver)
    driver.kill()
    path = tmp_path / "state" / file
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    config = dataclasses.replace(driver.config, checkpoint_dir=str(tmp_path / "checkpoints"))

    with pytest.raises(ConfigError, match=rf"--state-dir: {path.parent if file[0] == 'v' else path}: .*cannot go on with it"):
        Shard(config)
    assert path.read_bytes() == data
    core = ShardCore(config, Storage(config, None), lambda: 0.0, None, wall=lambda: 0.0, has_checkpoints=True)

    assert core.recover(lambda: True) is False
    assert "going back to a checkpoint" in caplog.text
    assert not path.exists()
    assert core.storage.arena is None


def test_a_directory_that_another_release_has_left_stays(ended, tmp_path):
    """Also where there is a checkpoint: it is not damaged."""
    driver, _ = ended
    boot = tmp_path / "state" / "boot"
    sealed = boot.read_bytes()
    boot.write_bytes(b"PSDNOTE9, a line of text")

    with pytest.raises(ConfigError, match=f"{boot}: begins with b'PSDNOTE9', not with b'PSDNOTE1': another release wrote it"):
        Storage(driver.config, None).recover(lambda: True)

    boot.write_bytes(sealed)
    goes_on(driver)


def test_a_shard_that_ends_while_a_page_is_held_is_believed(ended):
    """What a reader or an update has in its hands when the shard ends changes nothing that was sealed."""
    driver, _ = ended
    goes_on(driver)
    arena = driver.core.storage.arena
    pinned, spare = arena.pin(0), arena.spare(1)
    driver.shard.close(keep=True)
    spare.parameter[:] = 7.0
    with pytest.raises(Exception, match="has been closed"):
        arena.publish(1, spare, 99)
    arena.unpin(pinned)

    goes_on(driver)


def test_what_a_machine_that_went_down_has_left_is_not_called_damaged(ended, tmp_path, monkeypatch):
    """Its notes may be torn; it is refused, or gives way to a checkpoint, for the machine."""
    driver, _ = ended
    goes_on(driver)
    driver.kill()
    (tmp_path / "state" / "barriers").write_bytes(bytes(9))
    monkeypatch.setattr("psd.state.durability.state_directory.boot_id", lambda _: b"another life")

    assert "the machine went down before the shard had ended" in refusal(driver)
    driver.config = dataclasses.replace(driver.config, checkpoint_dir=str(tmp_path / "checkpoints"))
    assert Storage(driver.config, None).recover(lambda: False) is None
