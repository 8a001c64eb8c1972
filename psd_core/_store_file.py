"""Files of the arena and of the stores of tables and vectors: locks, names, space, maps. Makes the system calls; must not know
what the bytes mean.

The number of a closed descriptor soon belongs to another file. So each descriptor has one owner here, which closes it once and
gives its number to nobody; later calls are refused, or do nothing if they no longer matter.

If the system lacks a call (macOS has no posix_fallocate and cannot punch holes), a slower or weaker way is taken.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

from psd_core import _arena, private_files
from psd_core._store_format import NO_SPACE, ArenaBusy, StoreClosed, StoreFull

ARENA_NAME = "arena"
UNFINISHED_NAME = "arena.new"
LOCK_NAME = "lock"

_PID_BYTES = 16
_MADE, _FOUND = b" made \n", b" found\n"
_LOCK_LINE_BYTES = _PID_BYTES + len(_MADE)
_ZEROS = bytes(1 << 20)


@contextlib.contextmanager
def lack_of_space(complaint: str) -> Iterator[None]:
    """Raise StoreFull, with the system's message, for errors that mean a lack of space; other errors pass."""
    try:
        yield
    except StoreFull:
        raise
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise StoreFull(f"{complaint}: {error.strerror}") from error


class _Descriptor:
    """Owns a descriptor, and closes it once, at the latest when this object is freed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._closing = weakref.finalize(self, os.close, fd)
        self._closing.atexit = False  # threads may still be at work then

    @property
    def is_closed(self) -> bool:
        return not self._closing.alive

    def close(self) -> None:
        """Close the file."""
        self._closing()


class File(_Descriptor):
    """An open file that only this user can use; with O_EXCL a new one, which replaces what a killed process has left.

    Thread-safe: one call at a time uses the descriptor, as in the kernel anyway.

    Raises:
        StoreClosed: from every method, after `close`, unless it says otherwise.
    """

    def __init__(self, path: Path, flags: int) -> None:
        super().__init__(private_files.create(path) if flags & os.O_EXCL else private_files.open_own(path, flags))
        self._place = path.parent
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def _used(self, complaint: str = "no space") -> Iterator[int]:
        with self._lock, lack_of_space(f"{complaint} in {self._place}"):
            if self.is_closed:
                raise StoreClosed("the arena has been closed")
            yield self._fd

    def close(self) -> None:
        """Close the file. Waits for calls in other threads that use the descriptor."""
        with self._lock:
            super().close()

    def lock(self) -> None:
        """Lock the file itself until it is closed. Raises ArenaBusy."""
        with self._used() as fd:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ArenaBusy(f"a file in {self._place} is in use by another process", None) from None

    @property
    def used_bytes(self) -> int:
        """Memory or disk space that the file takes, without its holes."""
        with self._used() as fd:
            return os.fstat(fd).st_blocks * 512

    @property
    def size(self) -> int:
        """Size in bytes."""
        with self._used() as fd:
            return os.fstat(fd).st_size

    def read(self, nbytes: int, start: int) -> bytes:
        """The bytes from `start` on; fewer if the file ends before."""
        parts = []
        with self._used() as fd:
            while nbytes > 0 and (part := os.pread(fd, nbytes, start)):
                parts.append(part)
                nbytes -= len(part)
                start += len(part)
        return b"".join(parts)

    def write(self, data: bytes, start: int) -> None:
        """Write all bytes, into reserved space."""
        with self._used(f"no space for {len(data)} bytes") as fd:
            assert os.pwrite(fd, data, start) == len(data)

    def extend(self, size: int) -> None:
        """Set the length. No space is taken yet. Raises StoreFull."""
        with self._used(f"no space for an arena of {size} bytes") as fd:
            os.ftruncate(fd, size)

    def reserve(self, start: int, nbytes: int) -> None:
        """Take space for a range whose contents do not matter, so that writing to it cannot fail. Raises StoreFull."""
        with self._used(f"no space for {nbytes} bytes") as fd:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, start, nbytes)
            else:
                for at in range(start, start + nbytes, len(_ZEROS)):
                    os.pwrite(fd, _ZEROS[: start + nbytes - at], at)

    def release(self, start: int, nbytes: int) -> bool:
        """Free the space of a range. False if that is not possible: the file system cannot, or the file is closed."""
        with self._lock:
            return not self.is_closed and _arena.punch_hole(self._fd, start, nbytes) == 0

    def map_shared(self, start: int, nbytes: int) -> mmap.mmap:
        """Map a range, which must lie within the file. The map outlives the file. Raises StoreFull."""
        with self._used(f"no memory to map {nbytes} bytes") as fd:
            return mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=start)

    def map_large(self, nbytes: int, *, is_read_only: bool = False) -> _arena.LargeMap:
        """Map the file's first bytes so that large pages can hold them. The map outlives the file. Raises StoreFull."""
        with self._used(f"no memory to map {nbytes} bytes") as fd:
            return _arena.LargeMap(fd, nbytes, is_read_only=is_read_only)


class Directory(_Descriptor):
    """A directory that this process has locked until `close`. `is_made`: it was made for an arena, and is removed with it."""

    def __init__(self, path: Path, lock_fd: int, *, is_made: bool) -> None:
        super().__init__(lock_fd)
        self.path = path
        self._is_made = is_made

    def remove(self, *names: str) -> None:
        """Delete files; if no arena is left, also the lock file, and the directory if it was made for one and is empty.

        The lock file is deleted last and while it is locked: a process that waits for it finds it gone, and makes another.
        """
        if self.is_closed:
            return
        for name in names:
            (self.path / name).unlink(missing_ok=True)
        if (self.path / ARENA_NAME).exists():
            return
        (self.path / LOCK_NAME).unlink(missing_ok=True)
        if self._is_made:
            with contextlib.suppress(OSError):
                self.path.rmdir()


def take_lock(path: Path, *, is_made: bool) -> Directory:
    """Lock an existing directory.

    The kernel releases the lock when the process dies, however it dies. (A forked child that calls no exec holds it, too.) The
    lock file holds one line: the process id, and whether some process made the directory for an arena.

    Args:
        is_made: True if this process has just made it.

    Raises:
        ArenaBusy: another descriptor holds it.
    """
    lock = path / LOCK_NAME
    while True:
        try:
            fd = private_files.open_own(lock, os.O_RDWR | os.O_CREAT)
        except OSError:
            if is_made:
                with contextlib.suppress(OSError):
                    path.rmdir()
            raise
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
                held = Directory(path, fd, is_made=is_made)
                try:
                    os.pwrite(fd, b"%-*d%s" % (_PID_BYTES, os.getpid(), _MADE if is_made else _FOUND), 0)
                except BaseException:
                    held.remove()
                    held.close()
                    raise
                return held
        os.close(fd)


def make_directory(directory: Path) -> bool:
    """Make a directory for this user alone; False if it exists."""
    try:
        directory.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        return False
    return True


def populate(mapping: mmap.mmap | _arena.LargeMap, start: int, nbytes: int) -> None:
    """Fault in the pages of a reserved range, if the kernel can, so that later writes need no page faults."""
    _arena.populate(mapping, start, nbytes)
