"""The storage of checkpoints: whole files in one directory per checkpoint, on a local file system or in any store that fsspec
knows.

`write` leaves either the whole file, durably, or no file of that name, whatever happens meanwhile:

    LocalStorage    writes a temporary name, fsync, rename, fsync of the directory; readers ignore temporary names
    ObjectStorage   puts one object, which such stores show when it is complete. If a store (memory, SFTP) shows incomplete
                    files, the sizes and checksums in the manifest, which is written last, reveal them. A file system that
                    is not made for several threads, such as SFTP's one connection, is used by one thread at a time

`crash_point` is called with a few words before each operation that changes a file; a test makes it kill the process or raise
OSError there. Errors of the system are raised as CheckpointFailed with its message; for a missing file FileNotFoundError is
raised. Must not know what is in the files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from typing_extensions import override

from psd.contract.config import ConfigError
from psd.contract.errors import CheckpointFailed, PsdError
from psd.contract.locations import cause, cleared, shown

CrashPoint = Callable[[str], None]
Chunk = bytes | memoryview

TEMPORARY_SUFFIX = ".tmp"


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


def open_storage(url: str, crash_point: CrashPoint = no_crash) -> FileStore:
    """The storage at a URL or local path.

    Raises:
        ConfigError: fsspec does not know such URLs, or lacks the package for them, or the store refuses the connection.
    """
    place = f"checkpoint directory {shown(url)}"
    if not url:
        raise ConfigError("checkpoint directory: expected a path or a URL, got an empty string")
    if "::" in url and "://" not in url:  # a path, which fsspec would take for a chain of URLs
        return LocalStorage(Path(url).expanduser().absolute(), crash_point)
    try:
        file_system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise ConfigError(f"{place}: {error}") from error
    except ValueError as error:
        expected = "expected a path or a URL that fsspec knows"
        raise ConfigError(f"{place}: {expected}: {cleared(str(error), url)}") from cause(error, url)
    except Exception as error:  # noqa: BLE001 - such as SFTP, which dials at once: whatever its package raises
        raise ConfigError(f"{place}: {cleared(str(error), url) or type(error).__name__}") from cause(error, url)
    if isinstance(file_system, LocalFileSystem):
        return LocalStorage(Path(path), crash_point)
    return ObjectStorage(file_system, path.rstrip("/"), url, crash_point)


def open_parent(url: str) -> tuple[FileStore, str]:
    """The storage of a file's directory, and the file's name there. Raises what `open_storage` raises."""
    parent, _, file = url.rpartition("/")
    return open_storage(parent or ("/" if url.startswith("/") else ".")), file


@contextlib.contextmanager
def _surfacing(
    what: str, kind: type[Exception] = OSError, *, missing_is_failure: bool = False, url: str = ""
) -> Iterator[None]:
    """Turn errors of one kind into CheckpointFailed, without the URL's secrets; FileNotFoundError only if that is a failure."""
    try:
        yield
    except (PsdError, AssertionError):
        raise
    except kind as error:
        if isinstance(error, FileNotFoundError) and not missing_is_failure:
            raise
        words = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
        raise CheckpointFailed(cleared(f"{what}: {words}", url)) from cause(error, url)


