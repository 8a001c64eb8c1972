"""The state directory of a run: who may have it, what is removed, what is kept."""

import os

import pytest

from psd.cli.processes import state_directories
from psd.cli.processes.state_directories import StateDirectory, clear_abandoned, kept_run_id, private_path
from psd.contract import environment
from psd.contract.config import ConfigError


@pytest.fixture
def parent(tmp_path, monkeypatch):
    """The parent of private state directories in this test."""
    monkeypatch.setattr(state_directories, "memory_directory", lambda: tmp_path)
    return tmp_path


def age(path):
    """Make it look unchanged for an hour."""
    an_hour_ago = path.stat().st_mtime - 3600
    os.utime(path, (an_hour_ago, an_hour_ago))


def fill(directory):
    """Leave the files that a shard leaves."""
    directory.shard(0).mkdir()
    (directory.shard(0) / "arena").write_text("parameters")


def test_private_path_when_memory_can_be_written_then_it_is_there(tmp_path, monkeypatch):
    assert private_path("run-1").name == "psd-run-run-1"
    monkeypatch.setattr(environment.os, "access", lambda *_: False)
    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: str(tmp_path))
    assert private_path("run-1") == tmp_path / "psd-run-run-1"


@pytest.mark.parametrize("keep", [True, False])
def test_close_when_private_then_nothing_is_left(parent, keep):
    directory = StateDirectory(private_path("run-1"), "run-1", 2, is_private=True)
    fill(directory)

    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert directory.close(keep=keep) is False
    assert list(parent.iterdir()) == []


def test_close_when_named_and_kept_then_the_next_run_has_the_same_id(tmp_path):
    path = tmp_path / "state"
    directory = StateDirectory(path, "run-1", 2, is_private=False)
    fill(directory)

    assert directory.close(keep=True) is True
    assert kept_run_id(path) == "run-1"
    again = StateDirectory(path, "run-1", 2, is_private=False)
    assert (again.shard(0) / "arena").read_text() == "parameters"
    again.close(keep=False)


def test_close_when_named_and_not_kept_then_only_what_is_ours_is_removed(tmp_path):
    (tmp_path / "mine").touch()
    (tmp_path / "shard-7").mkdir()
    directory = StateDirectory(tmp_path, "run-1", 2, is_private=False)
    fill(directory)

    assert directory.close(keep=False) is False
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "shard-7"]
    assert kept_run_id(tmp_path) is None


def test_close_when_there_is_nothing_to_keep_then_it_is_not_kept(tmp_path):
    directory = StateDirectory(tmp_path, "run-1", 2, is_private=False)

    assert directory.close(keep=True) is False
    assert list(tmp_path.iterdir()) == []


def test_state_directory_when_in_use_then_it_is_refused_until_it_is_let_go(tmp_path):
    first = StateDirectory(tmp_path, "run-1", 1, is_private=False)

    with pytest.raises(ConfigError, match="in use by another psd-run"):
        StateDirectory(tmp_path, "run-1", 1, is_private=False)
    first.close(keep=True)
    StateDirectory(tmp_path, "run-1", 1, is_private=False).close(keep=False)


def test_state_directory_when_something_else_is_there_then_it_is_refused_and_stays(tmp_path):
    (tmp_path / "shard-0").mkdir()
    (tmp_path / "shard-0" / "diary").touch()

    with pytest.raises(ConfigError, match="not psd-run's"):
        StateDirectory(tmp_path, "run-1", 1, is_private=False)
    assert [path.name for path in tmp_path.rglob("*")] == ["shard-0", "diary"]


def test_state_directory_when_it_cannot_be_made_then_the_reason_is_said(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=r"--state-dir: cannot use .*: Not a directory"):
        StateDirectory(tmp_path / "file" / "state", "run-1", 1, is_private=False)


@pytest.mark.parametrize(("text", "run_id"), [("run-1\n", "run-1"), ("", None)])
def test_kept_run_id_when_a_run_has_left_something_then_it_is_that_runs(tmp_path, text, run_id):
    (tmp_path / "run").write_text(text)

    assert kept_run_id(tmp_path) == run_id


def test_kept_run_id_when_the_file_is_something_else_then_it_is_refused(tmp_path):
    (tmp_path / "run").write_text("#!/bin/sh\nexec train\n")

    with pytest.raises(ConfigError, match="does not hold the name of a run"):
        kept_run_id(tmp_path)


def test_clear_abandoned_when_a_run_and_its_watchdog_were_killed_then_its_state_goes_and_that_of_others_stays(parent):
    abandoned = StateDirectory(private_path("dead"), "dead", 1, is_private=True)
    fill(abandoned)
    (abandoned.shard(0) / "lock").touch()
    living = StateDirectory(private_path("living"), "living", 1, is_private=True)
    young = StateDirectory(private_path("young"), "young", 1, is_private=True)
    os.close(abandoned.lock_fd)  # as the kernel does
    os.close(young.lock_fd)
    age(abandoned.path)
    age(living.path)

    clear_abandoned()

    assert sorted(path.name for path in parent.iterdir()) == ["psd-run-living", "psd-run-young"]
    living.close(keep=False)


def test_clear_abandoned_when_a_shard_still_lives_then_its_state_stays(parent):
    orphaned = StateDirectory(private_path("orphaned"), "orphaned", 1, is_private=True)
    fill(orphaned)
    shard_lock = state_directories._take_lock(orphaned.shard(0))
    os.close(orphaned.lock_fd)
    age(orphaned.path)

    clear_abandoned()

    assert orphaned.shard(0).exists()
    os.close(shard_lock)
