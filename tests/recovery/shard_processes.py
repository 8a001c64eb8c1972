"""Real psd-server processes that tests kill and start again at the same address; forked from one that has psd loaded."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import grpc
from free_ports import free_port
from loaded_programs import Program

from psd.v1 import control_pb2, control_pb2_grpc

HOST = "127.0.0.1"
READY = re.compile(r"ready at (\S+)")


class ShardProcess:
    """One shard with its own state directory and ports; `start` again after `kill` is the same shard in another life."""

    def __init__(self, index: int, count: int, directory: Path, *flags: str) -> None:
        self.index = index
        self.count = count
        self.directory = directory
        self.address = f"{HOST}:{free_port()}"
        self.bulk_port = free_port()
        self._flags = flags
        self._process: Program | None = None

    def start(self, crash_point: str = "") -> None:
        """Returns when it serves. `crash_point`: PSD_CRASH_POINT of this life only."""
        self.begin_start(crash_point)
        self.end_start()

    def begin_start(self, crash_point: str = "") -> None:
        """Start it; to be followed by `end_start`, so that several start at once."""
        command = ["-m", "psd.cli.server", "--shard", f"{self.index}/{self.count}", "--listen", self.address]
        command += [
            "--bulk-port",
            str(self.bulk_port),
            "--state-dir",
            str(self.directory),
            "--exit-when-done",
            "--log-level",
            "error",
            *self._flags,
        ]
        self._process = Program(command, env=os.environ | {"PSD_CRASH_POINT": crash_point})

    def end_start(self) -> None:
        """Returns when it serves."""
        assert self._process is not None
        line = self._process.stdout.readline()
        found = READY.search(line)
        assert found is not None, f"shard {self.index} did not start: {line!r}, status {self._process.wait(100)}"
        self.address = found[1]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """True if it has ended by itself, or by its crash point."""
        assert self._process is not None
        return self._process.poll() is not None

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def signal(self, number: int) -> None:
        """Send a signal. After SIGSTOP, returns when it stands still: until then, its other threads may answer calls."""
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, timeout_s: float = 60) -> int:
        """The exit status, once it has ended by itself."""
        assert self._process is not None
        status = self._process.wait(timeout_s)
        self._process.close()
        self._process = None
        return status

    def lose_state(self) -> None:
        """Lose the shard's state, as if its machine had died, too."""
        shutil.rmtree(self.directory)

    def status(self) -> control_pb2.StatusReply:
        return status_at(self.address)

    def checkpoint(self) -> str:
        """Take a checkpoint; its name."""
        with grpc.insecure_channel(self.address) as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            return stub.Checkpoint(control_pb2.CheckpointRequest(), timeout=240).name

    def close(self) -> None:
        if self._process is not None:
            self.kill()


def servers_of(shards: Sequence[ShardProcess]) -> str:
    """Addresses of shards in the form that clients take."""
    return ",".join(shard.address for shard in shards)


def status_at(address: str) -> control_pb2.StatusReply:
    """Status of a shard."""
    with grpc.insecure_channel(address) as channel:
        return control_pb2_grpc.ControlServiceStub(channel).Status(control_pb2.StatusRequest(), timeout=100)
