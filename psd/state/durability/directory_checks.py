"""Checks a directory for a shard's files, before any is opened: that it can be used, that it is this user's alone, and that no
other files have their names.

Must not know how the files are made or opened.
"""

from __future__ import annotations

import contextlib
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from psd.contract.config import ConfigError
from psd_core import private_files

_MAGIC = b"PSD"
"""First bytes of every file of a shard, whatever follows them."""


def check_usable(directory: Path) -> None:
    """Raise ConfigError if no file can be made in the directory, at the start instead of when a job is declared."""
    try:
        is_made = not directory.exists()
        if not is_made:
            private_files.check_directory(directory)
        if is_made:
            directory.mkdir(mode=0o700, parents=True)
        try:
            with tempfile.TemporaryFile(dir=directory):
                pass
        finally:
            if is_made:
                directory.rmdir()
    except OSError as error:
        raise ConfigError(f"--state-dir: cannot use {directory}: {error.strerror or error}") from error


def check_private(directory: Path, files: Iterable[Path]) -> None:
    """Raise ConfigError unless a directory is this user's, and nobody has put a link, or a file of another user, in the place
    of a shard's file.

    Args:
        files: paths that a shard's files and directories may have there, whether they exist or not.
    """
    try:
        private_files.check_directory(directory)
        for path in files:
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISDIR(path.lstat().st_mode):
                    private_files.check_directory(path)
                else:
                    private_files.check_file(path)
    except private_files.NotOurs as error:
        raise ConfigError(f"--state-dir: {error.strerror}") from error
    except OSError as error:
        raise ConfigError(f"--state-dir: cannot use {directory}: {error.strerror or error}") from error


def check_unclaimed(paths: Iterable[Path]) -> None:
    """Raise ConfigError for a file that has the name of a shard's file but is none: it would be removed, or written over."""
    for path in paths:
        if path.is_file():
            with path.open("rb") as file:
                if file.read(len(_MAGIC)) == _MAGIC:
                    continue
        if path.exists():
            raise ConfigError(f"--state-dir: {path} is no file of a shard, and has the name of one; name an empty directory")
