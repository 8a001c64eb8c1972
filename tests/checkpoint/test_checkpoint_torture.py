"""Killed, full, read-only: the last good checkpoint is always found, every error surfaces, and the next checkpoint succeeds."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from helpers_checkpoint import (
    check_restored,
    cut_of,
    files_of,
    memory_url,
    parts,
    small_spec,
    store,
    valid_names,
)

from psd.checkpoint import CheckpointDirectory
from psd.contract.errors import CheckpointFailed
from psd.contract.layout import Layout


@pytest.mark.process
def test_store_when_killed_at_any_file_operation_then_the_last_good_one_is_found(tmp_path):
    """kill -9 at each operation of writing a checkpoint and of deleting two older ones; see killed_checkpoint.py."""
    program = Path(__file__).with_name("killed_checkpoint.py")

    done = subprocess.run([sys.executable, program, tmp_path], check=False, capture_output=True, text=True, timeout=200)

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50


class FailsAt:
    """A crash point that raises at its n-th call."""

    def __init__(self, n: int, error: Exception) -> None:
        self.left = n
        self.error = error

    def __call__(self, step: str) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


FULL = OSError(errno.ENOSPC, "No space left on device")
FORBIDDEN = RuntimeError("403 Forbidden")


def _failure_of(action) -> CheckpointFailed | None:
    try:
        action()
    except CheckpointFailed as failure:
        return failure
    return None


@pytest.mark.usefixtures("no_fsync")
@pytest.mark.parametrize(("kind", "error", "words"), [("local", FULL, "No space left on device"), ("memory", FORBIDDEN, "403")])
def test_store_when_any_operation_fails_then_it_surfaces_and_the_next_attempt_succeeds(tmp_path, kind, error, words):
    older, newer = cut_of(small_spec(), 2, 7), cut_of(small_spec(), 2, 8)
    n = 0
    has_failed = True
    while has_failed:
        n += 1
        url = str(tmp_path / f"{n}") if kind == "local" else memory_url()
        store(CheckpointDirectory(url), older)
        faulty = FailsAt(n, error)
        directory = CheckpointDirectory(url, keep=1, crash_point=faulty)

        failure = _failure_of(lambda directory=directory: (store(directory, newer), directory.collect_garbage()))

        has_failed = faulty.left <= 0
        assert has_failed == (failure is not None)
        assert failure is None or (words in str(failure) and failure.__cause__ is error)
        used = directory.newest()
        assert used.step in (7, 8)
        assert directory.verify(used.name) == []
        if kind == "local":
            assert not [path for path in files_of(tmp_path) if path.suffix == ".tmp"]
        store(directory, newer)
        directory.collect_garbage()
        assert [info.name for info in directory.checkpoints()] == [newer.name]
        assert directory.verify(newer.name) == []
    assert n > 30


def test_store_when_files_are_local_then_each_step_is_durable_before_the_next(tmp_path):
    """A power failure may undo what was not synced: so data before its document, documents before the manifest."""
    steps = []
    directory = CheckpointDirectory(str(tmp_path / "x"), crash_point=steps.append)
    cut = cut_of(small_spec(), 1)
    directory.write_part(cut, 0, parts(cut, 0))
    assert directory.complete(cut)

    here = f"fsync directory {cut.name}"

    def file(name):
        return [f"create {name}", f"write {name}", f"fsync {name}", f"rename {name}", here]

    assert [step for step, before in zip(steps, ["", *steps], strict=False) if step != before or step == here] == [
        "make directory x",
        f"fsync directory {tmp_path.name}",
        f"make directory {cut.name}",
        "fsync directory x",
        *file("shard-00000-of-00001.chunks"),
        *file("shard-00000-of-00001.json"),
        here,
        "fsync directory x",
        *file("manifest.json"),
    ]


def test_write_part_when_the_directory_is_below_a_file_then_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    directory = CheckpointDirectory(str(tmp_path / "file" / "checkpoints"))
    cut = cut_of(small_spec(), 1)

    with pytest.raises(CheckpointFailed, match=r"file/checkpoints.*: Not a directory"):
        directory.write_part(cut, 0, parts(cut, 0))
    with pytest.raises(CheckpointFailed, match="Not a directory"):
        directory.newest()


@pytest.fixture
def common_place() -> Iterator[Path]:
    """A directory for a test that is not run as root, even if it is: root may write anywhere."""
    with tempfile.TemporaryDirectory() as place:
        user = os.geteuid()
        if user == 0:
            os.chown(place, 65534, -1)
            os.seteuid(65534)
        yield Path(place)
        os.seteuid(user)


def test_store_when_the_directory_is_read_only_then_it_fails_and_the_older_one_stays(common_place):
    directory = CheckpointDirectory(str(common_place), keep=1)
    older, newer = cut_of(small_spec(), 2, 7), cut_of(small_spec(), 2, 8)
    store(directory, older)
    common_place.chmod(0o555)
    try:
        with pytest.raises(CheckpointFailed, match=r"cannot write .*: Permission denied"):
            directory.write_part(newer, 0, parts(newer, 0))
    finally:
        common_place.chmod(0o755)

    assert directory.newest().name == older.name
    assert directory.verify(older.name) == []


def test_newest_when_a_file_cannot_be_read_then_it_fails_and_nothing_is_deleted(tmp_path, monkeypatch):
    """A network that is away for a moment must not make a job go back to an older checkpoint, or delete the newer."""
    directory = CheckpointDirectory(str(tmp_path), keep=1)
    for step in (7, 8):
        store(directory, cut_of(small_spec(), 2, step))

    def away(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", away)
        with pytest.raises(CheckpointFailed, match=r"cannot read .*manifest\.json: Input/output error"):
            directory.newest()
        with pytest.raises(CheckpointFailed, match="Input/output error"):
            directory.collect_garbage()

    assert len(valid_names(directory)) == 2


# -- object stores -----------------------------------------------------------------------------------------------------


class StrictStore(MemoryFileSystem):
    """As object stores are: an object appears when it is complete. As SFTP is: a directory must be made first."""

    protocol = "strict"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    is_away = False

    def _open(self, path, mode="rb", **kwargs):
        if self.is_away:
            raise RuntimeError("cannot connect to the endpoint")
        parent = self._strip_protocol(path).rpartition("/")[0]
        if "w" in mode and parent not in self.pseudo_dirs:
            raise FileNotFoundError(parent)
        return super()._open(path, mode, **kwargs)


@pytest.fixture
def strict_url():
    fsspec.register_implementation("strict", StrictStore, clobber=True)
    StrictStore.store.clear()
    StrictStore.pseudo_dirs[:] = [""]
    StrictStore.is_away = False
    return "strict://bucket/run"


def test_store_when_a_store_has_real_directories_then_they_are_made_and_removed(strict_url):
    directory = CheckpointDirectory(strict_url, keep=1)
    older, newer = cut_of(small_spec(), 2, 7), cut_of(small_spec(), 3, 8)

    store(directory, older)
    store(directory, newer)
    assert directory.collect_garbage() == [older.name]

    check_restored(directory, newer, Layout(newer.spec, 2))
    assert not [name for name in (*StrictStore.store, *StrictStore.pseudo_dirs) if older.name in name]


def test_write_part_when_the_store_is_away_then_its_own_words_are_kept(strict_url):
    directory = CheckpointDirectory(strict_url)
    cut = cut_of(small_spec(), 1)
    StrictStore.is_away = True

    with pytest.raises(CheckpointFailed, match=r"cannot write .*chunks: cannot connect to the endpoint"):
        directory.write_part(cut, 0, parts(cut, 0))
