"""Files that belong only to this user, in directories where nobody else can create one. Anything else found in their place is
refused by its name, never followed, read or overwritten.

A user who can write to a directory may put a link under a name that is about to be opened, so that this process writes to
another of its files. So links are not followed, files are always created anew, and a directory that strangers can write to is
not used at all. Must not know what the files hold.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

MODE = 0o600

_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe in place of a file must not block
_LINK_ERRORS = (errno.ELOOP, errno.EMLINK)


class NotOurs(OSError):
    """Raised if something else is in place of a file or directory; `strerror` names it and says why. Nothing has changed."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EPERM, message)


def check_directory(path: Path) -> None:
    """Raise NotOurs unless a directory belongs to this user or root, and not everybody may write to it. Whether a group may is
    the owner's decision."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        if found.st_uid not in (os.geteuid(), 0):
            raise NotOurs(f"{path} is a symbolic link of user {found.st_uid}")
        found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if found.st_uid not in (os.geteuid(), 0):
        raise NotOurs(f"{path} belongs to user {found.st_uid}, and this process is user {os.geteuid()}'s")
    if found.st_mode & stat.S_IWOTH:
        raise NotOurs(f"{path} can be written to by every user; chmod o-w, or name a directory in it")


def check_file(path: Path) -> None:
    """Raise NotOurs unless it is a regular file of this user; FileNotFoundError if it does not exist."""
    _check(path, path.lstat())


def open_own(path: Path, flags: int) -> int:
    """Open a file of this user, or create it if the flags say so; return a descriptor. Raises NotOurs, OSError."""
    try:
        fd = os.open(path, flags | _SAFE, MODE)
    except OSError as error:
        if error.errno in _LINK_ERRORS:
            raise NotOurs(f"{path} is a symbolic link") from None
        raise
    try:
        _check(path, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def create(path: Path) -> int:
    """Create a file, which replaces one of this user; return a descriptor. Raises NotOurs, OSError."""
    with contextlib.suppress(FileNotFoundError):
        check_file(path)
        path.unlink()
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE, MODE)


def write(path: Path, content: bytes, *, is_durable: bool = False) -> None:
    """Create a file with this content, which replaces one of this user. is_durable: sync to disk. Raises NotOurs, OSError."""
    with open(create(path), "wb") as file:
        file.write(content)
        if is_durable:
            file.flush()
            os.fsync(file.fileno())


def read(path: Path) -> bytes:
    """The content of a file of this user. Raises NotOurs, OSError."""
    with open(open_own(path, os.O_RDONLY), "rb") as file:
        return file.read()


def _check(path: Path, found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise NotOurs(f"{path} is a symbolic link")
    if not stat.S_ISREG(found.st_mode):
        raise NotOurs(f"{path} is not a file")
    if found.st_uid != os.geteuid():
        raise NotOurs(f"{path} belongs to user {found.st_uid}, and this process is user {os.geteuid()}'s")
