"""Processes that this process starts for its own use, and that end with it.

The standard input of each is a pipe whose only other end is here. So the kernel tells it when this process ends, even by
kill -9. Forked children of this process close their copies of the pipes at once. Must not know what the processes do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import IO

END_S = 10.0
"""Seconds for a process to end after its input has been closed; then it is killed."""

_forking = threading.RLock()  # held while a pipe is made, so that no fork comes before the pipe is in `_alive`
_alive: weakref.WeakSet[OwnedProcess] = weakref.WeakSet()


class OwnedProcess:
    """A process in its own session, so that Ctrl-C on the terminal reaches this program only, which may go on.

    Args:
        pass_fds: descriptors that the process inherits.
        is_merged: the process writes standard error to its standard output; else to this process's standard error.

    Attributes:
        input, output: the process's standard input and output. pid: the process id, which is also the group's id.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        is_merged: bool = False,
    ) -> None:
        self._owner = os.getpid()
        with _forking:
            self._process = subprocess.Popen(  # noqa: S603, our own modules
                command,
                env=environ,
                pass_fds=pass_fds,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if is_merged else None,
                bufsize=0,
                start_new_session=True,
            )
            _alive.add(self)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.input: IO[bytes] = self._process.stdin
        self.output: IO[bytes] = self._process.stdout
        self.pid = self._process.pid

    def wait(self) -> int:
        """Wait for the process's end; return its exit status, negative for a signal. Its id stays reserved until `close`."""
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            ended = None
        if ended is None:
            return self._process.wait()
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def close(self, *, is_killed: bool = False) -> None:
        """Close the process's input and wait for its end, or kill its whole group. Idempotent; does nothing in a forked
        child."""
        if os.getpid() != self._owner:
            return
        _alive.discard(self)
        self.input.close()
        self.output.close()
        if self._process.returncode is not None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            if not is_killed:
                self._process.wait(END_S)
                return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


def _after_fork_in_child() -> None:
    for process in list(_alive):
        process.input.close()
    _alive.clear()
    _forking.release()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_after_fork_in_child)
