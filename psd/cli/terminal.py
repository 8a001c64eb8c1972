"""Output of the commands: text of peers is made printable, so that it cannot control a terminal; streams take all that they are
given, whatever the locale, and whoever has opened them.
"""

from __future__ import annotations

import io
import os
import select
import sys
from typing import TextIO

from google.protobuf.message import Message

from psd.contract.printable import printable, printable_lines


def prepare_streams() -> None:
    """Have standard streams that take any text: one that was closed leads nowhere, what the locale lacks is escaped.

    To be called first of all: the next file to be opened would get the number of one that was closed.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - for as long as the process
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class WholeWriter:
    """The bytes of a text stream's file, each write of which is whole: it waits where there is no room.

    Python's own buffers raise an error where a descriptor does not block, as whoever has opened it may have chosen; and with
    PYTHONUNBUFFERED there are none, so that a write is cut short in silence.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, data: bytes) -> None:
        """Write all; OSError if that is impossible."""
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self.fileno(), left) :]
            except BlockingIOError:
                select.select([], [self.fileno()], [])

    def fileno(self) -> int:
        """The stream's descriptor."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """True if it is a terminal."""
        return self._stream.isatty()


def show(text: str, *, is_error: bool = False) -> None:
    """Print lines, on standard output or standard error."""
    print(printable_lines(text), file=sys.stderr if is_error else sys.stdout, flush=True)


def make_printable(message: Message) -> None:
    """Make every text in a peer's message printable, and so one line each."""
    for field, value in message.ListFields():
        is_text = field.type == field.TYPE_STRING
        if isinstance(value, str):
            setattr(message, field.name, printable(value))
        elif isinstance(value, Message):
            make_printable(value)
        elif is_text:
            value[:] = map(printable, value)
        elif field.message_type is not None:
            for item in value:
                make_printable(item)
