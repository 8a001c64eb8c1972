"""Reads the values of a checkpoint, for the shards of any layout of the job.

Chunks are read whole, a few ahead in other threads, and their CRC-32 is checked before a value is used. A block that was stored
as in the new layout consists of views of the bytes that were read; others are assembled from the chunks that they overlap. So
at most a few blocks are in memory. Must not know where the values go.
"""

from __future__ import annotations

import bisect
import itertools
import zlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

import numpy as np

from psd.checkpoint.blocks import BLOCK, BlockPart, RestoredBlock, decode_block
from psd.checkpoint.chunks import Chunk
from psd.checkpoint.cut import data_file
from psd.checkpoint.manifest import KINDS, Manifest
from psd.checkpoint.storage import FileStore
from psd.checkpoint.vectors import ELEMENTS, decode_vector
from psd.contract.errors import CheckpointCorrupt, SpecMismatch
from psd.contract.jobspec import TensorSpec
from psd.contract.layout import Block, Layout
from psd_core.vector import Piece
from psd_core.vector_operations import extent

READERS = 4
CHUNKS_AHEAD_MAX = 8
"""Chunks read ahead, for blocks at most 4 MiB times one plus the slots each: enough to hide a store's latency, little compared
with a shard's memory."""


class TensorPlace(NamedTuple):
    """A tensor's place in the spaces of a checkpoint, by one of its names. A tensor without elements may have any place."""

    name: str
    tensor: TensorSpec
    space: int
    start: int


def tensor_places(manifest: Manifest) -> list[TensorPlace]:
    """The places of all tensors, by each of their names."""
    where = {
        int(tensor): (index, int(start))
        for index, stored in enumerate(manifest.spaces)
        for tensor, start in zip(stored.space.tensors, stored.space.starts, strict=True)
    }
    return [
        TensorPlace(name, tensor, *where.get(index, (0, 0)))
        for index, tensor in enumerate(manifest.spec.tensors)
        for name in (tensor.name, *tensor.aliases)
    ]


def overlapping(manifest: Manifest, kind: str, of: int, first: int, count: int) -> Sequence[Chunk]:
    """The chunks that hold a run of a space or a vector, in order."""
    chunks = manifest.runs[kind, of]
    begin = bisect.bisect_right(chunks, first, key=_first) - 1
    return chunks[begin : bisect.bisect_left(chunks, first + count, key=_first)]


def _first(chunk: Chunk) -> int:
    return chunk.first


def read_ahead(storage: FileStore, manifest: Manifest, chunks: Iterable[Chunk]) -> Generator[bytes]:
    """The bytes of each chunk; threads read a few ahead. Close the iterator to end the threads."""
    with ThreadPoolExecutor(READERS, thread_name_prefix="psd-checkpoint") as pool:
        coming = iter(chunks)
        ahead: deque[Future[bytes]] = deque()
        try:
            while True:
                for chunk in itertools.islice(coming, CHUNKS_AHEAD_MAX - len(ahead)):
                    ahead.append(pool.submit(read_chunk, storage, manifest, chunk))
                if not ahead:
                    return
                yield ahead.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def read_chunk(storage: FileStore, manifest: Manifest, chunk: Chunk) -> bytes:
    """The bytes of a chunk; CheckpointCorrupt if one has changed since it was written."""
    file = data_file(chunk.part, manifest.shard_count)
    try:
        data = storage.read(manifest.name, file, chunk.start, chunk.start + chunk.nbytes)
    except FileNotFoundError:
        raise CheckpointCorrupt(f"{manifest.name}/{file}: is missing") from None
    if len(data) != chunk.nbytes or zlib.crc32(data) != chunk.crc32:
        at = f" from {chunk.first} on" if KINDS[chunk.kind].is_run else ""
        raise CheckpointCorrupt(
            f"{manifest.name}/{file}: the bytes {chunk.start} to {chunk.start + chunk.nbytes} were changed: "
            f"the checksum of {chunk.kind} of {KINDS[chunk.kind].owner} {chunk.of}{at} does not match"
        )
    return data


