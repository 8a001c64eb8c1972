"""The storage of checkpoints: whole files in one directory per checkpoint, on a local file system or in any store that fsspec
knows.

`write` leaves the whole file, durably, or what was there before, whatever happens meanwhile:

    LocalStorage    writes a temporary name, fsync, rename, fsync of the directory; readers ignore temporary names
    ObjectStorage   puts one object, which such stores show when it is complete; objects.py says what it does for others

`crash_point` is called with a few words before each operation that changes a file; a test makes it kill the process or raise
OSError there. Errors of the system are raised as CheckpointFailed with its message; for a missing file FileNotFoundError is
raised. Must not know what is in the files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from psd.checkpoint.advice import with_advice
from psd.contract.errors import CheckpointFailed, PsdError
from psd.contract.locations import cause, cleared

CrashPoint = Callable[[str], None]
Chunk = bytes | memoryview


def no_crash(step: str) -> None:
    """Do nothing: the crash point outside of tests."""


class FileStore(Protocol):
    """Files in directories, one level deep. `directory` is a plain name, or "" for the top directory.

    Attributes:
        location: the URL without credentials, for messages.
    """

    location: str

    def directories(self) -> list[str]:
        """Names of the directories, sorted."""
        ...

    def files(self, directory: str) -> dict[str, int]:
        """Sizes by name; empty if the directory does not exist."""
        ...

    def read(self, directory: str, file: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes start to stop; fewer if the file ends before."""
        ...

    def write(self, directory: str, file: str, chunks: Iterable[Chunk]) -> None:
        """Write a whole file, durably. Creates the directory if needed; replaces a file with this name."""
        ...

    def remove(self, directory: str, file: str) -> None:
        """Remove a file, if it exists."""
        ...

    def remove_directory(self, directory: str) -> None:
        """Remove a directory, if it exists and is empty."""
        ...

    def sync(self, directory: str) -> None:
        """Make the directory's entries durable, also other shards'; one of them may be removing it at this moment."""
        ...


def temporary_name(file: str) -> str:
    """A name for a file until it is complete."""
    return f".{file}.{os.getpid()}-{secrets.token_hex(4)}.tmp"


@contextlib.contextmanager
def surfacing(what: str, kind: type[Exception] = OSError, *, missing_is_failure: bool = False, url: str = "") -> Iterator[None]:
    """Turn errors of one kind into CheckpointFailed, without the URL's secrets; FileNotFoundError only if that is a failure."""
    try:
        yield
    except (PsdError, AssertionError):
        raise
    except kind as error:
        if isinstance(error, FileNotFoundError) and not missing_is_failure:
            raise
        words = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
        raise CheckpointFailed(with_advice(cleared(f"{what}: {words}", url), url, error)) from cause(error, url)


class LocalStorage(FileStore):
    """A directory of a local file system."""

    def __init__(self, root: Path, crash_point: CrashPoint = no_crash) -> None:
        self.location = str(root)
        self._root = root
        self._crash_point = crash_point

    @override
    def directories(self) -> list[str]:
        with surfacing(f"cannot list {self._root}"):
            try:
                return sorted(entry.name for entry in self._root.iterdir() if entry.is_dir())
            except FileNotFoundError:
                return []

    @override
    def files(self, directory: str) -> dict[str, int]:
        sizes = {}
        with surfacing(f"cannot list {self._root / directory}"), contextlib.suppress(FileNotFoundError):
            for entry in (self._root / directory).iterdir():
                with contextlib.suppress(FileNotFoundError):  # a temporary name that has just been renamed
                    if entry.is_file():
                        sizes[entry.name] = entry.stat().st_size
        return sizes

    @override
    def read(self, directory: str, file: str, start: int = 0, stop: int | None = None) -> bytes:
        path = self._root / directory / file
        with surfacing(f"cannot read {path}"), path.open("rb") as stream:
            stream.seek(start)
            return stream.read(-1 if stop is None else stop - start)

    @override
    def write(self, directory: str, file: str, chunks: Iterable[Chunk]) -> None:
        path = self._root / directory / file
        temporary = path.with_name(temporary_name(file))
        with surfacing(f"cannot write {path}", missing_is_failure=True):
            self._make_directory(path.parent)
            try:
                self._crash_point(f"create {file}")
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                try:
                    for chunk in chunks:
                        self._crash_point(f"write {file}")
                        _write_all(descriptor, chunk)
                    self._crash_point(f"fsync {file}")
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                self._crash_point(f"rename {file}")
                temporary.replace(path)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise
            self._fsync(path.parent)

    @override
    def remove(self, directory: str, file: str) -> None:
        path = self._root / directory / file
        with surfacing(f"cannot remove {path}"), contextlib.suppress(FileNotFoundError):
            self._crash_point(f"remove {file}")
            path.unlink()

    @override
    def remove_directory(self, directory: str) -> None:
        with surfacing(f"cannot remove {self._root / directory}"), contextlib.suppress(FileNotFoundError):
            self._crash_point(f"remove directory {directory}")
            try:
                (self._root / directory).rmdir()
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise

    @override
    def sync(self, directory: str) -> None:
        with surfacing(f"cannot sync {self._root / directory}"), contextlib.suppress(FileNotFoundError):
            self._fsync(self._root / directory)
            if directory:
                self._fsync(self._root)

    def _make_directory(self, path: Path) -> None:
        """Make a directory and its parents, durably."""
        if path.is_dir():
            return
        self._make_directory(path.parent)
        self._crash_point(f"make directory {path.name}")
        path.mkdir(exist_ok=True)
        self._fsync(path.parent)

    def _fsync(self, path: Path) -> None:
        self._crash_point(f"fsync directory {path.name}")
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_all(descriptor: int, chunk: Chunk) -> None:
    view = memoryview(chunk)
    if view.nbytes:
        view = view.cast("B")
    while view.nbytes:
        view = view[os.write(descriptor, view) :]
