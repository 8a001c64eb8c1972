"""One shard's part of a checkpoint as bytes: *chunks*, one after the other, in one file without a header.

When the first is written their number is not known yet, so the part's document lists the chunks, in the order of their bytes,
each with its CRC-32. A chunk has some MiB, and writers and readers hold only a few of a part. Its kind says what it contains;
the kinds are in blocks.py, tables.py and vectors.py. Must not know files, or where the values are kept.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import CheckpointCorrupt


class ChunkKind(NamedTuple):
    """A kind of chunk.

    Attributes:
        owner: the kind of thing whose values it has: a space, a table or a vector; `Chunk.of` is the owner's number.
        nbytes: takes the owner and the chunk; returns the bytes that the chunk must have, -1 if no such chunk is possible.
        is_run: True for a run of the owner's elements: all parts together have each element exactly once.
    """

    name: str
    owner: str
    nbytes: Callable[[Any, Chunk], int]
    is_run: bool = False


class NewChunk(NamedTuple):
    """A chunk to write.

    Attributes:
        kind: name of its kind. of: number of the owner. first: first element of a run. length: elements or rows.
    """

    kind: str
    of: int
    first: int
    length: int
    arrays: Sequence[NDArray[Any]]


class Chunk(NamedTuple):
    """A stored chunk, and the checksum of its bytes.

    Attributes:
        kind, of, first, length: as in NewChunk.
        part: index of the shard that wrote it. start: its offset in that shard's file.
    """

    kind: str
    of: int
    first: int
    length: int
    nbytes: int
    crc32: int
    part: int
    start: int

    def to_document(self) -> dict[str, Any]:
        """The fields that the part's document has; the others follow from the chunk's place there."""
        return dict(zip(self._fields[:6], self[:6], strict=True))


def encode(new: Iterable[NewChunk], part: int, chunks: list[Chunk]) -> Iterator[memoryview]:
    """Yield the bytes of a part, array by array, without a copy; append the chunks' records to `chunks`."""
    start = 0
    for content in new:
        crc32 = nbytes = 0
        for array in content.arrays:
            view = np.ascontiguousarray(array).data.cast("B")
            crc32 = zlib.crc32(view, crc32)
            nbytes += view.nbytes
            yield view
        chunks.append(Chunk(*content[:4], nbytes, crc32, part, start))
        start += nbytes


def parse_chunks(documents: Iterable[Mapping[str, Any]], part: int) -> tuple[Chunk, ...]:
    """The chunks that a part's document lists."""
    chunks: list[Chunk] = []
    start = 0
    for document in documents:
        chunks.append(Chunk(**document, part=part, start=start))
        start += chunks[-1].nbytes
    return tuple(chunks)


def check_chunk(kind: ChunkKind, owner: Any, chunk: Chunk) -> None:
    """Raise CheckpointCorrupt if the owner cannot have such a chunk."""
    is_sound = all(type(number) is int and number >= 0 for number in chunk[1:]) and chunk.length > 0
    if not is_sound or chunk.nbytes != kind.nbytes(owner, chunk):
        raise CheckpointCorrupt(f"describes a chunk wrongly: {chunk}")


def tiled(chunks: Iterable[Chunk], size: int, what: str) -> tuple[Chunk, ...]:
    """The runs in order; CheckpointCorrupt unless they have each of `size` elements exactly once."""
    ordered = sorted(chunks, key=lambda chunk: chunk.first)
    end = 0
    for chunk in ordered:
        if chunk.first != end:
            break
        end += chunk.length
    if end != size or sum(chunk.length for chunk in ordered) != end:
        raise CheckpointCorrupt(f"the parts do not hold {what} from element {end} on exactly once")
    return tuple(ordered)
