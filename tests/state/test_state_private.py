"""A state directory in which another user could have put something: nothing of it is followed, changed or believed."""

from __future__ import annotations

import os

import pytest
from shard_driver import Driver

from psd.contract.config import ConfigError, ServerConfig
from psd.contract.errors import InternalError
from psd.state.durability import notes
from psd.state.durability.state_directory import Storage
from psd_core import private_files
from psd_core.arena import Arena, BlockShape
from psd_core.table import TableSpec, TableStore
from psd_core.vector import VectorStore

NAMES = ["lock", "arena", "arena.new", "boot", "boot.new", "barriers.new", "table-0", "table-0.new", "vectors", "vectors.new"]


@pytest.fixture
def target(tmp_path):
    """A file elsewhere, which must stay as it is."""
    path = tmp_path / "target"
    path.write_bytes(b"precious")
    yield path
    assert path.read_bytes() == b"precious"


@pytest.fixture
def state(tmp_path):
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    return path


def begin(state):
    return Driver(state_dir=str(state))


@pytest.mark.parametrize("name", NAMES)
def test_a_link_in_the_place_of_a_file_is_refused_by_name_when_the_shard_starts(state, target, name):
    """Whatever it points at: it is not opened."""
    (state / name).symlink_to(target)

    with pytest.raises(ConfigError, match=rf"--state-dir: {state / name} is "):
        begin(state)


@pytest.mark.parametrize("name", ["lock", "arena.new", "boot.new", "barriers.new"])
def test_a_link_that_is_put_there_later_is_not_followed(state, target, name):
    """Between the look and the use."""
    if name.startswith("b"):
        (state / name).symlink_to(target)
        with pytest.raises(InternalError, match="is a symbolic link"):
            notes.write(state, name.removesuffix(".new"), b"content")
    else:
        (state / name).symlink_to(target)
        with pytest.raises(private_files.NotOurs, match="is a symbolic link"):
            Arena.create(state, meta=b"", shapes=[BlockShape("float32", 10, 0, 1)], workers=1)


def test_links_in_the_places_of_tables_and_vectors_are_not_followed(state, target):
    """Nor removed."""
    (state / "table-0.new").symlink_to(target)
    (state / "vectors.new").symlink_to(target.parent)

    with pytest.raises(private_files.NotOurs, match=r"table-0\.new is a symbolic link"):
        TableStore.create(state / "table-0", TableSpec("t", 2, "sgd"))
    with pytest.raises(OSError, match=r"vectors\.new"):
        VectorStore.create(state / "vectors", shard=0, shards=1)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_directory_that_everybody_can_write_to_is_refused(state, mode):
    """Also when it is sticky: a name that is not there yet can be taken."""
    state.chmod(mode)

    with pytest.raises(ConfigError, match=rf"--state-dir: {state} can be written to by every user; chmod o-w"):
        begin(state)


def test_a_directory_and_a_file_of_another_user_are_refused(state, monkeypatch):
    """Root's is taken: it is how volumes are mounted, and root may do anything."""
    (state / "boot").touch()
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)

    problem = "boot belongs to user" if owner == 0 else f"{state} belongs to user"
    with pytest.raises(ConfigError, match=f"{problem} {owner}, and this process is user {owner + 1}'s"):
        Storage(ServerConfig(0, 1, state_dir=str(state)), None).recover(lambda: False)


def test_a_pipe_in_the_place_of_a_note_keeps_nobody_waiting(state):
    """Which opening it to read would."""
    os.mkfifo(state / "boot")

    with pytest.raises(ConfigError, match="boot is not a file"):
        begin(state)
    with pytest.raises(private_files.NotOurs, match="boot is not a file"):
        notes.read(state / "boot")


def test_all_files_are_this_users_alone(state, tmp_path):
    """Whatever the process's umask: notes say who trains what."""
    driver = begin(state)
    (seat, *_) = driver.start()
    driver.push(seat, 0, 2.0, client_state=b"mine")
    driver.core.orders.scale_learning_rate(0.5, 1)
    driver.core.storage.make_vectors(2)
    driver.shard.close(keep=True)

    found = {str(path.relative_to(state)): path.stat().st_mode & 0o777 for path in state.rglob("*")}
    assert {"lock", "arena", "boot", "orders", "vectors", "vectors/catalog"} <= set(found)
    assert set(found.values()) <= {0o600, 0o700}
