"""The processes of a benchmark: shards of psd, and others that take turns (peers/turns.py); all of them end with the benchmark.

They end when they are stopped, when their standard input ends, and, on Linux, with their parent, whatever kills that. Knows
nothing of what is measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import multiprocessing
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc

from psd.cli.processes import malloc
from psd.contract.environment import VARIABLES
from psd.v1 import control_pb2, control_pb2_grpc

PEERS = Path(__file__).with_name("peers")
START_S = 120.0
TURN_S = 600.0
END_S = 15.0
FORKS = multiprocessing.get_context("forkserver")
"""Processes that begin with what the benchmark's script has loaded, such as torch: one process loads it for all."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_CPUCLOCK_SCHED = 2


class ProcessFailed(RuntimeError):
    """A process ended, or did not answer; the message has the end of its standard error."""


class Refused(ProcessFailed):
    """A process cannot do its task here, and says why; no defect."""


@contextlib.contextmanager
def cleanly() -> Iterator[ExitStack]:
    """A stack of all that must be undone: at the end, on Ctrl-C, SIGTERM or SIGHUP; further signals do not disturb that."""

    def end(signum: int, _: object) -> None:
        raise SystemExit(128 + signum)

    for signum in _SIGNALS:
        signal.signal(signum, end)
    stack = ExitStack()
    try:
        yield stack
    finally:
        for signum in _SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        stack.close()
        for signum in _SIGNALS:
            signal.signal(signum, signal.SIG_DFL)


def environment(threads: int = 0) -> dict[str, str]:
    """The environment of a worker: the benchmark's own without psd's variables, psd-run's malloc settings, and that many OpenMP
    threads."""
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return {**inherited, **malloc.environment(), **({"OMP_NUM_THREADS": str(threads)} if threads else {})}


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used so far, threads that have ended included; to the nanosecond, unlike /proc."""
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


def pin(pid: int, core: int) -> None:
    """Keep a process's threads, and those that they will start, on one core."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(task.name), {core})


def resident_bytes(pid: int) -> int:
    """Memory that a process has touched, including shared memory."""
    return _status_bytes(pid, "VmRSS")


def private_bytes(pid: int) -> int:
    """Memory that a process has touched and no other can see."""
    return _status_bytes(pid, "RssAnon")


def attached_bytes(pid: int) -> int:
    """Part of a shard's resident_bytes: memory that workers share with it."""
    total, is_attached = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:  # the addresses of the next mapping
            is_attached = "memfd:psd-worker" in line
        elif is_attached and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def descriptors(pid: int) -> int:
    """Number of open descriptors of a process."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def _status_bytes(pid: int, field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None, f"process {pid} has ended"
    return int(found[1]) << 10


def end_with_benchmark() -> None:
    """Have this process, one of FORKS, end when the benchmark has, whatever killed that."""
    benchmark = multiprocessing.parent_process()
    assert benchmark is not None, "this is the benchmark"

    def watch() -> None:
        benchmark.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _end_with_parent(signum: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)


class Process:
    """A child in a session of its own, with pipes; its standard error goes to a file.

    Attributes:
        name: for messages. pid: its process.

    Args:
        last_signal: what it gets when the benchmark itself is killed.
    """

    def __init__(self, name: str, command: Sequence[str], environ: dict[str, str], last_signal: int) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            start_new_session=True,
            preexec_fn=functools.partial(_end_with_parent, last_signal),  # noqa: PLW1509 - the benchmark's own threads do not run while it starts children
        )
        self.pid = self._process.pid
        self._read = b""

    def read_line(self, timeout_s: float) -> str:
        """The next line on its standard output."""
        assert self._process.stdout is not None
        until = time.monotonic() + timeout_s
        while b"\n" not in self._read:
            left_s = until - time.monotonic()
            if left_s <= 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                raise ProcessFailed(f"{self.name}: no answer in {timeout_s:g} s{self._last_words()}")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise ProcessFailed(f"{self.name}: ended{self._last_words()}")
            self._read += data
        line, self._read = self._read.split(b"\n", 1)
        return line.decode()

    def write_line(self, text: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the next read says why it has gone
            self._process.stdin.write(text.encode() + b"\n")

    def signal(self, signum: int) -> None:
        """Signal the process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signum)

    def wait(self, timeout_s: float) -> bool:
        """True if the process has ended by then."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def check(self) -> None:
        """Raise ProcessFailed, with its last words, if it has ended."""
        if self.wait(0):
            raise ProcessFailed(f"{self.name}: ended with status {self._process.returncode}{self._last_words()}")

    def begin_end(self) -> None:
        """Tell it that no more comes."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def end(self, timeout_s: float = END_S) -> None:
        """Wait until it is gone, or kill it. Idempotent."""
        self.begin_end()
        self.wait(timeout_s)
        self.signal(signal.SIGKILL)
        self._process.wait()

    def _last_words(self) -> str:
        self.wait(0.5)
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        return "".join(f"\n    {line[:300]}" for line in lines[-3:])


