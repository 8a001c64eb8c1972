"""One child process of psd-run: started in its own session, with its output in one pipe, and ended with its whole group.

The child has its own session for two reasons. Ctrl-C on the terminal then reaches only psd-run, which stops the job in order.
And the whole group (a worker and, for instance, its data loaders) can be signalled, and killed when its first process has
ended.

Decides nothing: psd/cli/job/policy.py decides which process is started or signalled, and when.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

READ_BYTES = 1 << 16
_DRAIN_BYTES = 1 << 20  # what a child of the child, in a session of its own, could go on writing is cut off


class Child:
    """A running child.

    Attributes:
        pid: its process id, and its group's and session's.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], *, is_told: bool = False) -> None:
        """Start the child. is_told: its standard input is a pipe, for `tell`. Raises OSError if it cannot be started."""
        self._process = subprocess.Popen(  # noqa: S603, what the user asked for
            command,
            env=environ,
            stdin=subprocess.PIPE if is_told else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        if self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)

    def fileno(self) -> int:
        """Descriptor of the child's output, for a selector."""
        return self._output.fileno()

    def read(self) -> bytes | None:
        """Read the available output; None if there is none at present, b"" at its end."""
        try:
            return os.read(self.fileno(), READ_BYTES)
        except BlockingIOError:
            return None

    def read_rest(self) -> bytes:
        """Read the rest of the pipe, after the child's end."""
        rest = bytearray()
        while len(rest) < _DRAIN_BYTES and (data := self.read()):
            rest += data
        return bytes(rest)

    def tell(self, line: str) -> None:
        """Write a line to the child's standard input. If the child has ended or does not read, the line is lost."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            os.write(self._process.stdin.fileno(), line.encode() + b"\n")

    def signal(self, signum: int) -> None:
        """Signal the whole group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signum)

    def has_ended(self) -> bool:
        """True if the group's first process has ended. It stays a zombie, so that its group's number stays ours until
        `close`."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # somebody else has waited for it
            return True

    def close(self) -> int:
        """Kill the rest of the group and free all resources; return the exit status, negative for a signal."""
        self.signal(signal.SIGKILL)
        self._output.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        return self._process.wait()
