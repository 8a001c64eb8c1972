"""Checkpoints where the disk is full or read-only, or time is short: training goes on, and status tells."""

from __future__ import annotations

import contextlib
import errno
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import crash_job
import pytest
from chaos import assert_same_bits, final_state
from commands import completed
from shard_processes import ShardProcess, servers_of, status_at

from psd.checkpoint import CheckpointDirectory
from psd.checkpoint.cut import CheckpointState
from psd.contract.config import ServerConfig
from psd.rim.server import ShardServer

DISK_BYTES = 12 << 20
"""A checkpoint of the job takes 2 MB; three are kept, and removed only when the next one is complete."""


@contextmanager
def training(servers: str) -> Iterator[crash_job.Stop]:
    """A job that goes on for as long as the context."""
    stop = crash_job.Stop()
    done = threading.Event()
    thread = threading.Thread(target=crash_job.run, args=(servers, stop, "fast", done.wait))
    thread.start()
    try:
        yield stop
    finally:
        done.set()
        thread.join(100)
        assert not thread.is_alive()


def wait_until(fact: Callable[[], bool], stop: crash_job.Stop, steps: int = 2000) -> None:
    """While training goes on."""
    begun = stop.clock
    while not fact():
        assert stop.clock < begun + steps, "it never came true"
        stop.wait_steps(1, 5)


def valid_names(url: str) -> list[str]:
    return [info.name for info in CheckpointDirectory(url).checkpoints() if info.state is CheckpointState.VALID]


def shown_by_psdctl(shards: list[ShardProcess]) -> str:
    shown = completed("psd.cli.psdctl", "status", "--servers", servers_of(shards))
    assert shown.returncode == 0
    return shown.stdout


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(path)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here; injected errors are tested everywhere")
    if mounted.returncode:
        pytest.skip(f"may not mount, injected errors are tested everywhere: {mounted.stderr}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.process
@pytest.mark.parametrize("trouble", ["full", pytest.param("read-only", marks=pytest.mark.chaos)])
def test_when_the_disk_takes_no_more_then_training_goes_on_and_status_tells(
    shard_processes: Callable[..., list[ShardProcess]], small_disk: Path, trouble: str
) -> None:
    """The last good one stays, whole; when there is room again, the next one succeeds and the error is gone."""
    url = str(small_disk / "checkpoints")
    ballast = small_disk / "ballast"
    shards = shard_processes(2, "--checkpoint-dir", url, "--checkpoint-steps", "5")

    def errors() -> list[str]:
        return [shard.status().checkpoint_error for shard in shards]

    with training(servers_of(shards)) as stop:
        wait_until(lambda: bool(valid_names(url)), stop)
        if trouble == "full":
            _fill(ballast)
        else:
            subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        words = {"full": "No space left on device", "read-only": "Read-only file system"}[trouble]
        # On a disk that is just full one shard may store its part where the other fails, which takes its error back.
        wait_until(lambda: all(words in error for error in errors()), stop)
        assert words in shown_by_psdctl(shards)
        survivors = valid_names(url)
        assert survivors
        assert CheckpointDirectory(url).verify(survivors[0]) == []
        reached = stop.clock
        wait_until(lambda: stop.clock > reached + 20, stop)
        if trouble == "full":
            ballast.unlink()
        else:
            subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
        wait_until(lambda: valid_names(url)[0] > survivors[0] and not any(errors()), stop)
        assert words not in shown_by_psdctl(shards)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


class Broken:
    """A crash point that refuses to write files while it `is_on`."""

    def __init__(self, number: int, words: str) -> None:
        self.is_on = False
        self._error = OSError(number, words)

    def __call__(self, step: str) -> None:
        if self.is_on and step.startswith("write "):
            raise self._error


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "No space left on device"),
        pytest.param(errno.EIO, "Input/output error", marks=pytest.mark.chaos),
    ],
)
def test_when_writing_fails_then_training_goes_on_and_status_tells(
    broken_cluster: Callable[[Broken, str], list[ShardServer]], tmp_path: Path, number: int, words: str
) -> None:
    """As above, with the error injected: needs no privileges."""
    broken = Broken(number, words)
    url = str(tmp_path / "checkpoints")
    servers = broken_cluster(broken, url)

    def errors() -> list[str]:
        return [status_at(server.address).checkpoint_error for server in servers]

    with training(",".join(server.address for server in servers)) as stop:
        wait_until(lambda: bool(valid_names(url)), stop)
        broken.is_on = True
        wait_until(lambda: all(words in error for error in errors()), stop)
        survivors = valid_names(url)
        assert CheckpointDirectory(url).verify(survivors[0]) == []
        reached = stop.clock
        wait_until(lambda: stop.clock > reached + 10, stop)
        broken.is_on = False
        wait_until(lambda: valid_names(url)[0] > survivors[0] and not any(errors()), stop)


@pytest.fixture
def broken_cluster() -> Iterator[Callable[[Broken, str], list[ShardServer]]]:
    """Two shards whose file operations meet a crash point."""
    started: list[ShardServer] = []

    def start(broken: Broken, url: str) -> list[ShardServer]:
        for index in range(2):
            config = ServerConfig(index, 2, listen="127.0.0.1:0", checkpoint_dir=url, checkpoint_steps=5)
            started.append(ShardServer(config, crash_point=broken))
            started[-1].start()
        return started

    yield start
    for server in started:
        server.stop()


@pytest.mark.process
@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.chaos), 1])
def test_sigterm_when_a_job_trains_then_a_checkpoint_is_stored_within_the_grace_time(
    shard_processes: Callable[..., list[ShardProcess]], tmp_path: Path, first: int
) -> None:
    """Whichever shard is told first; the job goes on from it on shards that know nothing else, to the same bits."""
    url = str(tmp_path / "checkpoints")
    shards = shard_processes(2, "--checkpoint-dir", url, "--grace", "60")

    def end_and_begin_anew() -> None:
        stop.wait_steps(10, 60)
        for shard in (shards[first], shards[1 - first]):
            shard.signal(signal.SIGTERM)
        begun = time.monotonic()
        assert [shard.wait(200) for shard in shards] == [0, 0]
        assert time.monotonic() - begun < 60
        (name,) = valid_names(url)
        assert CheckpointDirectory(url).load(name).step >= 10
        for shard in shards:
            shard.lose_state()
            shard.start()

    stop = crash_job.Stop()
    crash_job.run(servers_of(shards), stop, "exact", end_and_begin_anew)
    disturbed = final_state(shards, url)
    others = shard_processes(2, "--checkpoint-dir", str(tmp_path / "undisturbed"))
    crash_job.run(servers_of(others), crash_job.Stop(stop.clock), "exact")

    assert_same_bits(disturbed, final_state(others, str(tmp_path / "undisturbed")))


def test_checkpoint_secs_when_a_job_trains_then_checkpoints_come_by_time(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """Each further than the one before, and only as many kept as are asked for."""
    url = str(tmp_path / "checkpoints")
    running = cluster(2, checkpoint_dir=url, checkpoint_secs=0.05, checkpoint_keep=2)

    with training(running.servers) as stop:
        seen: set[str] = set()
        wait_until(lambda: seen.update(valid_names(url)) or len(seen) >= 4, stop)

    assert len(valid_names(url)) <= 3  # the newest, before the oldest has been removed
