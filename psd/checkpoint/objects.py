"""Checkpoints' files in a store that fsspec knows: S3, GCS, HDFS, SFTP, ...

What `storage.py` promises of `write` depends on the kind of store:

    object stores       show an object when it is complete. What was sent of one that is given up is discarded; what a killed
                        process has sent of one stays with the store, unseen, until it throws it away
    SFTP                has real files: they are written under a temporary name, and renamed
    others (memory)     may show incomplete files, which the sizes and checksums in the manifest, which is written last, reveal

A store may be silent for ever, and the packages that fsspec uses wait for minutes, or for ever; so each request is made in a
thread of its own, and given up after ANSWER_S_MAX or UPLOAD_S_MAX seconds. A file system that is not made for several threads,
such as SFTP's one connection, is used by one at a time, and opened anew after a request that failed: it may have lost its
connection. Must not know what is in the files.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractBufferedFile
from typing_extensions import override

from psd.checkpoint import sftp
from psd.checkpoint.storage import Chunk, CrashPoint, FileStore, no_crash, surfacing, temporary_name
from psd.contract.locations import shown

Answer = TypeVar("Answer")

ANSWER_S_MAX = 120.0
"""Most seconds until a store has answered a request that moves little: s3fs and gcsfs try again for up to 50 when refused."""

UPLOAD_S_MAX = 900.0
"""Most seconds for a piece of a file: s3fs collects as much as ten parts of 50 MiB before it sends them."""

_LOUD = ("gcsfs", "paramiko")
"""Packages that log, with tracebacks, errors that they raise, too."""


def connect(url: str, *, is_anew: bool = False) -> tuple[Any, str]:
    """The file system of a URL, and the path there. Raises what its package raises.

    Args:
        is_anew: make one, even if this process has one for the URL.
    """
    for name in _LOUD:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    options = {"skip_instance_cache": True} if is_anew else {}
    found: tuple[Any, str] = in_time(lambda: fsspec.core.url_to_fs(url, **options), ANSWER_S_MAX)
    return found


class _NoAnswer(TimeoutError):
    """A call has not come to an end in time; whatever it uses, it may use for ever."""


def in_time(call: Callable[[], Answer], seconds: float) -> Answer:
    """Make a call in a thread of its own, and return or raise what it does; a TimeoutError if that takes longer."""
    outcome: Future[Answer] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            outcome.set_exception(error)

    threading.Thread(target=run, name="psd-store", daemon=True).start()
    if wait([outcome], seconds).not_done:
        raise _NoAnswer(f"no answer in {seconds:g} s")
    return outcome.result()


class ObjectStorage(FileStore):
    """A prefix in a store that fsspec knows.

    Args:
        file_system, path: fsspec's, for the URL. url: the user's.
    """

    def __init__(self, file_system: Any, path: str, url: str, crash_point: CrashPoint = no_crash) -> None:
        self.location = shown(url)
        self._path = path
        self._url = url
        self._crash_point = crash_point
        self._current = _Connection(file_system)
        self._renewal = threading.Lock()

    def _join(self, *names: str) -> str:
        return "/".join(name for name in (self._path, *names) if name)

    def _connection(self) -> _Connection:
        """The connection to use for a request, or for all that write one file."""
        with self._renewal:
            if self._current.is_broken:
                self._current = _Connection(connect(self._url, is_anew=True)[0])
            return self._current

    def _list(self, directory: str) -> list[dict[str, Any]]:
        path = self._join(directory)
        with surfacing(f"cannot list {path}", Exception, url=self._url):
            try:
                connection = self._connection()
                connection.ask(connection.files.invalidate_cache)
                return list(connection.ask(connection.files.ls, path, detail=True))
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
        with surfacing(f"cannot read {path}", Exception, url=self._url):
            connection = self._connection()
            found: bytes = connection.ask(_read, connection.files, path, start, stop)
            return found

    @override
    def write(self, directory: str, file: str, chunks: Iterable[Chunk]) -> None:
        path = self._join(directory, file)
        with surfacing(f"cannot write {path}", Exception, missing_is_failure=True, url=self._url):
            self._crash_point(f"create {file}")
            connection = self._connection()
            temporary = self._join(directory, temporary_name(file)) if connection.renames else path
            stream = connection.ask(self._open_new, connection.files, directory, temporary)
            try:
                # A turn for each chunk, not for all: other threads may be reading the chunks from files in the same store.
                for chunk in chunks:
                    self._crash_point(f"write {file}")
                    connection.ask(stream.write, chunk, within_s=UPLOAD_S_MAX)
                self._crash_point(f"put {file}")
                connection.ask(stream.close, within_s=UPLOAD_S_MAX)
                if temporary != path:
                    self._crash_point(f"rename {file}")
                    connection.ask(sftp.rename, connection.files, temporary, path)
            except BaseException:
                with contextlib.suppress(Exception):
                    connection.ask(_discard, connection.files, stream, temporary)
                raise

    def _open_new(self, file_system: Any, directory: str, path: str) -> Any:
        """A new writable file, in a directory that other shards may be making at this moment."""
        try:
            return _open(file_system, path)
        except FileNotFoundError:  # a store with real directories, such as SFTP
            parent = self._join(directory)
        for left in reversed(range(parent.count("/") + 1)):
            try:
                file_system.makedirs(parent, exist_ok=True)
                break
            except Exception:
                # fsspec checks, then creates: another shard may create the directory, or its parent, in between.
                file_system.invalidate_cache()
                if file_system.isdir(parent):
                    break
                if not left:
                    raise
        return _open(file_system, path)

    @override
    def remove(self, directory: str, file: str) -> None:
        path = self._join(directory, file)
        with surfacing(f"cannot remove {path}", Exception, url=self._url), contextlib.suppress(FileNotFoundError):
            self._crash_point(f"remove {file}")
            connection = self._connection()
            connection.ask(connection.files.rm_file, path)

    @override
    def remove_directory(self, directory: str) -> None:
        """Do nothing where a directory ends with its last file, as in most stores."""
        with contextlib.suppress(Exception):
            connection = self._connection()
            connection.ask(connection.files.rmdir, self._join(directory))

    @override
    def sync(self, directory: str) -> None:
        """Do nothing: files that such a store shows are durable."""


class _Connection:
    """A file system of fsspec, used in time, and by one thread at a time unless it, and the one that it wraps, allow several.

    Attributes:
        files: the file system. renames: True if it shows files while they are written, and can rename them. is_broken: True if
            it should not be used for another file.
    """

    def __init__(self, file_system: Any) -> None:
        self.files = file_system
        inner = getattr(file_system, "fs", None)
        is_for_several = isinstance(file_system, AsyncFileSystem) and (inner is None or isinstance(inner, AsyncFileSystem))
        self._turn = None if is_for_several else _turn(file_system)
        self.renames = sftp.is_sftp(file_system)
        self.is_broken = False
        self._is_silent = False

    def ask(self, call: Callable[..., Any], *arguments: Any, within_s: float | None = None, **named: Any) -> Any:
        """Make a call of the file system, or of a file of it; return or raise what it does.

        Args:
            within_s: seconds after which TimeoutError is raised, as it is at once from then on; None: ANSWER_S_MAX.
        """

        def in_turn() -> Any:
            with self._turn or contextlib.nullcontext():
                return call(*arguments, **named)

        if self._is_silent:
            raise _NoAnswer("no answer to an earlier request")
        try:
            return in_time(in_turn, ANSWER_S_MAX if within_s is None else within_s)
        except FileNotFoundError:
            raise
        except Exception as error:
            self.is_broken = self._turn is not None
            self._is_silent = self.is_broken and isinstance(error, _NoAnswer)
            raise


_turns: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()
"""Locks by file system: for the same URL, fsspec returns the same one to a thread again."""

_turns_lock = threading.Lock()


def _turn(file_system: Any) -> threading.Lock:
    with _turns_lock:
        return _turns.setdefault(file_system, threading.Lock())


def _open(file_system: Any, path: str) -> Any:
    return sftp.Upload(file_system, path) if sftp.is_paramiko(file_system) else file_system.open(path, "wb")


def _read(file_system: Any, path: str, start: int, stop: int | None) -> bytes:
    if sftp.is_paramiko(file_system):
        return sftp.read(file_system, path, start, stop)
    return bytes(file_system.cat_file(path, start=start, end=stop))


def _discard(file_system: Any, stream: Any, path: str) -> None:
    """Leave nothing of a file that was not completed."""
    if isinstance(stream, AbstractBufferedFile):
        try:
            stream.discard()
        finally:
            stream.closed = True  # or its end would send what it holds
        return
    with contextlib.suppress(Exception):
        stream.close()
    file_system.rm_file(path)


def _name(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]
