"""The output of many processes as one: whole lines, each with the name of the process that wrote it.

    [worker 0] step 10  loss 0.532
    [worker 1] step 10  loss 0.541
    [shard 0]  psd-server: shard 0/2 ready at 127.0.0.1:40213

Invariants: a line is never cut by a line of another process. Nothing is lost, except intermediate states of a progress bar
(text that a carriage return makes the terminal overwrite): a file gets at most one state a second, and always the last one. A
line without an end (a prompt, "loading ... ") is written when its process has been quiet for a while. A terminal always shows
unfinished lines, redrawn in place: psd/cli/processes/display.py.

honcho also merges outputs, but it knows neither progress bars nor unfinished lines, and has no limit for a line.

Bytes in, bytes out: what a program writes is passed on unchanged. Knows neither files nor processes; time is passed in.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable

QUIET_S = 2.0
"""Seconds after which an unfinished line is shown."""

SETTLED_S = 0.1
"""After so many quiet seconds, a process that moves its cursor up will not change the lines above it any more."""

PROGRESS_INTERVAL_S = 1.0
"""Seconds between two states of a progress bar that are shown as lines."""

LINE_BYTES_MAX = 1 << 16
"""Length at which a line is cut: it might be a binary file, and must not fill the memory."""

ROWS_MAX = 16
"""Unfinished lines of one process, such as nested progress bars."""

TAIL_LINES = 8
"""Lines kept of each process, to be shown again with the news of its death."""

_COLOURS = (36, 33, 35, 32, 34, 31)  # of the workers, in turn: cyan, yellow, magenta, green, blue, red

_UP = b"\x1b[A"
_MARKS = re.compile(rb"(\r?\n|\r|\x1b\[A)")
_BEGINNING_OF_A_MARK = re.compile(rb"(?:\r|\x1b\[?)\Z")


class _Row:
    """An unfinished line.

    Attributes:
        text: the text since the last carriage return.
        state: the text before that carriage return; empty if it was shown; None before the first carriage return.
    """

    def __init__(self, state: bytes | None = None) -> None:
        self.text = b""
        self.state = state
        self._shown_at = float("-inf")

    @property
    def is_worth_showing(self) -> bool:
        return bool(self.text.strip() or self.state)

    def rewind(self) -> None:
        """Handle a carriage return. A progress bar that erases itself with blanks keeps its last state."""
        self.state = self.text.rstrip() or self.state or b""
        self.text = b""

    def sample(self, now: float) -> list[bytes]:
        """The state to show now; nothing if the last one was shown too short a time ago."""
        if not self.state or now - self._shown_at < PROGRESS_INTERVAL_S:
            return []
        state, self.state, self._shown_at = self.state, b"", now
        return [state]

    def finish(self) -> list[bytes]:
        """End the line, and return it as a terminal shows it; nothing if that was shown already."""
        text, self.text = self.text, b""
        if self.state is None:
            return [text]
        line, self.state = text.rstrip() or self.state, b""
        return [line] if line else []


class Lines:
    """Cuts one process's output into lines.

    Args:
        is_live: `rows` are shown beneath the lines and redrawn in place, so they need not be written as lines now and then.

    Attributes:
        tail: the last lines.
    """

    def __init__(self, *, is_live: bool = False) -> None:
        self.tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._is_live = is_live
        self._rows = [_Row()]
        self._at = 0  # the row of the cursor
        self._moves = False  # the process has moved its cursor up, as nested progress bars do
        self._mark = b""  # the beginning of one, which may be cut anywhere
        self._fed_at = 0.0

    @property
    def rows(self) -> list[bytes]:
        """The unfinished lines."""
        return [row.text for row in self._rows if row.text.strip()]

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Take bytes that were read; return the lines that can be shown now, without line ends."""
        data = self._mark + data
        cut = _BEGINNING_OF_A_MARK.search(data)
        data, self._mark = (data[: cut.start()], cut[0]) if cut else (data, b"")
        lines: list[bytes] = []
        for piece in _MARKS.split(data):
            row = self._rows[self._at]
            if piece.endswith(b"\n"):
                lines += self._down()
            elif piece == b"\r":
                row.rewind()
            elif piece == _UP:
                self._up()
            else:
                row.text += piece
                while len(row.text) > LINE_BYTES_MAX:
                    lines.append(row.text[:LINE_BYTES_MAX])
                    row.text = row.text[LINE_BYTES_MAX:]
        if not self._is_live:
            lines += [state for row in self._rows for state in row.sample(now)]
        self._fed_at = now
        self.tail.extend(lines)
        return lines

    def quiet_at(self) -> float | None:
        """The time at which to call `flush` unless more output comes; None if there is no need."""
        if self._at > 0:
            return self._fed_at + SETTLED_S
        is_due = not self._is_live and any(row.is_worth_showing for row in self._rows)
        return self._fed_at + QUIET_S if is_due else None

    def flush(self) -> list[bytes]:
        """Return the lines to show because the process is quiet."""
        if self._at > 0:
            return self._release(self._at)
        return [] if self._is_live else self.end()

    def end(self) -> list[bytes]:
        """Return the unfinished lines, because the process has ended."""
        lines = [line for row in self._rows if row.is_worth_showing for line in row.finish()]
        self.tail.extend(lines)
        return lines

    def _down(self) -> list[bytes]:
        self._at += 1
        if self._at == len(self._rows):
            self._rows.append(_Row())
        if not self._moves:
            return self._release(self._at)
        # The cursor may return to a progress bar, but not to a line of text, nor to anything above it.
        above = range(self._at, 0, -1)
        return self._release(next((count for count in above if self._rows[count - 1].state is None), self._at - ROWS_MAX))

    def _up(self) -> None:
        self._moves = True
        if self._at > 0:
            self._at -= 1
        elif len(self._rows) < ROWS_MAX:
            self._rows.insert(0, _Row(b""))  # it has been shown already

    def _release(self, count: int) -> list[bytes]:
        """Turn the first rows into lines; return them."""
        count = max(0, count)
        lines = [line for row in self._rows[:count] for line in row.finish()]
        del self._rows[:count]
        self._at -= count
        return lines


class Prefixes:
    """The prefix of each process: aligned, and coloured on a terminal."""

    def __init__(self, names: Iterable[str], *, colour: bool) -> None:
        names = list(names)
        width = max(map(len, names)) + 2
        self._prefixes: dict[str, bytes] = {}
        workers = 0
        for name in names:
            text = f"[{name}]".ljust(width)
            if colour:
                code = 1  # psd-run's own: bold
                if name.startswith("worker"):
                    code = _COLOURS[workers % len(_COLOURS)]
                    workers += 1
                elif name.startswith("shard"):
                    code = 2  # dim
                text = f"\x1b[{code}m{text}\x1b[0m"
            self._prefixes[name] = text.encode() + b" "

    def row(self, name: str, line: bytes) -> bytes:
        """A line with its prefix."""
        return (self._prefixes[name] + line).rstrip(b" ")

    def line(self, name: str, line: bytes) -> bytes:
        """A line with its prefix and end."""
        return self.row(name, line) + b"\n"
