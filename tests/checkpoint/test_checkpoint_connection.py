"""Checkpoints in a store that is one connection: one thread at a time, real directories, a password in its URL."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from helpers_checkpoint import check_restored, cut_of, memory_url, small_spec, store, valid_names

from psd.checkpoint import CheckpointDirectory, objects
from psd.checkpoint.advice import with_advice
from psd.checkpoint.reading import READERS
from psd.contract.config import ConfigError
from psd.contract.errors import CheckpointFailed, PsdError
from psd.contract.layout import Layout

PASSWORD = "pl@nted s3cret"
URL = "sftp-like://anna:pl%40nted%20s3cret@host.example"


class OneConnection(MemoryFileSystem):
    """A file system that breaks as soon as two threads use it at once, as one connection of SFTP does."""

    protocol = "sftp-like"
    store: dict = {}
    pseudo_dirs = [""]
    _user = threading.Lock()
    broken = False
    makes = 0
    makes_that_fail = 0
    """Of this many makings of a directory another process is just ahead."""

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("sftp-like://").rpartition("@")[2].removeprefix("host.example").strip("/")

    @classmethod
    @contextlib.contextmanager
    def used(cls):
        if cls.broken or not cls._user.acquire(blocking=False):
            cls.broken = True
            raise OSError(f"garbage on the connection of anna:{PASSWORD}")
        try:
            os.sched_yield()  # whoever wants to come in between, may
            yield
        finally:
            cls._user.release()

    def ls(self, path, detail=True, **kwargs):
        with self.used():
            return super().ls(path, detail, **kwargs)

    def cat_file(self, path, start=None, end=None, **kwargs):
        with self.used():
            return super().cat_file(path, start, end, **kwargs)

    def _open(self, path, mode="rb", **kwargs):
        if mode == "wb":
            parent = path.rpartition("/")[0]
            if parent not in self.pseudo_dirs:
                raise FileNotFoundError(path)
        return super()._open(path, mode, **kwargs)

    def makedirs(self, path, exist_ok=False):
        cls = type(self)
        cls.makes += 1
        path = self._strip_protocol(path)
        parents = ["/".join(path.split("/")[: n + 1]) for n in range(path.count("/") + 1)]
        if cls.makes <= cls.makes_that_fail:  # of each the next one above is there meanwhile
            self.pseudo_dirs.append(next(p for p in parents if p not in self.pseudo_dirs))
            raise FileExistsError(path)
        self.pseudo_dirs += [p for p in parents if p not in self.pseudo_dirs]


@pytest.fixture(autouse=True)
def _connection(monkeypatch):
    fsspec.register_implementation("sftp-like", OneConnection, clobber=True)
    OneConnection.store.clear()
    OneConnection.pseudo_dirs[:] = [""]
    OneConnection.broken, OneConnection.makes, OneConnection.makes_that_fail = False, 0, 0
    OneConnection.clear_instance_cache()


def test_store_of_one_connection_when_it_is_read_ahead_and_written_to_then_one_thread_at_a_time_uses_it():
    directory = CheckpointDirectory(f"{URL}/run")
    cut = cut_of(small_spec(), 2, 7)
    store(directory, cut)

    check_restored(directory, cut, Layout(cut.spec, 3))
    assert directory.verify(cut.name) == []
    directory.export(directory.load(cut.name), f"{URL}/run/model.safetensors")  # reads in threads what it writes meanwhile

    names = list(directory.storage.files(cut.name))
    with ThreadPoolExecutor(READERS) as pool:
        assert all(found == names for found in pool.map(lambda _: list(directory.storage.files(cut.name)), range(8 * READERS)))
    assert not OneConnection.broken


@pytest.mark.parametrize("races", [1, 2, 3])
def test_store_with_directories_when_other_shards_make_them_at_the_same_moment_then_no_checkpoint_is_lost(races):
    OneConnection.makes_that_fail = races

    store(CheckpointDirectory(f"{URL}/some/run"), cut := cut_of(small_spec(), 2, 7))

    assert [info.name for info in CheckpointDirectory(f"{URL}/some/run").checkpoints()] == [cut.name]


def test_store_when_a_directory_cannot_be_made_then_says_why(monkeypatch):
    def refuse(self, path, exist_ok=False):
        raise OSError("no room")

    monkeypatch.setattr(OneConnection, "makedirs", refuse)

    with pytest.raises(CheckpointFailed, match=r"cannot write /run/.*: no room"):
        CheckpointDirectory(f"{URL}/run").check()


def test_secrets_of_a_url_when_a_store_fails_then_are_in_no_error_and_no_traceback(caplog):
    """What is said comes from a package that has the password."""
    directory = CheckpointDirectory(f"{URL}/run?sig=another-s3cret")
    OneConnection.broken = True

    with pytest.raises(PsdError) as raised:
        directory.check()
    logging.getLogger("psd").error("a checkpoint failed: %s", raised.value, exc_info=raised.value)

    said = caplog.text + "".join(traceback.format_exception(raised.value)) + directory.location
    assert "garbage on the connection of anna:***" in said
    assert not [secret for secret in (PASSWORD, "pl%40nted", "another-s3cret") if secret in said]


def test_secrets_of_a_url_when_no_store_can_be_had_then_are_in_no_error_and_no_traceback(monkeypatch):
    def refuse(self, *args, **options):
        raise OSError(f"cannot log in to {URL} with {PASSWORD!r}")

    monkeypatch.setattr(OneConnection, "__init__", refuse)

    with pytest.raises(ConfigError) as raised:
        CheckpointDirectory(f"{URL}/run")

    said = "".join(traceback.format_exception(raised.value))
    assert "sftp-like://host.example/run: cannot log in" in said
    assert PASSWORD not in said
    assert "pl%40nted" not in said


def test_secrets_when_a_url_has_an_at_sign_in_its_password_then_no_part_of_it_is_shown():
    with pytest.raises(ConfigError) as raised:
        CheckpointDirectory("nosuch://user:se@cret@host/x?key=hidden")
    assert "nosuch://host/x?***" in str(raised.value)
    assert not [part for part in ("se@", "cret", "hidden", "user") if part in str(raised.value)]
    assert CheckpointDirectory(memory_url()).location.startswith("memory://checkpoints-")


def test_store_when_it_falls_silent_then_a_request_fails_in_time_and_the_next_one_has_another_connection(monkeypatch):
    """The packages that fsspec uses wait for minutes, or for ever. tests/stores does this with real servers."""
    directory = CheckpointDirectory(f"{URL}/run")
    store(directory, cut := cut_of(small_spec(), 2, 7))
    may_end, silent = threading.Event(), []

    def never(self, path, *args, **options):
        if not silent or self is silent[0]:
            silent[:] = [self]
            may_end.wait()
        return MemoryFileSystem.ls(self, path, *args, **options)

    monkeypatch.setattr(OneConnection, "ls", never)
    with monkeypatch.context() as patch:
        patch.setattr(objects, "ANSWER_S_MAX", 0.05)
        with pytest.raises(CheckpointFailed, match=r"cannot list /run: no answer in 0\.05 s"):
            directory.checkpoints()

    assert valid_names(directory) == [cut.name]
    may_end.set()


@pytest.mark.parametrize(
    ("url", "error", "expected"),
    [
        ("s3://bucket/run", RuntimeError("Unable to locate credentials"), "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ("gs://bucket/run", OSError("Forbidden: https://storage\nno access"), "GOOGLE_APPLICATION_CREDENTIALS"),
        ("simplecache::sftp://host/run", RuntimeError("Authentication failed."), "FSSPEC_SFTP_KEY_FILENAME"),
        ("sftp://host/run", PermissionError(13, "Permission denied"), ""),
        ("hdfs://host/run", RuntimeError("Authentication failed"), ""),
        ("s3://bucket/run", OSError("no room"), ""),
    ],
)
def test_refusal_of_a_store_when_somebody_is_not_known_there_then_says_which_settings_say_who_asks(url, error, expected):
    found = with_advice(str(error), url, error)

    assert expected in found
    assert found.startswith(str(error).rstrip("."))
    assert (found == str(error)) == (not expected)
