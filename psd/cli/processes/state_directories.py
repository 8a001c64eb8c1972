"""The state directory of a run of psd-run. The shards keep their parameters there, so that a shard that dies can be restarted.

    <state directory>/run        the run's id, one line
    <state directory>/url-...    a URL with a secret in it, for the shards, which would be seen among a command's arguments
    <state directory>/lock       locked while the run lives, by psd-run and by its watchdog
    <state directory>/shard-0    the --state-dir of shard 0, and so on; the shards fill and, at a proper end, remove them

A *private* directory lies in memory (/dev/shm) if the system has that. It ends with the run in any case: psd-run removes it, or
its watchdog, or, if both were killed, the next psd-run. A *named* directory belongs to the user: it is emptied when the run
ends well; otherwise the next run with the directory continues from its contents, with the same run id.

Invariants: nothing is removed that psd-run has not made; no two runs use a directory, or an id, at the same time. Knows nothing
of what shards write.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from psd.contract.config import ConfigError
from psd.contract.environment import memory_directory
from psd_core import private_files

_PRIVATE_PREFIX = "psd-run-"
_LOCK = "lock"
_RUN = "run"
_RUN_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")

_ABANDONED_S = 60.0
"""Seconds since the last change after which an unlocked directory counts as abandoned. A younger one may be one that its run is
just about to lock."""


def url_file(option: str) -> str:
    """Name of the file in a state directory from which shards read an option's URL."""
    return f"url-{option.replace('_', '-')}"


def private_path(run_id: str) -> Path:
    """The run's private state directory: in memory, if possible, else among temporary files."""
    return memory_directory() / f"{_PRIVATE_PREFIX}{run_id}"


def is_run_id(text: str) -> bool:
    """True if this can be a run's id, and so a part of a directory's name."""
    return _RUN_ID.fullmatch(text) is not None


def kept_run_id(path: Path) -> str | None:
    """The id of the run that has left its state in a named directory; None if none has.

    Raises:
        ConfigError: the directory cannot be read, or is not psd-run's.
    """
    try:
        text = private_files.read(path / _RUN).decode().strip()
    except FileNotFoundError:
        return None
    except private_files.NotOurs as error:
        raise ConfigError(f"--state-dir: {error.strerror}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"--state-dir: cannot read {path / _RUN}: {error}") from error
    if not text:  # psd-run was killed before it had written it, and so before there was anything else
        return None
    if not is_run_id(text):
        raise ConfigError(f"--state-dir: {path / _RUN} does not hold the name of a run; is {path} psd-run's?")
    return text


class StateDirectory:
    """The state directory of a living run.

    Args:
        path: the directory; created if needed, accessible to this user only.
        run_id: id of the run; if a named directory holds a run, the id of that one.
        shards: number of shards.
        is_private: True if the directory is removed at the end in any case.
        urls: URLs that the shards read from files in it, by name of the file.

    Raises:
        ConfigError: the directory cannot be made, belongs to another run or user, or is not one of psd-run's.

    Attributes:
        path, is_private: as given.
        lock_fd: descriptor of the lock; other runs are kept out while any process has it open.
    """

    def __init__(
        self, path: Path, run_id: str, shards: int, *, is_private: bool, urls: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        self._urls = urls or {}
        self.is_private = is_private
        self._shards = shards
        if is_private:
            clear_abandoned()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=not is_private)
            private_files.check_directory(path)
            if (path / "shard-0").exists() and not (path / _RUN).exists():
                raise ConfigError(f"--state-dir: {path} holds something called shard-0 that is not psd-run's")
            self.lock_fd = _take_lock(path)
            held = kept_run_id(path)
            if held is None:
                private_files.write(path / _RUN, f"{run_id}\n".encode())
            elif held != run_id:
                raise ConfigError(f"--state-dir: {path} is in use by run {held}")
            for name, url in self._urls.items():
                private_files.write(path / name, url.encode())
        except private_files.NotOurs as error:
            raise ConfigError(f"--state-dir: {error.strerror}") from error
        except OSError as error:
            raise ConfigError(f"--state-dir: cannot use {path}: {error.strerror or error}") from error

    @property
    def url_files(self) -> list[Path]:
        """Files that hold secrets."""
        return [self.path / name for name in self._urls]

    def shard(self, index: int) -> Path:
        """The state directory of one shard, which the shard makes."""
        return shard_path(self.path, index)

    def close(self, *, keep: bool) -> bool:
        """Remove the directory, or only its contents if it is named. keep: leave a named one, if there is anything to keep.

        Returns:
            True if it was kept.
        """
        shards = [self.shard(index) for index in range(self._shards)]
        is_kept = keep and not self.is_private and any(shard.exists() for shard in shards)
        for file in self.url_files:
            with contextlib.suppress(OSError):
                file.unlink()
        if self.is_private:
            remove_private(self.path)
        elif not is_kept:
            for shard in shards:
                shutil.rmtree(shard, ignore_errors=True)
            for name in (_RUN, _LOCK):
                with contextlib.suppress(OSError):
                    (self.path / name).unlink(missing_ok=True)
        os.close(self.lock_fd)
        return is_kept


def shard_path(path: Path, index: int) -> Path:
    """The path of a shard's state directory in the directory of its run."""
    return path / f"shard-{index}"


def remove_private(path: Path) -> None:
    """Remove a private state directory whose processes have ended; ignores errors."""
    shutil.rmtree(path, ignore_errors=True)


def clear_abandoned() -> None:
    """Remove this user's private state directories whose psd-run, watchdog and shards have all been killed."""
    for path in memory_directory().glob(f"{_PRIVATE_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if not is_ours or time.time() - status.st_mtime < _ABANDONED_S:
                continue
            if all(_is_free(lock) for lock in (path / _LOCK, *path.glob("shard-*/lock"))):
                remove_private(path)


def _take_lock(path: Path) -> int:
    """Lock the directory until the descriptor and all inherited copies of it are closed; kill -9 closes them, too."""
    while True:
        fd = private_files.open_own(path / _LOCK, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(f"--state-dir: {path} is in use by another psd-run") from None
        # Its last holder may have removed it between open and flock: then it locks nothing.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), (path / _LOCK).stat()):
                return fd
        os.close(fd)


def _is_free(lock: Path) -> bool:
    """True if a lock file exists and no process holds it. If it does not exist, it is about to be made."""
    try:
        fd = private_files.open_own(lock, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
