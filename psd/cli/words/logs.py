"""Logs of psd's processes: one record a line on stderr, as text for people or as JSON for programs.

    psd-server: WARNING session fenced  rank=3 session=12
    {"time": "2026-01-31T12:00:00.000Z", "level": "warning", "logger": "psd.rim.server", "message": "session fenced", ...}

Records have constant texts and fields (`logger.warning("session fenced", extra={"rank": 3})`); only this module turns them into
lines. It uses neither python-json-logger nor structlog: both formats must escape text chosen by peers, and the rest is twenty
lines. Such text can neither begin a new line nor control the terminal: see printable.py. Knows no particular event.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

from psd.cli.words.terminal import show
from psd.contract.locations import shown
from psd.contract.printable import printable, printable_lines

LEVELS = ("debug", "info", "warning", "error")
LOG_LEVEL = "info"
"""The default log level of shards."""

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

logger = logging.getLogger(__name__)


class Settings(NamedTuple):
    """The log settings of a process: the lowest level that is logged, one of LEVELS, and the format."""

    level: str
    is_json: bool = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of psd-server for its log."""
    log = parser.add_argument_group("log (standard error)")
    log.add_argument(
        "--log-level", choices=LEVELS, default=LOG_LEVEL, help="least important records to show (default: %(default)s)"
    )
    log.add_argument(
        "--log-json", action="store_true", help="one JSON object per line: time, level, logger, message, shard, and its fields"
    )


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}


class _TextFormatter(logging.Formatter):
    """Text, then the record's fields in the order given; a traceback follows on separate lines."""

    def __init__(self, prog: str) -> None:
        super().__init__(f"{prog}: %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, logging's name
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        line = super().formatMessage(record)
        return printable(shown(f"{line}  {fields}" if fields else line))

    def formatException(self, ei: Any) -> str:  # noqa: N802, logging's name
        return printable_lines(shown(super().formatException(ei)))


class _JsonFormatter(logging.Formatter):
    """One object: `time` (RFC 3339, UTC), `level`, `logger`, `message`, `shard`, the fields, and `exception`, a traceback."""

    def __init__(self, shard: int) -> None:
        super().__init__()
        self._shard = shard

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.created % 1 * 1000):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "shard": self._shard,
        }
        for name, value in _fields(record).items():
            is_plain = isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)) or value is None
            line.setdefault(name, value if is_plain else str(value))
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        return shown(json.dumps(line))  # which escapes whatever is not printable ASCII


def configure(prog: str, settings: Settings, *, shard: int) -> Callable[[str], None]:
    """Send psd's records from this level up, and warnings of all other loggers, to stderr; with JSON, uncaught exceptions, too.

    Returns:
        A function that writes a message about the process itself to stderr, at any level.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(shard) if settings.is_json else _TextFormatter(prog))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("psd").setLevel(settings.level.upper())
    if settings.is_json:
        logging.captureWarnings(capture=True)
        sys.excepthook = _log_exception
        threading.excepthook = lambda args: _log_exception(args.exc_type, args.exc_value, args.exc_traceback)

    def say(text: str) -> None:
        if settings.is_json:
            record = logging.makeLogRecord({"name": prog, "levelno": logging.INFO, "levelname": "INFO", "msg": text})
            handler.handle(record)
        else:
            show(printable(text), is_error=True)

    return say


def _log_exception(type_: type[BaseException], error: BaseException | None, traceback: TracebackType | None) -> None:
    if error is not None and not issubclass(type_, SystemExit):
        logger.error("a thread ended because of a defect", exc_info=(type_, error, traceback))
