"""Real launchers for tests: sshd, SLURM and Ray on this machine, with several hosts each; what is not installed is skipped."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import waiting
from commands import Process, processes
from free_ports import free_port
from waiting import is_open

TIMEOUT_S = 120.0

# Ray's name for "use the loopback address"; read when it is imported.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

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


wait_until = partial(waiting.wait_until, timeout_s=TIMEOUT_S)


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
        started.append(Process("psd.cli.run", *map(str, args), environ=environ, generations=0))
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


class RayNodes:
    """A Ray cluster of three nodes with two CPUs each, beside the head, which has none; a node that was lost is replaced.

    Attributes:
        address: of the cluster.
    """

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.address = self._cluster.address
        for _ in range(3):
            self._add()

    def _add(self) -> None:
        self._cluster.add_node(num_cpus=2, object_store_memory=100 << 20)

    def lose(self, pid: int, *, is_replaced: bool = True) -> None:
        """Kill the node of an actor's process."""
        raylets = {node.all_processes["raylet"][0].process.pid: node for node in self._cluster.worker_nodes}
        self._cluster.remove_node(raylets[parent(pid)], allow_graceful=False)
        if is_replaced:
            self._add()

    def replace(self) -> None:
        """Add the node that `lose` did not."""
        self._add()

    def close(self) -> None:
        """End it."""
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[RayNodes]:
    """The cluster of all tests in a file: it takes a while to start."""
    found = RayNodes()
    yield found
    found.close()


@pytest.fixture
def nodes(ray_nodes: RayNodes) -> Iterator[RayNodes]:
    """The cluster, for a test that may connect to it."""
    import ray

    yield ray_nodes
    ray.shutdown()


def parent(pid: int) -> int:
    """The process that has started another."""
    return int(re.search(r"PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


def servers_of(run_id: str) -> dict[str, int]:
    """Pids of the psd-servers of a job on Ray, by which of how many; the parent of each is the shard's actor."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            words = read(entry / "cmdline").split("\0")
            if run_id in words and "--shard" in words:
                found[words[words.index("--shard") + 1]] = int(entry.name)
    return found


def worker_of(run_id: str, rank: int) -> int:
    """Pid of the program of a worker of psd-run; its parent is the worker's actor."""
    (pid,) = (pid for pid in processes(run_id) if f"PSD_RANK={rank}" in read(Path(f"/proc/{pid}/environ")).split("\0"))
    return pid


def read(path: Path) -> str:
    """Text of a file in /proc; empty if its process has ended."""
    try:
        return path.read_text()
    except OSError:
        return ""


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    """Two hosts that ssh reaches."""
    if not (shutil.which("sshd") or Path("/usr/sbin/sshd").exists()) or shutil.which("ssh") is None:
        pytest.skip("OpenSSH's server is not installed (apt install openssh-server)")
    (tmp_path / "ssh").mkdir()
    running = Sshd(tmp_path / "ssh")
    yield running
    running.close()
