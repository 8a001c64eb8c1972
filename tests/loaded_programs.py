"""Programs that tests start, as processes of their own, in an interpreter that has psd loaded: what takes longest is done once.

A process beside pytest's loads psd, and forks for each program. The fork becomes it: arguments, environment, directory,
streams. It is killed, suspended and waited for as any process. Only loading is not seen again, so tests of that, of a process's
memory, and of other interpreters start theirs anew. What programs start is executed, unless it is to be forked, too
(forked_children.py). For Linux.

Must not know which program it runs.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from forked_children import REQUEST_BYTES_MAX, ROOM, become, freeze

LOADED = ("psd.cli.server", "psd.rim.server", "psd_client", "psd.cli.run", "psd.cli.psdctl", "psd.cli.processes.watchdog")
WITH_TORCH = "psd_client.torch"
"""What programs with torch have loaded, too; without its compiler, as the fixture `later_compiler` says."""
LATER_COMPILER = Path(__file__).parent / "later_compiler"


class Program:
    """`python -m module`, or `python script`, with arguments; has what tests use of a Popen. Standard input is empty.

    Args:
        stdout: a file, or a pipe that this class reads.
        stderr: a file, subprocess.PIPE, subprocess.STDOUT, or None for this process's.
        env: the environment, if not this process's. cwd: its directory, likewise.
        start_new_session: it has one of its own, not that of all programs.
        loads: a module that is loaded beside psd. has_grpc_forks: gRPC prepares for forks, which it asks as it is loaded.
        generations: of Python programs that are forked, too: 1 for those that it starts, 2 for those that they start.
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
        loads: str = "",
        has_grpc_forks: bool = True,
        generations: int = 0,
    ) -> None:
        request = {"command": list(command), "environ": dict(env or os.environ), "cwd": str(cwd or Path.cwd())}
        request |= {"new_session": start_new_session, "generations": generations}
        self._told, telling = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.stdout, output = _stream(stdout)
        self.stderr, errors = _stream(output if stderr == subprocess.STDOUT else 2 if stderr is None else stderr)
        with telling:
            _Loaded.of_this_process(loads, has_grpc_forks=has_grpc_forks).fork(request, [output, errors, telling.fileno()])
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

    def fileno(self) -> int:
        """Descriptor that can be read when it has ended, for a selector."""
        return self._pidfd

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


def completed(command: Sequence[str], *, timeout: float = 200.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a Program to its end; its status and output, as of subprocess.run. AssertionError if it has not ended in time."""
    with tempfile.TemporaryFile("w+", errors="backslashreplace") as output, tempfile.TemporaryFile("w+") as errors:
        program = Program(command, stdout=output, stderr=errors, **options)
        try:
            status = program.wait(timeout)
        except subprocess.TimeoutExpired:
            program.kill()
            status = None
        program.close()
        output.seek(0)
        errors.seek(0)
        done = subprocess.CompletedProcess(list(command), program.wait(), output.read(), errors.read())
    assert status is not None, f"still running after {timeout:g} s:\n{done.stdout}{done.stderr}"
    return done


def _stream(given: IO[Any] | int) -> tuple[IO[str], int]:
    """What is read of a stream, and the descriptor that a program has for it."""
    if given != subprocess.PIPE:
        return io.StringIO(), os.dup(given if isinstance(given, int) else given.fileno())
    reading, writing = os.pipe()
    return os.fdopen(reading, encoding="utf-8", errors="backslashreplace"), writing


def parent_of_programs(loads: str = "") -> int:
    """Process id of the one that forks for this process. loads: as of Program."""
    return _Loaded.of_this_process(loads).pid


def _stands_still(task: Path) -> bool:
    return (task / "stat").read_bytes().rpartition(b") ")[2][:1] == b"T"


class _Loaded:
    """A process that has psd loaded, as the one that asks it for programs sees it."""

    _of_this_process: dict[tuple[str, bool], _Loaded] = {}

    def __init__(self, loads: str, *, has_grpc_forks: bool) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), loads, ROOM]
            path = os.pathsep.join(filter(None, (str(LATER_COMPILER), os.environ.get("PYTHONPATH"))))
            said = {} if has_grpc_forks else {"GRPC_ENABLE_FORK_SUPPORT": "0"}
            self._process = subprocess.Popen(
                command,
                # With more threads NumPy would start some, which forks would lack.
                env=os.environ | said | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "ROOM": ROOM},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.pid = self._process.pid
        atexit.register(self._end)

    @classmethod
    def of_this_process(cls, loads: str = "", *, has_grpc_forks: bool = True) -> _Loaded:
        """It is started with the first program."""
        key = loads, has_grpc_forks
        if key not in cls._of_this_process:
            cls._of_this_process[key] = cls(loads, has_grpc_forks=has_grpc_forks)
        return cls._of_this_process[key]

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
    return json.loads(message)


if __name__ == "__main__":
    for name in (*LOADED, *filter(None, sys.argv[2:3])):
        import_module(name)
    freeze()
    become(**_wait_for_request(socket.socket(fileno=int(sys.argv[1]))))
