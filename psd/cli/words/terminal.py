"""Output of the commands. Text from peers is made printable, so that it cannot control a terminal. Streams write everything
that they are given, in any locale, even if their descriptor does not block.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
import time
from collections.abc import Callable
from typing import TextIO

from psd.contract.printable import printable_lines

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a file that cannot grow at present. They do not mean that a reader has gone."""

ROOM_S = 5.0
"""Seconds without room after which a process that is told to end no longer waits for the reader of its output."""

_LOOK_S = 0.2
"""Seconds between two checks whether the process is told to end."""


def prepare_streams() -> None:
    """Make the standard streams usable for any text: a closed one is opened on /dev/null, characters unknown to the locale are
    escaped.

    Call this before anything else: the next file that is opened would get the number of a closed stream.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - for as long as the process
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def discard(stream: TextIO) -> None:
    """Redirect an unwritable stream to /dev/null: else Python would fail to flush it at exit, and change the status."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class WholeWriter:
    """Writes bytes to a text stream's file, completely: each write waits until there is room.

    Python's own buffers raise an error if the descriptor does not block, which the parent process may have chosen; and with
    PYTHONUNBUFFERED there are no buffers, and writes are cut short silently. A reader that has stopped reading must not keep
    the process from ending: once the process is told to end, output that finds no room for ROOM_S is dropped, as is all that
    follows.

    Args:
        is_told_to_end: returns True if the process has been told to end; called while there is no room.
    """

    def __init__(self, stream: TextIO, is_told_to_end: Callable[[], bool] = lambda: False) -> None:
        self._stream = stream
        self._is_told_to_end = is_told_to_end
        self._has_given_up = False

    def write(self, data: bytes) -> None:
        """Write all bytes. Raises OSError if that is impossible."""
        left = memoryview(data)
        while left and self._waits_for_room():
            with contextlib.suppress(BlockingIOError):  # somebody else has taken the room
                left = left[os.write(self.fileno(), left[: select.PIPE_BUF]) :]  # so much fits where there is any

    def _waits_for_room(self) -> bool:
        """Wait until something can be written; return False when giving up."""
        give_up_at = None
        while not select.select([], [self.fileno()], [], 0 if self._has_given_up else _LOOK_S)[1]:
            if give_up_at is None and self._is_told_to_end():
                give_up_at = time.monotonic() + ROOM_S
            self._has_given_up = self._has_given_up or (give_up_at is not None and time.monotonic() >= give_up_at)
            if self._has_given_up:
                return False
        return True

    def fileno(self) -> int:
        """The stream's descriptor."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """True if the stream is a terminal."""
        return self._stream.isatty()


def show(text: str, *, is_error: bool = False) -> None:
    """Print lines on standard output or standard error. Errors of standard error are ignored: nobody could be told."""
    with contextlib.suppress(OSError) if is_error else contextlib.nullcontext():
        print(printable_lines(text), file=sys.stderr if is_error else sys.stdout, flush=True)
