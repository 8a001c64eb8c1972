"""The declaration of a vector, and what never changes in a store's files: the log's superblock, the text of the catalog.

Owns the checks of a declaration, and the errors; csrc/vector.h has the other formats. Must not open, map or lock anything.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from psd_core._store_format import ArenaCorrupt, Superblock
from psd_core.vector_operations import DTYPES, NAME_BYTES_MAX, SIZE_MAX, extent

SUPERBLOCK = Superblock(b"PSDVECTS", 5, "a log of vectors", 4096)
_FRONT = struct.Struct("<QQQ")


class VectorError(ValueError):
    """A batch, a declaration or a read that cannot be; nothing has changed. The message names the field and the limit."""


class NoSuchVector(VectorError):
    """A name that no vector has."""


class BatchForgotten(VectorError):
    """A batch was sent again so late that its answer is no longer kept."""


class VectorSpec(NamedTuple):
    """The declaration of a vector.

    Attributes:
        name: 1 to 256 bytes of UTF-8.
        size: elements, >= 1; of a matrix rows * columns.
        dtype: one of DTYPES.
        columns: length of a matrix's rows; 0: it is no matrix.
    """

    name: str
    size: int
    dtype: str = "float64"
    columns: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 4 if self.dtype == "float32" else 8

    def check(self) -> None:
        """Raise VectorError, naming the field, if this cannot be."""
        name = self.name
        if not isinstance(name, str) or not 1 <= len(name.encode(errors="replace")) <= NAME_BYTES_MAX:
            raise VectorError(f"name: expected 1 to {NAME_BYTES_MAX} bytes, got {name!r}")
        if not isinstance(self.size, int) or not 1 <= self.size <= SIZE_MAX:
            raise VectorError(f"size: expected a whole number from 1 to {SIZE_MAX}, got {self.size!r}")
        if self.dtype not in DTYPES:
            raise VectorError(f"dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if not isinstance(self.columns, int) or self.columns < 0 or (self.columns and self.size % self.columns):
            raise VectorError(f"columns: expected 0, or a divisor of size, {self.size}, got {self.columns!r}")


class VectorPart(NamedTuple):
    """A store's part of a vector: the elements from `begin` to before `end`, as vector `number` of its files."""

    spec: VectorSpec
    number: int
    begin: int
    end: int


class LogFront(NamedTuple):
    """The numbers that a store was made with, the facts of its log's superblock."""

    shard: int
    shards: int
    senders: int

    def pack(self) -> bytes:
        """The superblock."""
        return SUPERBLOCK.pack(_FRONT.pack(*self))

    @classmethod
    def read(cls, read: Callable[[int, int], bytes], size: int) -> LogFront:
        """The numbers in the log of this size, as Superblock.read reads it. Raises ArenaCorrupt."""
        return cls(*_FRONT.unpack(SUPERBLOCK.read(read, size)))


def catalog_text(parts: Iterable[VectorPart]) -> bytes:
    """The catalog: which vectors there are, and by which numbers, behind a line with the CRC-32 of that."""
    text = json.dumps([[*part.spec, part.number] for part in parts]).encode()
    return b"%08x\n%s" % (zlib.crc32(text), text)


def catalog_of(text: bytes, shard: int, shards: int) -> dict[str, VectorPart]:
    """The vectors of a catalog, by name. Raises ArenaCorrupt."""
    check, _, text = text.partition(b"\n")
    if check != b"%08x" % zlib.crc32(text):
        raise ArenaCorrupt("catalog: it does not have its checksum")
    try:
        rows: list[list[Any]] = json.loads(text)
        specs = [(VectorSpec(*row[:-1]), int(row[-1])) for row in rows]
        for spec, _ in specs:
            spec.check()
    except (ValueError, TypeError, IndexError) as error:
        raise ArenaCorrupt(f"catalog: {error}") from None
    return {spec.name: VectorPart(spec, number, *extent(spec.size, shard, shards)) for spec, number in specs}
