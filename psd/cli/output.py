"""The output of many processes as one: whole lines, each with the name of the process that wrote it.

    [worker 0] step 10  loss 0.532
    [worker 1] step 10  loss 0.541
    [shard 0]  psd-server: shard 0/2 ready at 127.0.0.1:40213

Invariants: a line of one process is never cut by another's; nothing that was written is lost, except the states of a progress
bar in between (text that a carriage return makes the terminal overwrite), of which at most one a second is shown, and the
last one always. A line without an end (a prompt, "loading ... ") is shown when its process has been quiet for a while.

honcho, which merges outputs likewise, knows neither progress bars nor unfinished lines, and no limit for a line.

Bytes in, bytes out: what a program writes is passed on as it is. Knows neither files nor processes; time is passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

QUIET_S = 2.0
"""Seconds after which an unfinished line is shown."""

PROGRESS_INTERVAL_S = 1.0
"""Seconds between two states of a progress bar that are shown as lines."""

LINE_BYTES_MAX = 1 << 16
"""Length at which a line is cut: it might be a binary file, and must not fill the memory."""

TAIL_LINES = 8
"""Lines kept of each process, to be shown again with the news of its death."""

_COLOURS = (36, 33, 35, 32, 34, 31)  # of the workers, in turn: cyan, yellow, magenta, green, blue, red


class Lines:
    """Cuts one process's output into lines.

    Attributes:
        tail: the last lines.
    """

    def __init__(self) -> None:
        self.tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._partial = b""  # after the last line end and the last carriage return
        self._fed_at = 0.0
        # Of the unfinished line, the last state that has not been shown; None before its first carriage return.
        self._state: bytes | None = None
        self._state_shown_at = float("-inf")

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Take bytes that were read; return the lines, without their ends, that can be shown."""
        *whole, rest = (self._partial + data).split(b"\n")
        lines = [line for raw in whole for line in self._finish(raw)]
        *states, rest = rest.split(b"\r")
        if states:
            self._state = _last(states) or self._state or b""
            if self._state and now - self._state_shown_at >= PROGRESS_INTERVAL_S:
                lines.append(self._state)
                self._state, self._state_shown_at = b"", now
        while len(rest) > LINE_BYTES_MAX:
            lines.append(rest[:LINE_BYTES_MAX])
            rest = rest[LINE_BYTES_MAX:]
        self._partial, self._fed_at = rest, now
        self.tail.extend(lines)
        return lines

    def quiet_at(self) -> float | None:
        """The time at which an unfinished line is to be shown, unless more comes; None if there is none."""
        return self._fed_at + QUIET_S if self._partial.strip() or self._state else None

    def flush(self) -> list[bytes]:
        """Return the unfinished line, because the process is quiet or has ended."""
        if self.quiet_at() is None:
            return []
        lines = self._finish(self._partial)
        self._partial = b""
        self.tail.extend(lines)
        return lines

    def _finish(self, raw: bytes) -> list[bytes]:
        """The final state of a line, as a terminal shows it; nothing if it was already shown."""
        earlier, self._state = self._state, None
        states = raw.split(b"\r")
        if earlier is None and len(states) == 1:
            return [raw]
        line = _last(states) or earlier or b""
        return [line] if line or earlier is None else []


def _last(states: list[bytes]) -> bytes:
    """The last state that is more than blanks: a progress bar may wipe itself out at its end."""
    return next((state.rstrip() for state in reversed(states) if state.strip()), b"")


class Prefixes:
    """The prefix of each process: aligned, and in colour if the reader is a person."""

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

    def line(self, name: str, line: bytes) -> bytes:
        """A line with its prefix and end."""
        return (self._prefixes[name] + line).rstrip(b" ") + b"\n"