class LocalStorage(FileStore):
    """A directory of a local file system."""

    def __init__(self, root: Path, crash_point: CrashPoint = no_crash) -> None:
        self.location = str(root)
        self._root = root
        self._crash_point = crash_point

    @override
    def directories(self) -> list[str]:
        with _surfacing(f"cannot list {self._root}"):
            try:
                return sorted(entry.name for entry in self._root.iterdir() if entry.is_dir())
            except FileNotFoundError:
                return []

    @override
    def files(self, directory: str) -> dict[str, int]:
        sizes = {}
        with _surfacing(f"cannot list {self._root / directory}"), contextlib.suppress(FileNotFoundError):
            for entry in (self._root / directory).iterdir():
                with contextlib.suppress(FileNotFoundError):  # a temporary name that has just been renamed
                    if entry.is_file():
                        sizes[entry.name] = entry.stat().st_size
        return sizes

    @override
    def read(self, directory: str, file: str, start: int = 0, stop: int | None = None) -> bytes:
        path = self._root / directory / file
        with _surfacing(f"cannot read {path}"), path.open("rb") as stream:
            stream.seek(start)
            return stream.read(-1 if stop is None else stop - start)

    @override
    def write(self, directory: str, file: str, chunks: Iterable[Chunk]) -> None:
        path = self._root / directory / file
        temporary = path.with_name(f".{file}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
        with _surfacing(f"cannot write {path}", missing_is_failure=True):
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
        with _surfacing(f"cannot remove {path}"), contextlib.suppress(FileNotFoundError):
            self._crash_point(f"remove {file}")
            path.unlink()

    @override
    def remove_directory(self, directory: str) -> None:
        with _surfacing(f"cannot remove {self._root / directory}"), contextlib.suppress(FileNotFoundError):
            self._crash_point(f"remove directory {directory}")
            try:
                (self._root / directory).rmdir()
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise

    @override
    def sync(self, directory: str) -> None:
        with _surfacing(f"cannot sync {self._root / directory}"), contextlib.suppress(FileNotFoundError):
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


class ObjectStorage(FileStore):
    """A prefix in a store that fsspec knows.

    Args:
        file_system, path: fsspec's, for the URL. url: the user's.
    """

    def __init__(self, file_system: Any, path: str, url: str, crash_point: CrashPoint = no_crash) -> None:
        self.location = shown(url)
        self._file_system = file_system
        self._path = path
        self._url = url
        self._crash_point = crash_point
        self._turn = _turn(file_system)

    def _join(self, *names: str) -> str:
        return "/".join(name for name in (self._path, *names) if name)

    def _list(self, directory: str) -> list[dict[str, Any]]:
        path = self._join(directory)
        with _surfacing(f"cannot list {path}", Exception, url=self._url), self._turn:
            try:
                self._file_system.invalidate_cache()
                return list(self._file_system.ls(path, detail=True))
            except FileNotFoundError:
                return []

    @override
    def directories(self) -> list[str]:
        return sorted(_name(entry) for entry in self._list("") if entry["type"] == "directory")

    @override
    def files(self, directory: str) -> dict[str, int]:
        return {_name(entry): int(entry["size"]) for entry in self._list(directory) if entry["type"] == "file"}

    @override
    def read(self, directory: str, file: str, start: int = 0, stop: int | None = None) -> bytes:
        path = self._join(directory, file)
        with _surfacing(f"cannot read {path}", Exception, url=self._url), self._turn:
            return bytes(self._file_system.cat_file(path, start=start, end=stop))

    @override
    def write(self, directory: str, file: str, chunks: Iterable[Chunk]) -> None:
        path = self._join(directory, file)
        with _surfacing(f"cannot write {path}", Exception, missing_is_failure=True, url=self._url):
            self._crash_point(f"create {file}")
            with self._turn:
                stream = self._open_new(directory, path)
            try:
                # A turn for each chunk, not for all: other threads may be reading the chunks from files in the same store.
                for chunk in chunks:
                    self._crash_point(f"write {file}")
                    with self._turn:
                        stream.write(chunk)
                self._crash_point(f"put {file}")
                with self._turn:
                    stream.close()
            except BaseException:
                with contextlib.suppress(Exception), self._turn:  # closing may have stored an incomplete file
                    with contextlib.suppress(Exception):
                        stream.close()
                    self._file_system.rm_file(path)
                raise

    def _open_new(self, directory: str, path: str) -> Any:
        """A new writable file, in a directory that other shards may be making at this moment."""
        try:
            return self._file_system.open(path, "wb")
        except FileNotFoundError:  # a store with real directories, such as SFTP
            parent = self._join(directory)
        for left in reversed(range(parent.count("/") + 1)):
            try:
                self._file_system.makedirs(parent, exist_ok=True)
                break
            except Exception:
                # fsspec checks, then creates: another shard may create the directory, or its parent, in between.
                self._file_system.invalidate_cache()
                if self._file_system.isdir(parent):
                    break
                if not left:
                    raise
        return self._file_system.open(path, "wb")

    @override
    def remove(self, directory: str, file: str) -> None:
        path = self._join(directory, file)
        with _surfacing(f"cannot remove {path}", Exception, url=self._url), contextlib.suppress(FileNotFoundError):
            self._crash_point(f"remove {file}")
            with self._turn:
                self._file_system.rm_file(path)

    @override
    def remove_directory(self, directory: str) -> None:
        """Do nothing: in most stores a directory ends with its last file."""
        with contextlib.suppress(OSError, NotImplementedError), self._turn:
            self._file_system.rmdir(self._join(directory))

    @override
    def sync(self, directory: str) -> None:
        """Do nothing: files that such a store shows are durable."""


_turns: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()
"""Locks by file system: for the same URL, fsspec returns the same one to a thread again."""

_turns_lock = threading.Lock()


def _turn(file_system: Any) -> contextlib.AbstractContextManager[Any]:
    """A lock to hold while a file system is used; does nothing if it, and the one that it wraps, allow several threads."""
    inner = getattr(file_system, "fs", None)
    if isinstance(file_system, AsyncFileSystem) and (inner is None or isinstance(inner, AsyncFileSystem)):
        return contextlib.nullcontext()
    with _turns_lock:
        return _turns.setdefault(file_system, threading.Lock())


def _name(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]
