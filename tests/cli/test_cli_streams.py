"""Standard streams as they may be found: closed, full, of another locale, not blocking. psd/cli/words/terminal.py."""

import io
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from psd.cli import run
from psd.cli.hosts.launcher import Launcher
from psd.cli.processes.wakeup_pipe import Wakeups
from psd.cli.words import terminal

RUN = [sys.executable, "-m", "psd.cli.run"]


def test_write_when_the_descriptor_does_not_block_then_all_of_it_arrives():
    ours, its = os.pipe()
    os.set_blocking(its, False)
    received = []

    with os.fdopen(ours, "rb") as reader, os.fdopen(its, "w") as stream:
        reading = threading.Thread(target=lambda: received.append(reader.read(200_000)))
        reading.start()
        for letter in b"xy":
            terminal.WholeWriter(stream).write(bytes([letter]) * 100_000)
        reading.join()

    assert received == [b"x" * 100_000 + b"y" * 100_000]


def test_launcher_when_its_output_is_not_read_then_it_hears_a_signal_all_the_same(monkeypatch):
    """A pager that waits for its own reader, say."""
    monkeypatch.setattr(terminal, "ROOM_S", 0.0)
    ours, its = os.pipe()
    with os.fdopen(ours, "rb"), os.fdopen(its, "w") as stream, Wakeups([signal.SIGTERM]) as wakeups:
        monkeypatch.setattr(sys, "stderr", stream)
        launcher = Launcher(run.parse(["true"], {}))
        launcher._wakeups = wakeups
        signal.raise_signal(signal.SIGTERM)
        launcher.say("x" * 200_000)

        assert wakeups.read() == [signal.SIGTERM]
        launcher.say("nobody waits for room any more")
    wakeups._reader.close()
    wakeups._writer.close()


def test_show_when_the_locale_lacks_a_character_then_it_is_escaped(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)

    terminal.prepare_streams()
    terminal.show("step 3 · ▁▂")

    assert stream.buffer.getvalue() == rb"step 3 \xb7 \u2581\u2582" + b"\n"


@pytest.mark.parametrize("given", ["closed", "no text"])
def test_standard_input_when_it_is_closed_or_no_text_then_it_can_be_read(monkeypatch, given):
    """A shard reads it for its launcher, which may be a program of the user's, or a script with <&-."""
    stream = None if given == "closed" else io.TextIOWrapper(io.BytesIO(b"\xff\xfe\nstarting 1\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stream)
    if stream is None:
        monkeypatch.setattr("builtins.open", lambda fd, **_: io.StringIO("") if fd == 0 else None)

    terminal.prepare_streams()

    assert list(sys.stdin) == ([] if stream is None else ["\\xff\\xfe\n", "starting 1\n"])


@pytest.mark.process
def test_job_when_the_disk_of_its_output_is_full_then_it_goes_on(tmp_path):
    """In a directory whose name is no text."""
    state_dir = os.fsencode(tmp_path) + b"/state-\xff"
    command = [*RUN, b"--state-dir=" + state_dir, "--log-dir", tmp_path, "--", "sh", "-c", "echo done; exit 3"]

    with Path("/dev/full").open("wb") as full:
        job = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)

    assert (job.returncode, (tmp_path / "worker-0.log").read_text()) == (3, "done\n")
    assert job.stderr.count(b"cannot write the output: No space left on device; the job goes on") == 1
    assert b"SIGPIPE" not in job.stderr
    assert b"Traceback" not in job.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["psd.cli.server", "--shard", "0/1", "--listen", "127.0.0.1:0", "--exit-on-eof"], 0),
        (["psd.cli.psdctl", "status", "--servers", "127.0.0.1:1", "--timeout", "0.2"], 1),
    ],
)
def test_command_when_the_disk_of_its_output_is_full_then_it_says_so_and_ends_as_it_would(command, status):
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", *command], stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, check=False
        )

    assert done.returncode == status
    assert b"No space left on device" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.process
def test_job_when_no_standard_stream_is_open_then_it_runs(tmp_path):
    job = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *RUN, "--log-dir", tmp_path, "--", "sh", "-c", "echo done; exit 3"],
        check=False,
    )

    assert (job.returncode, (tmp_path / "worker-0.log").read_text()) == (3, "done\n")


@pytest.mark.process
def test_job_when_it_has_more_processes_than_files_may_be_open_then_the_limit_is_raised(tmp_path):
    """Each has a pipe and a log file."""
    job = subprocess.run(
        ["sh", "-c", 'ulimit -S -n 40; exec "$@"', "sh", *RUN, "--workers", "25", "--log-dir", tmp_path, "--", "true"],
        capture_output=True,
        check=False,
    )

    assert (job.returncode, b"Too many open files" in job.stderr) == (0, False)


def test_main_when_it_is_interrupted_before_the_job_has_begun_then_that_is_its_status(monkeypatch):
    """While the name of a rendezvous is looked up, say."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(socket, "getaddrinfo", interrupt)

    assert run.main(["--nnodes", "2", "--rendezvous", "host:1", "true"]) == 130
