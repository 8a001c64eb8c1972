"""Lets one thread sleep until a signal, an event of another thread or a deadline comes, and misses none of them.

The interpreter's C handler writes each signal as a byte into a socket (signal.set_wakeup_fd). A queue or an Event that a Python
handler fills would not work: if a signal comes between the interpreter's last check and the system call that sleeps, its
handler runs only when the sleep ends. Other threads write bytes above all signals' numbers into the same socket. asyncio's
signal handlers work in the same way, but need an event loop, which neither user of this module has.
"""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Iterable
from types import FrameType, TracebackType

FIRST_WORD = 128
"""The least byte that is not a signal."""

JOB_SIGNALS = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a psd-run waits for, whichever part of a job it has."""


class Wakeups:
    """A context manager for the main thread: inside it, signals wake the sleeper. Signals that were ignored before, such as
    SIGHUP under nohup, stay ignored."""

    def __init__(self, signums: Iterable[int]) -> None:
        self._signums = [signum for signum in signums if signal.getsignal(signum) is not signal.SIG_IGN]
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def __enter__(self) -> Wakeups:
        self._handlers = {signum: signal.signal(signum, _heard) for signum in self._signums}
        self._fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, type_: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        signal.set_wakeup_fd(self._fd)
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        # Left open: a thread may still send, and a closed descriptor's number may be somebody else's by then.

    def fileno(self) -> int:
        """Descriptor, for a selector, that is readable when a byte has come."""
        return self._reader.fileno()

    def read(self) -> list[int]:
        """The bytes that have come, in order; empty if none have."""
        try:
            return list(self._reader.recv(4096))
        except BlockingIOError:
            return []

    def has_told(self, *but: int) -> bool:
        """True if a signal other than these has come and has not been read yet."""
        try:
            return not set(self._reader.recv(4096, socket.MSG_PEEK)) <= set(but)
        except BlockingIOError:
            return False

    def wait(self, timeout_s: float | None = None) -> list[int]:
        """Sleep until bytes come; return them, or an empty list if none have come in time."""
        select.select([self._reader], [], [], timeout_s)
        return self.read()

    def send(self, word: int) -> None:
        """Wake the sleeper from another thread."""
        assert FIRST_WORD <= word < 256
        self._writer.send(bytes([word]))


def _heard(_signum: int, _frame: FrameType | None) -> None:
    """Do nothing: the byte is in the socket already."""