class BlockReader:
    """Reads stored blocks in a known order, ahead of their use. Close it."""

    def __init__(self, storage: FileStore, manifest: Manifest, wanted: Iterable[Sequence[Chunk]]) -> None:
        """`wanted`: the chunks for each use, in order; a chunk that comes twice in a row is read once."""
        self._manifest = manifest
        self._coming = read_ahead(storage, manifest, _without_repeats(wanted))
        self._current: tuple[Chunk, BlockPart] | None = None

    def get(self, chunk: Chunk) -> BlockPart:
        """The next block in the order, or the previous one again; CheckpointCorrupt if one of its bytes has changed."""
        if self._current is None or self._current[0] is not chunk:
            self._current = None
            self._current = chunk, decode_block(self._manifest.spaces[chunk.of], chunk, next(self._coming))
        return self._current[1]

    def close(self) -> None:
        """End the threads."""
        self._coming.close()


def _without_repeats(wanted: Iterable[Sequence[Chunk]]) -> Iterator[Chunk]:
    last = None
    for chunks in wanted:
        for chunk in chunks:
            if chunk is not last:
                yield chunk
            last = chunk


# -- restoring ---------------------------------------------------------------------------------------------------------


def restored_blocks(storage: FileStore, manifest: Manifest, layout: Layout, shard_index: int) -> Iterator[RestoredBlock]:
    """Yield the blocks of one shard, as `CheckpointDirectory.read_blocks` says."""
    if difference := manifest.spec.difference_from_stored(layout.spec, manifest.name):
        raise SpecMismatch(difference)
    blocks = layout.blocks_of(shard_index)
    sources = [overlapping(manifest, BLOCK.name, block.space, block.offset, block.length) for block in blocks]
    with closing(BlockReader(storage, manifest, sources)) as stored_blocks:
        for block, source in zip(blocks, sources, strict=True):
            if len(source) == 1 and (source[0].first, source[0].length) == (block.offset, block.length):
                part = stored_blocks.get(source[0])
                has_window = manifest.spec.world_size == layout.spec.world_size
                yield RestoredBlock(
                    block,
                    part.version,
                    part.parameter,
                    part.slots,
                    part.steps,
                    part.sessions if has_window else None,
                    part.clocks if has_window else None,
                )
            else:
                yield _assembled(manifest, block, source, stored_blocks)


def _assembled(manifest: Manifest, block: Block, source: Sequence[Chunk], stored_blocks: BlockReader) -> RestoredBlock:
    """A block that was cut differently, assembled from several chunks.

    Without rounds, a tensor's pieces may have seen different numbers of updates. The largest counts, because with it no rule
    takes a larger step than it would have.
    """
    stored = manifest.spaces[block.space]
    parameter = np.empty(block.length, block.dtype)
    slots = {name: np.empty(block.length, block.dtype) for name in stored.slots}
    steps = np.zeros(len(block.segment_ends), np.uint64)
    first = stored.first_tensor(block.offset)
    version = 0
    for chunk in source:
        part = stored_blocks.get(chunk)
        version = max(version, part.version)
        start = max(part.offset, block.offset)
        stop = min(part.offset + part.length, block.offset + block.length)
        to = slice(start - block.offset, stop - block.offset)
        here = slice(start - part.offset, stop - part.offset)
        parameter[to] = part.parameter[here]
        for name, slot in slots.items():
            slot[to] = part.slots[name][here]
        low, high = stored.first_tensor(start), stored.first_tensor(stop - 1) + 1
        its_first = stored.first_tensor(part.offset)
        into = steps[low - first : high - first]
        np.maximum(into, part.steps[low - its_first : high - its_first], out=into)
    return RestoredBlock(block, version, parameter, slots, steps, None, None)


def restored_vectors(storage: FileStore, manifest: Manifest, shard_index: int = 0, shard_count: int = 1) -> Iterator[Piece]:
    """Elements of the vectors for one shard, as `CheckpointDirectory.read_vectors` says."""
    for number, spec in enumerate(manifest.vectors):
        begin, end = extent(spec.size, shard_index, shard_count)
        chunks = overlapping(manifest, ELEMENTS.name, number, begin, end - begin) if begin < end else ()
        with closing(read_ahead(storage, manifest, chunks)) as coming:
            for chunk, data in zip(chunks, coming, strict=True):
                low, high = max(begin, chunk.first), min(end, chunk.first + chunk.length)
                yield Piece(spec, low, decode_vector(spec, data)[low - chunk.first : high - chunk.first])
