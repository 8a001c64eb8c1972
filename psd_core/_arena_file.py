"""The arena's files: lock, names, space, maps. Knows system calls, and nothing of what the bytes mean.

Where the system lacks a call (macOS has no posix_fallocate and cannot punch holes), a slower or a lesser way is taken.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import NamedTuple

from psd_core import _arena
from psd_core._arena_format import ArenaBusy, ArenaFull

ARENA_NAME = "arena"
UNFINISHED_NAME = "arena.new"
LOCK_NAME = "lock"

_PID_BYTES = 16
_MADE, _FOUND = b" made \n", b" found\n"
_LOCK_LINE_BYTES = _PID_BYTES + len(_MADE)
_ZEROS = bytes(1 << 20)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


class Directory(NamedTuple):
    """A directory that this process has locked. `is_made`: it was made for an arena, and goes with it."""

    path: Path
    lock_fd: int
    is_made: bool

    def remove(self, *names: str) -> None:
        """Delete files; if no arena is left then, the lock too, and the directory if it was made for one and is empty.

        The lock file goes last and while it is locked: whoever waits for it then finds that it is gone, and makes another.
        """
        for name in names:
            (self.path / name).unlink(missing_ok=True)
        if (self.path / ARENA_NAME).exists():
            return
        (self.path / LOCK_NAME).unlink(missing_ok=True)
        if self.is_made:
            with contextlib.suppress(OSError):
                self.path.rmdir()


def take_lock(path: Path, *, is_made: bool) -> Directory:
    """Lock an existing directory for this process's life.

    The kernel releases the lock when the process dies, however it dies. (A child made by fork alone holds it too.) The lock
    file holds one line: the process id, and whether the directory was made for an arena, by whichever process that was.

    Args:
        is_made: this process has just made it.

    Raises:
        ArenaBusy: another descriptor holds it.
    """
    lock = path / LOCK_NAME
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            written = os.pread(fd, _LOCK_LINE_BYTES, 0)[:_PID_BYTES].strip()
            os.close(fd)
            pid = int(written) if written.isdigit() else None
            holder = f"process {pid}" if pid is not None else "another process"
            raise ArenaBusy(f"{path} is in use by {holder}", pid) from None
        # The file may have been removed by its last holder between open and flock: then it locks nothing.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), lock.stat()):
                is_made = is_made or os.pread(fd, _LOCK_LINE_BYTES, 0)[_PID_BYTES:] == _MADE
                os.pwrite(fd, b"%-*d%s" % (_PID_BYTES, os.getpid(), _MADE if is_made else _FOUND), 0)
                return Directory(path, fd, is_made)
        os.close(fd)


def make_directory(directory: Path) -> bool:
    """Make a directory for this user alone; False if it was there."""
    try:
        directory.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        return False
    return True


def close(*descriptors: int) -> None:
    """Close those that were opened (not negative)."""
    for fd in descriptors:
        if fd >= 0:
            os.close(fd)


def extend(fd: int, size: int) -> None:
    """Set a file's length. No space is taken yet. Raises ArenaFull."""
    try:
        os.ftruncate(fd, size)
    except OSError as error:
        raise _translated(error, f"cannot make the arena {size} bytes long") from error


def reserve(fd: int, start: int, nbytes: int) -> None:
    """Take space for a range whose contents do not matter, so that writing to it cannot fail. Raises ArenaFull."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, start, nbytes)
        else:
            for at in range(start, start + nbytes, len(_ZEROS)):
                os.pwrite(fd, _ZEROS[: start + nbytes - at], at)
    except OSError as error:
        raise _translated(error, f"no space for {nbytes} bytes of the arena") from error


def release(fd: int, start: int, nbytes: int) -> bool:
    """Give the space of a range back; False if the file system cannot."""
    return _arena.punch_hole(fd, start, nbytes) == 0


def map_shared(fd: int, start: int, nbytes: int) -> mmap.mmap:
    """Map a range, which must lie within the file."""
    try:
        return mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=start)
    except OSError as error:
        raise _translated(error, f"cannot map {nbytes} bytes of the arena") from error


def populate(mapping: mmap.mmap, start: int, nbytes: int) -> None:
    """Spare those who write to a reserved range its page faults, if the kernel can."""
    _arena.populate(mapping, start, nbytes)


def read_exactly(fd: int, nbytes: int, start: int) -> bytes:
    """Read bytes; fewer if the file ends before."""
    parts = []
    while nbytes > 0 and (part := os.pread(fd, nbytes, start)):
        parts.append(part)
        nbytes -= len(part)
        start += len(part)
    return b"".join(parts)


def _translated(error: OSError, message: str) -> OSError:
    return ArenaFull(f"{message}: {error.strerror}") if error.errno in _NO_SPACE else error
