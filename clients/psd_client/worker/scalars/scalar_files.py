"""Files that a worker's scalars are written to: JSON lines, and TensorBoard's. Must not know shards.

If a file cannot be written, the log says so once; training goes on without it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from psd.contract.scalars import LOG_SUFFIX, LoggedScalars, tensorboard_module

logger = logging.getLogger("psd_client")


class ScalarFiles:
    """The files of one worker, made when there is something to write. Used by one thread.

    Args:
        log_dir: directory for worker-RANK.jsonl; empty: no such file. tensorboard_dir: directory for TensorBoard's
            worker-RANK; empty: none.

    Raises:
        ConfigError: TensorBoard's files are wanted, but no package is installed that writes them.
    """

    def __init__(self, rank: int, log_dir: str, tensorboard_dir: str) -> None:
        self._name = f"worker-{rank}"
        self._log_dir = log_dir
        self._tensorboard_dir = tensorboard_dir
        self._tensorboard_module = tensorboard_module() if tensorboard_dir else ""
        self._lines: TextIO | None = None
        self._board: Any = None
        self._has_failed = False

    def write(self, records: Sequence[LoggedScalars]) -> None:
        """Write records, and flush the files."""
        if records and self._log_dir:
            self._try(self._write_lines, records)
        if records and self._tensorboard_dir:
            self._try(self._write_board, records)

    def _try(self, action: Callable[..., None], *arguments: Any) -> None:
        try:
            action(*arguments)
        except (OSError, ImportError) as error:
            if not self._has_failed:
                logger.warning("psd: %s: its scalars cannot be written: %s", self._name, error)
            self._has_failed = True

    def _write_lines(self, records: Sequence[LoggedScalars]) -> None:
        if self._lines is None:
            directory = Path(self._log_dir)
            directory.mkdir(parents=True, exist_ok=True)
            self._lines = (directory / f"{self._name}{LOG_SUFFIX}").open("a", encoding="utf-8")
        self._lines.writelines(record.line() for record in records)
        self._lines.flush()

    def _write_board(self, records: Sequence[LoggedScalars]) -> None:
        if self._board is None:
            module = importlib.import_module(self._tensorboard_module)
            self._board = module.SummaryWriter(str(Path(self._tensorboard_dir) / self._name))
        for record in records:
            for name, value in record.scalars.items():
                self._board.add_scalar(name, value, record.step, record.time)
        self._board.flush()

    def close(self) -> None:
        """Close the files."""
        for file in (self._lines, self._board):
            if file is not None:
                self._try(file.close)
        self._lines = self._board = None
