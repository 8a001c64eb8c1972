"""How psd's processes write their logs: one line a record on stderr, the event's text first, its fields after it.

    psd-server: WARNING session fenced  rank=3 session=12

Records carry constant texts and fields (`logger.warning("session fenced", extra={"rank": 3})`); this is the one place that
turns them into text. Knows no event.
"""

from __future__ import annotations

import logging
import sys

LEVELS = ("debug", "info", "warning", "error")

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class _Formatter(logging.Formatter):
    """Text, then the record's extra fields in the order in which they were given."""

    def __init__(self, prog: str) -> None:
        super().__init__(f"{prog}: %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, logging's name
        fields = " ".join(f"{name}={value}" for name, value in vars(record).items() if name not in _STANDARD_FIELDS)
        line = super().formatMessage(record)
        return f"{line}  {fields}" if fields else line


def configure(prog: str, level: str) -> None:
    """Send psd's records from `level` up, and everybody else's warnings, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(prog))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("psd").setLevel(level.upper())
