"""Files that belong to this user alone, in directories where nobody else can put one: what is in their places and is something
else is refused by its name, never followed, read or written over.

Whoever can write to a directory may put a link under a name that is about to be opened, and have this process write through it
to whatever it may write to. So links are not followed, what is made is made anew, and a directory in which strangers could do
that is not used at all. Must not know what the files hold.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

MODE = 0o600

_SAFE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe in the place of a file must not keep anybody waiting
_LINK_ERRORS = (errno.ELOOP, errno.EMLINK)


class NotOurs(OSError):
    """A thing in the place of a file or directory of ours is none; `strerror` names it and says why. Nothing has changed."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EPERM, message)


def check_directory(path: Path) -> None:
    """Raise NotOurs unless a directory is this user's, or root's, and not everybody's to write to. A group's is its owner's
    decision."""
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
    """Raise NotOurs unless it is a regular file of this user's; FileNotFoundError if there is none."""
    _check(path, path.lstat())


def open_own(path: Path, flags: int) -> int:
    """Open a file of this user's, and make it if the flags say so; returns a descriptor. Raises NotOurs, OSError."""
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
    """Make a file, in place of one of this user's; returns a descriptor. Raises NotOurs, OSError."""
    with contextlib.suppress(FileNotFoundError):
        check_file(path)
        path.unlink()
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE, MODE)


def write(path: Path, content: bytes, *, is_durable: bool = False) -> None:
    """Make a file with that content, in place of one of this user's; is_durable: on the disk. Raises NotOurs, OSError."""
    with open(create(path), "wb") as file:
        file.write(content)
        if is_durable:
            file.flush()
            os.fsync(file.fileno())


def read(path: Path) -> bytes:
    """The content of a file of this user's. Raises NotOurs, OSError."""
    with open(open_own(path, os.O_RDONLY), "rb") as file:
        return file.read()


def _check(path: Path, found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise NotOurs(f"{path} is a symbolic link")
    if not stat.S_ISREG(found.st_mode):
        raise NotOurs(f"{path} is not a file")
    if found.st_uid != os.geteuid():
        raise NotOurs(f"{path} belongs to user {found.st_uid}, and this process is user {os.geteuid()}'s")
