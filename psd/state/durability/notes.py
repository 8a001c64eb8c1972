"""Notes: the small files that a shard keeps beside its arena. Each is replaced whole, and has a checksum.

    8 bytes    magic "PSDNOTE1"
    4 bytes    CRC-32 of what follows, little-endian
    content    in the format of its writer

Must not know what notes say.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable
from pathlib import Path

from psd.contract.errors import InternalError, OutOfSpace
from psd_core import private_files
from psd_core.arena import NO_SPACE, ArenaError
from psd_core.private_files import NotOurs

MAGIC = b"PSDNOTE1"
_KIND = MAGIC[:-1]  # what the notes of all releases begin with
_CHECK_BYTES = 4
_UNFINISHED = ".new"


class StateDamaged(ArenaError):
    """A file of a state directory differs from what was written; the message names it."""


class StateUnsupported(ArenaError):
    """A file of a state directory has a format that this release does not know; the message names it."""


def write(
    directory: Path, name: str, content: bytes, crash_point: Callable[[str], None] = lambda _: None, *, is_durable: bool = False
) -> None:
    """Write a note in place of an earlier one, whole or not at all.

    Args:
        crash_point: called with "before" and "after". is_durable: True if the note must be on the disk when this returns.

    Raises:
        OutOfSpace, InternalError: it cannot be written; the earlier note is unchanged.
    """
    path, temporary = directory / name, directory / f"{name}{_UNFINISHED}"
    try:
        crash_point("before")
        private_files.write(temporary, MAGIC + _check_of(content) + content, is_durable=is_durable)
        temporary.replace(path)
        if is_durable:
            sync_directory(directory)
    except OSError as error:
        if not isinstance(error, NotOurs):
            with contextlib.suppress(OSError):
                temporary.unlink()
        if error.errno in NO_SPACE:
            raise OutOfSpace(f"{directory} has no room for the shard's notes: {error.strerror}") from error
        raise InternalError(f"{path} cannot be written: {error.strerror or error}") from error
    crash_point("after")


def read(path: Path) -> bytes:
    """The content of a note; empty if there is none.

    Raises:
        StateDamaged: it is not what was written. StateUnsupported: it begins like a note of another release.
        NotOurs, OSError: it cannot be read.
    """
    try:
        data = private_files.read(path)
    except FileNotFoundError:
        return b""
    start = len(MAGIC) + _CHECK_BYTES
    is_whole = len(data) >= start and _check_of(data[start:]) == data[len(MAGIC) : start]
    if is_whole and data.startswith(MAGIC):
        return data[start:]
    if not is_whole and data.startswith(_KIND) and not data.startswith(MAGIC):
        raise StateUnsupported(f"{path}: begins with {data[: len(MAGIC)]!r}, not with {MAGIC!r}: another release wrote it")
    raise StateDamaged(f"{path}: is cut off or was changed: its checksum does not match")


def _check_of(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(_CHECK_BYTES, "little")


def paths(directory: Path, prefix: str) -> list[Path]:
    """The notes in a directory whose names begin with `prefix`."""
    return [path for path in directory.glob(f"{prefix}*") if path.suffix != _UNFINISHED]


def remove(directory: Path, name: str) -> None:
    """Delete a note, if it exists, and what a killed process has left of its next version."""
    for path in (directory / name, directory / f"{name}{_UNFINISHED}"):
        path.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Write the names in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
