"""Output of the commands: text of peers is made printable, so that it cannot control a terminal; streams take all that they are
given, whatever the locale, and whoever has opened them.
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
"""Errors of a file that cannot grow at present. No reader has gone, who would not want anything any more."""

ROOM_S = 5.0
"""Seconds without any room until a process that is told to end no longer waits for whoever reads its output."""

_LOOK_S = 0.2
"""Seconds between two looks whether it is told to end."""


def prepare_streams() -> None:
    """Have standard streams that take and give any text: one that was closed leads nowhere, what the locale lacks is escaped.

    To be called first of all: the next file to be opened would get the number of one that was closed.
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
    """Have a stream lead nowhere that could not be written to: at exit Python would fail to flush it, and change the status."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class WholeWriter:
    """The bytes of a text stream's file, each write of which is whole: it waits where there is no room.

    Python's own buffers raise an error where a descriptor does not block, as whoever has opened it may have chosen; and with
    PYTHONUNBUFFERED there are none, so that a write is cut short in silence. A reader that has stopped reading must keep nobody
    from ending: once the process is told to, what has no room for ROOM_S is dropped, and nothing is waited for any more.

    Args:
        is_told_to_end: says whether the process is told to end; asked while there is no room.
    """

    def __init__(self, stream: TextIO, is_told_to_end: Callable[[], bool] = lambda: False) -> None:
        self._stream = stream
        self._is_told_to_end = is_told_to_end
        self._has_given_up = False

    def write(self, data: bytes) -> None:
        """Write all; OSError if that is impossible."""
        left = memoryview(data)
        while left and self._waits_for_room():
            with contextlib.suppress(BlockingIOError):  # somebody else has taken the room
                left = left[os.write(self.fileno(), left[: select.PIPE_BUF]) :]  # so much fits where there is any

    def _waits_for_room(self) -> bool:
        """Wait until something can be written; False if that is given up."""
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
        """True if it is a terminal."""
        return self._stream.isatty()


def show(text: str, *, is_error: bool = False) -> None:
    """Print lines, on standard output or standard error; that the latter cannot be written to, nobody could be told."""
    with contextlib.suppress(OSError) if is_error else contextlib.nullcontext():
        print(printable_lines(text), file=sys.stderr if is_error else sys.stdout, flush=True)
