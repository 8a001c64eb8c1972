"""Terminal output of psd-run: finished lines, one below the other; on a terminal, unfinished lines (rows) beneath them.

    [worker 0] epoch 1: loss 0.532
    [worker 0]  17%|#7        | 10/60 [00:01<00:05,  9.65it/s]      <- these are redrawn in place
    [worker 1]  15%|#5        |  9/60 [00:01<00:05,  9.60it/s]

Knows terminals, but not which process wrote a line.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence

from psd.cli.words.terminal import WholeWriter

REDRAW_S = 0.1
"""Seconds between two drawings of the same rows: many bars together redraw themselves hundreds of times a second."""

# What moves the cursor or clears the screen, but no colours; and single bytes that do such things.
_COMMANDS = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-ln-~]|[\x00-\x08\x0a-\x1a\x1c-\x1f]")
_NO_WRAP, _WRAP, _PLAIN = b"\x1b[?7l", b"\x1b[?7h", b"\x1b[0m"


def is_terminal(stream: WholeWriter) -> bool:
    """True if the stream is a terminal on which rows can be redrawn."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Display:
    """Lines and rows on a stream.

    Args:
        rows: returns the current rows in order, with their prefixes.

    Attributes:
        is_live: True if rows are shown, because the stream is a terminal.
        due: time at which to call `redraw`; None if there is no need.
    """

    def __init__(self, stream: WholeWriter, rows: Callable[[], Sequence[bytes]]) -> None:
        self.is_live = is_terminal(stream)
        self.due: float | None = None
        self._stream = stream
        self._rows = rows
        self._drawn: list[bytes] = []
        self._drawn_at = float("-inf")

    def write(self, lines: Sequence[bytes], now: float, elsewhere: WholeWriter | None = None) -> None:
        """Write lines, with their line ends, above the rows. elsewhere: another stream for the lines, such as standard error,
        which may be the same terminal.

        Raises:
            OSError: nobody reads the stream any more. Errors of `elsewhere` are ignored.
        """
        rows = self._visible()
        erased = b"\x1b[%dF\x1b[J" % len(self._drawn) if self._drawn else b""
        drawn = b"".join([_NO_WRAP, *(row + _PLAIN + b"\n" for row in rows), _WRAP]) if rows else b""
        if elsewhere is None:
            self._send(erased, *lines, drawn)
        else:
            self._send(erased)
            with contextlib.suppress(OSError):  # a terminal that has been closed
                elsewhere.write(b"".join(lines))
            self._send(drawn)
        self._drawn, self._drawn_at, self.due = rows, now, None

    def redraw(self, now: float) -> None:
        """Show the current rows. If the last ones were drawn a moment ago, only set `due`."""
        self.due = None
        if self._visible() == self._drawn:
            return
        if now - self._drawn_at < REDRAW_S:
            self.due = self._drawn_at + REDRAW_S
        else:
            self.write([], now)

    def _visible(self) -> list[bytes]:
        """The rows that fit on the screen, without control sequences that would disturb other rows."""
        if not self.is_live:
            return []
        try:
            height = os.get_terminal_size(self._stream.fileno()).lines
        except OSError:
            height = 0
        return [_COMMANDS.sub(b"", row) for row in self._rows()[: (height or 24) - 1]]

    def _send(self, *parts: bytes) -> None:
        if data := b"".join(parts):
            self._stream.write(data)
