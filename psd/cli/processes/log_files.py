"""psd-run --log-dir: one file for each process, with the lines that it wrote, without psd-run's prefixes and colours.

    DIR/psd-run.log   DIR/shard-0.log   DIR/worker-0.log

A restarted process continues its file, and so does the next run with the same directory: nothing is overwritten. Two runs at
once would mix their lines, and their workers' curves, so the second one is refused. Knows neither processes nor terminals.
"""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from psd.contract.config import ConfigError


class LogFiles:
    """The files of one run.

    Args:
        directory: the log directory; created if needed.

    Raises:
        ConfigError: the directory cannot be made or written to, or another run of this machine uses it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, BinaryIO] = {}
        self._has_failed = False
        try:
            directory.mkdir(parents=True, exist_ok=True)
            own = self._open("psd-run")
        except OSError as error:
            raise ConfigError(f"--log-dir: cannot write to {directory}: {error.strerror or error}") from error
        try:
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConfigError(
                f"--log-dir: another psd-run is writing to {directory}; name a directory of this job's own"
            ) from None
        except OSError:  # a file system without locks
            return

    def write(self, name: str, lines: Sequence[bytes]) -> str:
        """Add lines, without line ends, to the file of a process, such as "worker 0".

        Returns:
            A message for the user, usually empty. If writing fails, because the disk is full for instance, the message says so
            once, and the job goes on without the files.
        """
        if not lines or self._has_failed:
            return ""
        try:
            file = self._files.get(name) or self._open(name)
            file.write(b"".join(line + b"\n" for line in lines))
        except OSError as error:
            self._has_failed = True
            return f"--log-dir: cannot write to {self.directory}: {error.strerror or error}; the job goes on without log files"
        return ""

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self, name: str) -> BinaryIO:
        self._files[name] = (self.directory / f"{name.replace(' ', '-')}.log").open("ab", buffering=0)
        return self._files[name]
