"""What a store must do with single files: keep the old one until the new one is whole, and answer in time or fail."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading

import fsspec
import pytest
from servers import children, sftp_server

from psd.checkpoint import objects
from psd.checkpoint.opening import open_storage
from psd.contract.config import ConfigError
from psd.contract.errors import CheckpointFailed

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of aiohttp, that gcsfs sends bytes

PIECE = bytes(range(256)) * 4096
MANY = 12
"""Pieces of a file that s3fs and gcsfs send in several parts."""


@pytest.fixture
def parts(monkeypatch):
    """Files are sent in parts of 5 MiB, the smallest that stores take."""
    fsspec.config.conf.setdefault("s3", {})
    monkeypatch.setitem(fsspec.config.conf["s3"], "default_block_size", 5 << 20)
    monkeypatch.setenv("FSSPEC_S3_DEFAULT_BLOCK_SIZE", str(5 << 20))


def broken(pieces):
    yield from [PIECE] * pieces
    raise OSError("the disk from which it comes is broken")


@pytest.mark.parametrize("pieces", [0, 1, MANY])
def test_file_when_a_newer_one_is_given_up_half_way_then_the_old_one_stays_and_nothing_else(place, parts, pieces):
    """A shard that wrote a manifest that another had completed, or an export that met a damaged byte, removed the old file."""
    store = open_storage(place)
    store.write("a", "file", [b"old"])

    with pytest.raises(CheckpointFailed, match="the disk from which it comes is broken"):
        store.write("a", "file", broken(pieces))

    assert store.read("a", "file") == b"old"
    assert store.files("a") == {"file": 3}


@pytest.mark.parametrize("pieces", [0, 1, MANY])
def test_file_when_it_is_given_up_half_way_then_there_is_none(place, parts, pieces):
    store = open_storage(place)

    with pytest.raises(CheckpointFailed, match="the disk from which it comes is broken"):
        store.write("a", "file", broken(pieces))

    assert store.files("a") == {}


def test_file_when_its_writer_is_killed_half_way_then_the_old_one_stays(place, parts):
    store = open_storage(place)
    store.write("a", "file", [b"old"])
    program = f"""
        import os, signal
        from psd.checkpoint.opening import open_storage
        def pieces():
            for _ in range({MANY}):
                yield bytes(1 << 20)
            os.kill(os.getpid(), signal.SIGKILL)
        open_storage({place!r}).write("a", "file", pieces())
    """

    command = [sys.executable, "-c", textwrap.dedent(program)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert store.read("a", "file") == b"old"


def test_file_when_it_has_several_parts_then_it_is_read_back_whole_and_in_pieces(place, parts):
    store = open_storage(place)

    store.write("a", "file", [PIECE] * MANY)

    assert store.files("a") == {"file": MANY * len(PIECE)}
    assert store.read("a", "file") == PIECE * MANY
    assert store.read("a", "file", 5 * len(PIECE) - 3, 5 * len(PIECE) + 4) == PIECE[-3:] + PIECE[:4]
    with pytest.raises(FileNotFoundError):
        store.read("a", "other")
    store.remove("a", "file")
    store.remove("a", "file")
    store.remove_directory("a")
    assert store.directories() == []


def test_sftp_when_a_server_cannot_rename_over_a_file_then_a_newer_file_replaces_the_old_one(tmp_path, use):
    """OpenSSH can; many others cannot."""
    server = sftp_server(tmp_path, "-P", "posix-rename")
    use(server)
    store = open_storage(f"{server.root}/run")

    store.write("a", "file", [b"old"])
    store.write("a", "file", [b"new"])

    assert store.read("a", "file") == b"new"
    assert store.files("a") == {"file": 3}
    server.close()


def test_sftp_when_its_connection_is_lost_then_one_operation_fails_and_the_next_ones_have_another(server_of, use, tmp_path):
    """The shard's later checkpoints failed, all of them."""
    server = server_of("sftp")
    use(server)
    store = open_storage(f"{server.root}/{tmp_path.name}")
    store.write("a", "file", [b"old"])

    for connection in children(server.process.pid):
        os.kill(connection, signal.SIGKILL)

    with pytest.raises(CheckpointFailed):
        store.read("a", "file")
    assert store.read("a", "file") == b"old"
    store.write("a", "file", [b"new"])
    assert store.read("a", "file") == b"new"


@pytest.fixture
def silent():
    """The port of a server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield listener.getsockname()[1]


def test_store_when_its_server_never_answers_then_fails_in_time_and_says_so(server, silent, monkeypatch):
    """gcsfs waits for ever, s3fs for a quarter of an hour."""
    url, _ = server.elsewhere(silent)
    for settings in server.settings.values():
        for name in settings.keys() & {"endpoint_url"}:
            monkeypatch.setitem(settings, name, f"http://127.0.0.1:{silent}")
    monkeypatch.setattr(objects, "ANSWER_S_MAX", 2.0)

    with pytest.raises((CheckpointFailed, ConfigError), match="no answer in 2 s") as raised:
        open_storage(f"{url}/run").directories()

    assert "run" in str(raised.value)


def test_store_when_an_sftp_server_falls_silent_then_fails_in_time_and_goes_on_with_another_connection(
    server_of, use, tmp_path, monkeypatch
):
    server = server_of("sftp")
    use(server)
    store = open_storage(f"{server.root}/{tmp_path.name}")
    store.write("a", "file", [b"old"])
    connections = children(server.process.pid)
    monkeypatch.setattr(objects, "ANSWER_S_MAX", 2.0)

    for connection in connections:
        os.kill(connection, signal.SIGSTOP)
    try:
        with pytest.raises(CheckpointFailed, match="no answer in 2 s"):
            store.read("a", "file")
        monkeypatch.setattr(objects, "ANSWER_S_MAX", 100.0)
        assert store.read("a", "file") == b"old"
    finally:
        for connection in connections:
            os.kill(connection, signal.SIGCONT)
    assert [thread for thread in threading.enumerate() if thread.name == "psd-store" and not thread.daemon] == []


def test_file_when_it_is_written_from_another_one_in_the_same_store_then_both_go_on(place):
    """With paramiko an export into the store of the checkpoint waited for ever: it had read answers while it read a file."""
    store = open_storage(place)
    store.write("a", "file", [PIECE] * MANY)

    def copied():
        for n in range(MANY):
            yield store.read("a", "file", n * len(PIECE), (n + 1) * len(PIECE))

    store.write("a", "copy", copied())

    assert store.read("a", "copy") == PIECE * MANY
