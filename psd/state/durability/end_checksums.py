"""The seal of a state directory whose shard has ended in order: length and CRC-32 of each run of bytes in its files.

Pages, rows and stripes have checksums at all times (csrc/content.h). What lies around them changes in place, word by word, so
it is sealed when nothing changes any more, and checked before the next process uses a byte. Holes are not sealed, nor are the
arena's pages. Must not know what the files hold.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from psd.state.durability.notes import StateDamaged, sync_directory
from psd.v1.storage_pb2 import SealedFile
from psd_core.private_files import open_own

RUN_BYTES = 4 << 20
"""Length of most runs; the last one of a stretch is shorter."""

_READ_BYTES = 1 << 20
_THREADS = 4

Stretch = tuple[int, int]
"""Position of the first byte, and length."""


def seal(directory: Path, arena: Path, front_bytes: int, planes: Iterable[Path], others: Iterable[Path]) -> list[SealedFile]:
    """Write an arena and other files to the disk, and return their seals: of the arena, of what lies before its pages.

    Args:
        planes: files of the arena that have pages' parameters, and nothing else.

    Raises:
        OSError: a file cannot be read, or does not reach the disk.
    """
    found = [_seal(directory, arena, [(0, front_bytes)]), *(_seal(directory, path, [(0, 0)]) for path in planes)]
    found += [_seal(directory, path) for path in others]
    for place in {directory.absolute().parent, *((directory / file.name).parent for file in found)}:
        sync_directory(place)
    return found


def check(directory: Path, files: Iterable[SealedFile]) -> None:
    """Read and check everything that was sealed.

    Raises:
        StateDamaged: a byte has changed since, or the disk cannot read it. OSError: a file cannot be opened or read for now.
    """
    for file in files:
        path = directory / file.name
        try:
            descriptor = open_own(path, os.O_RDONLY)
            try:
                found = _checksums(descriptor, [(run.start, run.nbytes) for run in file.runs])
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            raise StateDamaged(f"{path}: is missing") from None
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise StateDamaged(f"{path}: cannot be read: {error.strerror or error}") from error
        for run, crc32 in zip(file.runs, found, strict=True):
            if crc32 != run.crc32:
                raise StateDamaged(
                    f"{path}: the bytes {run.start} to {run.start + run.nbytes} have changed, or were cut off, since the shard "
                    "ended: their checksum does not match"
                )


def _seal(directory: Path, path: Path, stretches: Iterable[Stretch] = ()) -> SealedFile:
    descriptor = open_own(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        runs = [run for stretch in stretches or _data(descriptor) for run in _runs(*stretch)]
        checksums = _checksums(descriptor, runs)
    finally:
        os.close(descriptor)
    found = SealedFile(name=str(path.relative_to(directory)))
    for (start, nbytes), crc32 in zip(runs, checksums, strict=True):
        found.runs.add(start=start, nbytes=nbytes, crc32=crc32)
    return found


def _runs(start: int, nbytes: int) -> Iterator[Stretch]:
    for at in range(start, start + nbytes, RUN_BYTES):
        yield at, min(RUN_BYTES, start + nbytes - at)


def _data(descriptor: int) -> Iterator[Stretch]:
    """The stretches of a file that are not holes."""
    end, size = 0, os.fstat(descriptor).st_size
    while end < size:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return  # a hole up to the end
        end = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, end - start


def _checksums(descriptor: int, runs: Sequence[Stretch]) -> list[int]:
    """The CRC-32 of each run; -1 if the run is cut off."""

    def checksum(run: Stretch) -> int:
        (at, left), crc32 = run, 0
        while left > 0 and (data := os.pread(descriptor, min(left, _READ_BYTES), at)):
            crc32, at, left = zlib.crc32(data, crc32), at + len(data), left - len(data)
        return -1 if left else crc32

    if len(runs) < _THREADS:
        return [checksum(run) for run in runs]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="psd-seal") as pool:
        return list(pool.map(checksum, runs))