class Peer(Process):
    """A script of peers/, ready to take turns.

    Args:
        script: its name there. arguments: what it is told. python: its interpreter. prefix: of its command line.
    """

    def __init__(
        self,
        script: str,
        arguments: dict[str, Any],
        *,
        threads: int = 0,
        python: str = sys.executable,
        prefix: Sequence[str] = (),
    ) -> None:
        command = [*prefix, python, str(PEERS / f"{script}.py"), json.dumps(arguments)]
        super().__init__(script, command, environment(threads), signal.SIGTERM)  # Ray clears up after itself then

    def ready(self) -> dict[str, Any]:
        """Facts from its ready message; Refused if it never will be ready."""
        said = dict(json.loads(self.read_line(START_S)))
        if "refused" in said:
            raise Refused(said["refused"])
        return said

    def ask(self, **request: Any) -> None:
        """Give it a turn; `answer` waits for its end."""
        self.write_line(json.dumps(request))

    def answer(self) -> dict[str, Any]:
        """The answer to the request."""
        return dict(json.loads(self.read_line(TURN_S)))


class Shard:
    """A psd-server process.

    Args:
        flags: further ones. listen: HOST:PORT, port 0 for a free one. prefix: of its command line.

    Attributes:
        address: where it serves, when it does.
    """

    def __init__(
        self, *flags: str, index: int = 0, count: int = 1, listen: str = "127.0.0.1:0", prefix: Sequence[str] = ()
    ) -> None:
        self.address = listen
        self._name = f"shard {index}"
        self._before = [*prefix, sys.executable, "-m", "psd.cli.server", "--shard", f"{index}/{count}"]
        self._flags = ("--exit-when-done", "--log-level", "error", *flags)
        self._process: Process | None = None

    def start(self) -> None:
        """Start the shard and return at once; see `wait_ready`."""
        command = [*self._before, "--listen", self.address, *self._flags]
        self._process = Process(self._name, command, environment(), signal.SIGKILL)

    def wait_ready(self) -> None:
        """Return when the shard serves."""
        line = self._started.read_line(START_S)
        found = re.search(r"ready at (\S+)", line)
        assert found is not None, f"the shard said {line!r}"
        self.address = found[1]

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._started.pid

    @property
    def _started(self) -> Process:
        assert self._process is not None, "the shard was not started"
        return self._process

    def signal(self, signum: int) -> None:
        """Send a signal to the process."""
        self._started.signal(signum)

    def check(self) -> None:
        """Raise ProcessFailed, with its last words, if it has ended."""
        self._started.check()

    def kill(self) -> None:
        """Kill with SIGKILL; return when it is gone."""
        self._started.end(0)

    def end(self) -> None:
        """Wait until it ends by itself, which it does when its workers have left; else end it, at last by force."""
        if self._process is not None and not self._process.wait(5):
            self._process.signal(signal.SIGCONT)
            self._process.signal(signal.SIGTERM)
            self._process.end()

    def status(self) -> control_pb2.StatusReply:
        """The output of psdctl status."""
        with grpc.insecure_channel(self.address) as channel:
            return control_pb2_grpc.ControlServiceStub(channel).Status(control_pb2.StatusRequest(), timeout=60)

    def checkpoint(self) -> str:
        """Take a checkpoint while the job trains; return its name."""
        with grpc.insecure_channel(self.address) as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            return stub.Checkpoint(control_pb2.CheckpointRequest(), timeout=600).name


class Relay(Shard):
    """A relay of these servers.

    Args:
        flags, prefix: as of a shard.
    """

    def __init__(self, servers: str, *flags: str, prefix: Sequence[str] = ()) -> None:
        super().__init__()
        self._name = f"relay of {servers}"
        self._before = [*prefix, sys.executable, "-m", "psd.cli.server", "--relay-of", servers]
        self._flags = ("--log-level", "error", *flags)

    def end(self) -> None:
        """End it, which it does not do by itself."""
        if self._process is not None:
            self._process.signal(signal.SIGTERM)
            self._process.end()


def start_all(stack: ExitStack, shards: Sequence[Shard]) -> None:
    """Start shards side by side, to be ended by the stack; return when all of them serve."""
    for shard in shards:
        shard.start()
        stack.callback(shard.end)
    for shard in shards:
        shard.wait_ready()


def all_ready(stack: ExitStack, peers: Sequence[Peer]) -> list[dict[str, Any]]:
    """Wait until all peers are ready, and have the stack end them; what each has said of itself."""
    for peer in peers:
        stack.callback(peer.end)
    for peer in peers:
        stack.callback(peer.begin_end)  # before any is waited for
    return [peer.ready() for peer in peers]


def free_ports(count: int) -> list[int]:
    """Free ports for processes that must be told beforehand; of those that Linux gives to nobody else meanwhile."""
    found: list[int] = []
    for port in random.sample(range(20_000, 32_000), 12_000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            break
    return found
