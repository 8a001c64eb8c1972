"""Files that may be replaced while the process runs: certificates, keys, tokens. They are read again when they have changed.

Kubernetes replaces a Secret by its symbolic link, operators replace a file by a rename or in place: all change what `stat`
says. If the new files cannot be read or do not fit together, such as a certificate before its key has come, that is logged
once, and the old contents stay in force. psd does not use the package watchdog, which needs a thread, and inotify, which
network file systems lack; a `stat` per call is enough here.

Must not know what the files hold.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from psd.contract.config import ConfigError

logger = logging.getLogger(__name__)

FILE_BYTES_MAX = 1 << 20

ValueT = TypeVar("ValueT")


class Watched(Generic[ValueT]):
    """A value loaded from some files.

    Args:
        paths: the files' paths. load: reads them; raises ConfigError, which names the file.

    Raises:
        ConfigError: from the first `load`.
    """

    def __init__(self, paths: tuple[str, ...], load: Callable[[], ValueT]) -> None:
        self._paths = paths
        self._load = load
        self._lock = threading.Lock()
        self._seen = self._signature()
        self._value = load()

    def current(self) -> ValueT:
        """The newest value; reads the files if they have changed. Any thread may call this."""
        if self._signature() != self._seen:
            self._read()
        return self._value

    def refresh(self) -> None:
        """Read the files again, even if they have not changed."""
        self._read()

    def _read(self) -> None:
        with self._lock:
            self._seen = self._signature()  # first: later changes are found next time
            try:
                self._value = self._load()
            except ConfigError as error:
                logger.error("%s; continuing with the earlier contents", error)  # noqa: TRY400 - it says it all

    def _signature(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_file_signature, self._paths))


def _file_signature(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - several times per call; a Path costs more than the system call
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def read(path: str, what: str) -> bytes:
    """Read a small file.

    Raises:
        ConfigError: it cannot be read, or is larger than FILE_BYTES_MAX; `what` names the setting.
    """
    return _read(path, what)[0]


def read_secret(path: str, what: str) -> bytes:
    """Read a small file, and warn if all users of this machine can read it, too.

    Raises:
        ConfigError: also if everybody can write it.
    """
    data, mode = _read(path, what)
    if mode & stat.S_IWOTH:
        raise ConfigError(f"{what}: all users of this machine can write {path}; make it private: chmod 600 {path}")
    if mode & stat.S_IROTH:
        logger.warning("%s: all users of this machine can read %s; make it private: chmod 600 %s", what, path, path)
    return data


def _read(path: str, what: str) -> tuple[bytes, int]:
    """Contents and mode of the same file, even if another one takes its name meanwhile."""
    try:
        with Path(path).open("rb") as file:
            data, mode = file.read(FILE_BYTES_MAX + 1), os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise ConfigError(f"{what}: cannot read {path}: {error.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{what}: {path} has more than {FILE_BYTES_MAX} bytes; is this the right file?")
    return data, mode
