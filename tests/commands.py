"""Real processes of psd's commands for tests: their output is awaited line by line, and nothing of them is left."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from loaded_programs import Program

from psd.cli.processes.state_directories import private_path

TIMEOUT_S = 100.0

# A shell that runs the tests in the background has them ignore SIGINT, and processes that they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


class Process:
    """A command of psd with its output, standard error included; `loads` and `generations` are those of Program, so that the
    Python programs that it starts are forked, unless told otherwise."""

    def __init__(
        self, module: str, *args: str, environ: dict[str, str] | None = None, loads: str = "", generations: int = 1
    ) -> None:
        self._process = Program(
            ["-m", module, *args],
            env={**os.environ, **(environ or {})},
            stderr=subprocess.STDOUT,
            start_new_session=True,
            loads=loads,
            generations=generations,
        )
        self.pid = self._process.pid
        self.lines: list[str] = []
        self._coming: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._coming.put(line.rstrip("\n"))
        self._coming.put(None)

    @property
    def output(self) -> str:
        """The output awaited so far."""
        return "\n".join(self.lines)

    def line(self, pattern: str, timeout_s: float = TIMEOUT_S) -> re.Match[str]:
        """Wait for a line that has the pattern."""
        deadline = time.monotonic() + timeout_s
        while (line := self._next(deadline, f"no line {pattern!r} in time")) is not None:
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"the output ended without a line {pattern!r}:\n{self.output}")

    def end(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for the end of the output, which is that of psd-run's watchdog, too, and of the process; its exit status."""
        deadline = time.monotonic() + timeout_s
        while self._next(deadline, "did not end in time") is not None:
            pass
        return self._process.wait(TIMEOUT_S)

    def _next(self, deadline: float, complaint: str) -> str | None:
        """Wait for a line of the output; None at its end."""
        try:
            line = self._coming.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise AssertionError(f"{complaint}; so far:\n{self.output}") from None
        if line is not None:
            self.lines.append(line)
        return line

    def assert_nothing_left(self) -> None:
        """No process of the run lives, and its state directory is gone."""
        assert self.orphans() == {}
        assert not self.state_dir.exists()

    def signal(self, signum: int) -> None:
        """Send a signal to the process alone."""
        self._process.send_signal(signum)

    def close(self) -> None:
        """End it, whatever it does."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join(TIMEOUT_S)
        self._process.close()


def completed(module: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a command of psd that says little to its end."""
    with Program(["-m", module, *args], stderr=subprocess.PIPE) as program:
        output, errors = program.stdout.read(), program.stderr.read()
        return subprocess.CompletedProcess([module, *args], program.wait(TIMEOUT_S), output, errors)


def processes(of_run: str) -> dict[int, str]:
    """Pids and command lines of the living processes that have this PSD_RUN_ID in their environment."""
    wanted = f"PSD_RUN_ID={of_run}".encode()
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return {
        pid: _read(pid, "cmdline").replace(b"\0", b" ").decode() for pid in pids if wanted in _read(pid, "environ").split(b"\0")
    }


def shard_pid(of_run: str, index: int) -> int:
    """Process id of one shard of a run."""
    (pid,) = (pid for pid, command in processes(of_run).items() if f"--shard {index}/" in command)
    return pid


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # has ended
        return b""


class Job(Process):
    """psd-run with a script; `run_id` once the shards are ready."""

    def __init__(self, *args: str, **options: Any) -> None:
        super().__init__("psd.cli.run", *args, **options)
        self.run_id = ""

    def wait_until_ready(self) -> None:
        """Until the workers are about to start."""
        self.run_id = self.line(r"\[psd-run\] +run (\S+);")[1]

    def shard_pid(self, index: int) -> int:
        """Process id of one shard."""
        return shard_pid(self.run_id, index)

    def worker_pid(self, rank: int) -> int:
        """Process id of one worker."""
        (pid,) = (pid for pid in processes(self.run_id) if f"PSD_RANK={rank}".encode() in _read(pid, "environ").split(b"\0"))
        return pid

    def watchdog_pid(self) -> int:
        """Process id of the run's watchdog, which is not itself of the run, but has its name as an argument.

        Linux shows the arguments of a process a moment after psd-run has learnt that it has started: on a busy machine, after
        psd-run has said so.
        """
        watching = f"psd.cli.processes.watchdog {self.run_id}".encode()
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
            found = [pid for pid in pids if watching in _read(pid, "cmdline").replace(b"\0", b" ")]
            if found or time.monotonic() > deadline:
                (pid,) = found
                return pid

    def orphans(self) -> dict[int, str]:
        """Processes left over from the run."""
        return processes(self.run_id)

    @property
    def state_dir(self) -> Path:
        """State directory of the run, unless it was given one."""
        return private_path(self.run_id)

    def close(self) -> None:
        super().close()
        if self.run_id:
            for pid in self.orphans():
                os.kill(pid, signal.SIGKILL)
