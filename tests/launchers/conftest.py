"""Real launchers for tests: sshd, SLURM and Ray on this machine, with several hosts each; what is not installed is skipped."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import Process

TIMEOUT_S = 120.0

TRAINING = """
import os, sys, threading
import numpy as np
import psd_client

steps, pause_s = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
with psd_client.connect() as ps:
    params = ps.declare({"w": np.zeros(50_000, np.float32)}, optimizer=psd_client.SGD(lr=1.0))
    print("begins at step", ps.clock, "node", os.environ.get("PSD_NODE", "").rpartition("/")[2], flush=True)
    while ps.clock < steps:
        params = ps.push_pull({"w": np.full(50_000, ps.rank + 1, np.float32)})
        if ps.clock == 3:
            print("trains", flush=True)
            open(sys.argv[3] + str(ps.rank), "w").close() if sys.argv[3:] else None
        threading.Event().wait(pause_s)
print("trained to", params["w"][0], params["w"][-1])
"""
"""So many steps, with a pause after each; makes a file when it trains. The mean gradient of two workers is 1.5."""


def free_port() -> int:
    """A TCP port that nobody uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Until something outside of this process is so; AssertionError names it if it never is."""
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline, f"never: {what}"
        threading.Event().wait(0.05)


def is_open(port: int) -> bool:
    """True if somebody listens there."""
    with socket.socket() as dialling:
        return dialling.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A training script; its arguments: steps, and seconds between two."""
    path = tmp_path / "train.py"
    path.write_text(TRAINING)
    return path


@pytest.fixture
def run() -> Iterator[Callable[..., Process]]:
    """Starts psd-run with arguments; ended whatever the test does."""
    started: list[Process] = []

    def begin(*args: object, environ: dict[str, str] | None = None) -> Process:
        started.append(Process("psd.cli.run", *map(str, args), environ=environ))
        return started[-1]

    yield begin
    for process in started:
        process.close()


class Sshd:
    """Two sshd on this machine, hosts a and b of an ssh configuration.

    Attributes:
        command: how to call ssh. daemons: by host.
    """

    def __init__(self, folder: Path) -> None:
        self.command = f"ssh -F {folder / 'config'}"
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # as its service makes it
        config = [f"Host *\n HostName 127.0.0.1\n IdentityFile {folder / 'user'}\n IdentitiesOnly yes"]
        config.append(f" UserKnownHostsFile {folder / 'known'}\n StrictHostKeyChecking accept-new\n LogLevel ERROR")
        for host in ("a", "b"):
            port = free_port()
            lines = {"Port": port, "ListenAddress": "127.0.0.1", "HostKey": folder / "host", "PidFile": "none"}
            lines |= {"AuthorizedKeysFile": folder / "user.pub", "StrictModes": "no", "UsePAM": "no"}
            (folder / host).write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
            program = shutil.which("sshd") or "/usr/sbin/sshd"
            self.daemons[host] = subprocess.Popen([program, "-D", "-f", folder / host], start_new_session=True)
            config.append(f"Host {host}\n Port {port}")
            wait_until(lambda port=port: is_open(port), "sshd listens")
        (folder / "config").write_text("\n".join(config) + "\n")

    def cut(self, host: str) -> None:
        """End the connections to a host, as if the network had."""
        (connection,) = children(self.daemons[host].pid)
        os.kill(connection, signal.SIGKILL)

    def close(self) -> None:
        """End both."""
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.wait()


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    """Two hosts that ssh reaches."""
    if not (shutil.which("sshd") or Path("/usr/sbin/sshd").exists()) or shutil.which("ssh") is None:
        pytest.skip("OpenSSH's server is not installed (apt install openssh-server)")
    (tmp_path / "ssh").mkdir()
    running = Sshd(tmp_path / "ssh")
    yield running
    running.close()
