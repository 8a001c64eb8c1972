"""Ends a job's processes and removes its state if psd-run itself is killed, so that no orphan goes on training.

The watchdog is a separate process, in its own session, that only reads a pipe. psd-run alone holds the write end, so the kernel
reports psd-run's death, even by SIGKILL, as the end of the file. Each line of the protocol is one of these:

    +4711   process group 4711 belongs to the job
    -4711   it has ended; its number may be used by others from now on
    =/a/b   a file, or a directory with all that is in it, to be removed once the processes have ended; in the quoting of URLs
    end     the job is over; the end of the file that follows means nothing

PR_SET_PDEATHSIG, and libraries that use it, end only direct children, not the processes that these have started, and remove no
directories.

This file holds both sides: `Watchdog` is psd-run's, `main` the process, which loads little, as each job starts one. Knows
nothing of shards and workers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import quote, unquote_to_bytes

from psd.cli.processes.left_over import end_processes
from psd.contract.launching import python_command

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL. Nobody is left to tell of a longer wait."""


class Watchdog:
    """psd-run's handle on its watchdog. A job can go on without a watchdog, but is then unprotected.

    Args:
        run_id: id of the run.
        lock_fd: descriptor of the state directory's lock. The watchdog keeps it open, and so the directory locked, until it
            ends.
        node_mark: mark of the node, if other nodes run parts of the job.
        groups: process groups that exist already.
        paths: files and directories to remove if psd-run dies.
    """

    def __init__(
        self, run_id: str, lock_fd: int, node_mark: str = "", groups: Iterable[int] = (), paths: Iterable[Path] = ()
    ) -> None:
        # Not a process of any run: an outer psd-run, in whose worker this one may run, must not find it by that run's id.
        environ = {name: value for name, value in os.environ.items() if name not in ("PSD_RUN_ID", "PSD_NODE")}
        self._process = subprocess.Popen(  # noqa: S603, our own module
            [*python_command("psd.cli.processes.watchdog"), run_id, node_mark],
            stdin=subprocess.PIPE,
            env=environ,
            pass_fds=(lock_fd,),
            start_new_session=True,
        )
        for path in paths:
            self._write(f"={quote(os.fsencode(path))}\n")
        for group in groups:
            self.add(group)

    @property
    def pid(self) -> int:
        """Process id of the watchdog."""
        return self._process.pid

    def has_died(self) -> bool:
        """True if it has ended, which it never does by itself while psd-run lives."""
        return self._process.poll() is not None

    def add(self, group: int) -> None:
        """Put a process group under watch."""
        self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Forget a process group that has ended."""
        self._write(f"-{group}\n")

    def close(self) -> None:
        """Tell the watchdog that the job is over, and wait for its end. Also frees the resources of a dead one."""
        self._write("end\n")
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it may have died; psd-run notices by has_died
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


class Left(NamedTuple):
    """The processes, files and directories that psd-run leaves behind when it is killed."""

    groups: set[int]
    paths: list[Path]


def watch(pipe: BinaryIO) -> Left | None:
    """Read until psd-run ends; return its remains, or None after a proper end."""
    left = Left(set(), [])
    for line in pipe:
        if line == b"end\n":
            return None
        if not line.endswith(b"\n"):  # cut off by the death of the writer
            break
        sign, text = line[:1], line[1:-1]
        if sign == b"=":
            left.paths.append(Path(os.fsdecode(unquote_to_bytes(text))))
        elif sign == b"+":
            left.groups.add(int(text))
        else:
            left.groups.discard(int(text))
    return left


def main(argv: Sequence[str] | None = None) -> int:
    """Run the watchdog: watch, then end and remove the remains."""
    run_id, node_mark = sys.argv[1:] if argv is None else argv
    left = watch(sys.stdin.buffer)
    if left is not None:
        _say(f"psd-run was killed; ending the processes of {run_id}")
        count = end_processes(left.groups, run_id, GRACE_S, node_mark)
        for path in left.paths:
            with contextlib.suppress(OSError):
                path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)
        _say(f"ended {count} processes of {run_id}")
    return 0


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody may read any more
        print(f"[psd-run watchdog] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
