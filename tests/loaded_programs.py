"""Programs that tests start, as processes of their own, in an interpreter that has psd loaded: what takes longest is done once.

A process beside pytest's loads psd, and forks for each program. The fork becomes it: arguments, environment, directory,
streams. It is killed, suspended and waited for as any process. Only loading is not seen again, so tests of that, of what the
system shows of a process (arguments, environment, memory), and of other interpreters start theirs anew. For programs that need
torch there is a process that has loaded torch, too. For Linux.

Must not know which program it runs.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NoReturn

LOADED = ("psd.cli.server", "psd.rim.server", "psd_client", "psd.cli.run", "psd.cli.psdctl")
TORCH = ("psd_client.torch", "torch.distributed")
REQUEST_BYTES_MAX = 1 << 17


class Program:
    """`python -m module`, or `python script`, with arguments; has what tests use of a Popen. Standard input is empty.

    Args:
        stdout: a file, or a pipe that this class reads.
        stderr: a file, subprocess.PIPE, subprocess.STDOUT, or None for this process's.
        env: the environment, if not this process's. cwd: its directory, likewise.
        start_new_session: it has one of its own, not that of all programs.
        has_torch: torch is loaded, too.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: IO[Any] | int = subprocess.PIPE,
        stderr: IO[Any] | int | None = None,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        start_new_session: bool = False,
        has_torch: bool = False,
    ) -> None:
        request = {"command": list(command), "environ": dict(env or os.environ), "cwd": str(cwd or Path.cwd())}
        self._told, telling = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.stdout, output = _stream(stdout)
        self.stderr, errors = _stream(output if stderr == subprocess.STDOUT else 2 if stderr is None else stderr)
        with telling:
            loaded = _Loaded.of_this_process(has_torch=has_torch)
            loaded.fork({**request, "new_session": start_new_session}, [output, errors, telling.fileno()])
        os.close(output)
        os.close(errors)
        pid, (self._pidfd,), *_ = socket.recv_fds(self._told, 64, 1)
        self.pid = int(pid)
        self.returncode: int | None = None
        self._reading_status = threading.Lock()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for its end, and close the streams."""
        self.wait()
        os.close(self._pidfd)
        for stream in (self.stdout, self.stderr):
            stream.close()

    def poll(self) -> int | None:
        """The exit status, if it has ended; minus the number of the signal that ended it."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; the exit status.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time.
        """
        if self.returncode is not None:
            return self.returncode
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        if not ended.poll(None if timeout is None else 1000 * timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        with self._reading_status:
            if self.returncode is None:
                self.returncode = int(self._told.recv(64))
                self._told.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Unless it has ended. After SIGSTOP, returns when all of its threads stand still."""
        if self.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)
        while number == signal.SIGSTOP and not all(_stands_still(task) for task in Path(f"/proc/{self.pid}/task").iterdir()):
            os.sched_yield()

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _stream(given: IO[Any] | int) -> tuple[IO[str], int]:
    """What is read of a stream, and the descriptor that a program has for it."""
    if given != subprocess.PIPE:
        return io.StringIO(), os.dup(given if isinstance(given, int) else given.fileno())
    reading, writing = os.pipe()
    return os.fdopen(reading, encoding="utf-8", errors="backslashreplace"), writing


def parent_of_programs(*, has_torch: bool = False) -> int:
    """Process id of the one that forks for this process."""
    return _Loaded.of_this_process(has_torch=has_torch).pid


def _stands_still(task: Path) -> bool:
    return (task / "stat").read_bytes().rpartition(b") ")[2][:1] == b"T"


class _Loaded:
    """A process that has psd loaded, as the one that asks it for programs sees it."""

    _of_this_process: dict[bool, _Loaded] = {}

    def __init__(self, *, has_torch: bool) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), *(TORCH if has_torch else ())]
            self._process = subprocess.Popen(
                command,
                env=os.environ | {"OMP_NUM_THREADS": "1"},  # or NumPy would start threads, which forks would lack
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.pid = self._process.pid
        atexit.register(self._end)

    @classmethod
    def of_this_process(cls, *, has_torch: bool) -> _Loaded:
        """It is started with the first program."""
        if has_torch not in cls._of_this_process:
            cls._of_this_process[has_torch] = cls(has_torch=has_torch)
        return cls._of_this_process[has_torch]

    def fork(self, request: dict[str, Any], descriptors: list[int]) -> None:
        """Have it fork; descriptors: standard output, standard error, and where it says the process id, and then the status."""
        socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)

    def _end(self) -> None:
        self._socket.close()
        self._process.wait()


def _tell(told: int, number: int, *descriptors: int) -> None:
    with socket.socket(fileno=os.dup(told)) as telling, contextlib.suppress(ConnectionError):  # whoever started it may be gone
        socket.send_fds(telling, [str(number).encode()], descriptors)


def _wait_for_request(control: socket.socket) -> dict[str, Any]:
    """Fork for each request; returns it in the fork, which has its streams, and nothing else open."""
    with selectors.DefaultSelector() as waiting:
        waiting.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.data is None:
                    message, descriptors, *_ = socket.recv_fds(control, REQUEST_BYTES_MAX, 3)
                    if not message:
                        sys.exit()
                    output, errors, told = descriptors
                    pid = os.fork()
                    if pid == 0:
                        break
                    pidfd = os.pidfd_open(pid)
                    _tell(told, pid, pidfd)
                    waiting.register(pidfd, selectors.EVENT_READ, (pid, told))
                    os.close(output)
                    os.close(errors)
                else:
                    pid, told = key.data
                    _tell(told, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                    waiting.unregister(key.fd)
                    os.close(key.fd)
                    os.close(told)
            else:
                continue
            break
    control.close()
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    # Those that are there know what the ones of the process that forks were.
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    return json.loads(message)


def _become(command: list[str], environ: dict[str, str], cwd: str, *, new_session: bool) -> NoReturn:
    if new_session:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    if command[0] == "-m":
        sys.argv, sys.path[0] = command[1:], cwd
        sys.exit(import_module(command[1]).main())
    sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
    runpy.run_path(command[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    for name in (*LOADED, *sys.argv[2:]):
        import_module(name)
    gc.freeze()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would lack the other threads"
    _become(**_wait_for_request(socket.socket(fileno=int(sys.argv[1]))))
