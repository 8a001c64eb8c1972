"""Reads the numbers of a checkpoint: for the shards of any layout of the job, and to check every byte.

Records are read whole, a few ahead in threads of their own, and their CRC-32 is compared before a number is used. A block of
the new layout that was stored as it is comes as views of what was read; others are assembled from the records that they
overlap, so at most a few blocks are in memory. Must not know where the numbers go.
"""

from __future__ import annotations

import bisect
import itertools
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple, TypeVar

import numpy as np

from psd.checkpoint import safetensors
from psd.checkpoint.cut import data_file
from psd.checkpoint.manifest import Manifest, Part
from psd.checkpoint.records import BlockPart, Record, RestoredBlock, decode
from psd.checkpoint.storage import FileStore
from psd.checkpoint.table_records import Chunk
from psd.checkpoint.vector_records import VectorRun
from psd.contract.errors import CheckpointCorrupt, CheckpointFailed, SpecMismatch
from psd.contract.jobspec import TensorSpec
from psd.contract.layout import Block, Layout

READERS = 4
RECORDS_AHEAD_MAX = 8
"""Records read ahead, each of at most 4 MiB times one plus the slots: enough to hide a store's latency, little beside a shard's
memory."""

Item = TypeVar("Item")
Data = TypeVar("Data")
Place = TypeVar("Place", Record, Chunk, VectorRun)

Advance = Callable[[int], None]
"""A callback that takes the number of further bytes read."""


class TensorPlace(NamedTuple):
    """A tensor's place in the spaces of a checkpoint, by one of its names. Without elements: any place."""

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


def overlapping(manifest: Manifest, space: int, offset: int, length: int) -> Sequence[Record]:
    """The records that hold a run of a space, by offset."""
    records = manifest.records[space]
    first = bisect.bisect_right(records, offset, key=_offset) - 1
    return records[first : bisect.bisect_left(records, offset + length, key=_offset)]


def _offset(record: Record) -> int:
    return record.offset


def read_ahead(read: Callable[[Item], Data], items: Iterable[Item]) -> Generator[Data]:
    """The results of `read`, in the order of the items; a few are read ahead, in threads. Close the iterator to end these."""
    with ThreadPoolExecutor(READERS, thread_name_prefix="psd-checkpoint") as pool:
        coming = iter(items)
        ahead: deque[Future[Data]] = deque()
        try:
            while True:
                ahead.extend(pool.submit(read, item) for item in itertools.islice(coming, RECORDS_AHEAD_MAX - len(ahead)))
                if not ahead:
                    return
                yield ahead.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


class RecordReader:
    """Reads records in a known order, ahead of their use. Close it."""

    def __init__(self, storage: FileStore, manifest: Manifest, wanted: Iterable[Sequence[Record]]) -> None:
        """`wanted`: the records of each use; a record that stands twice in a row is read once."""
        self._storage = storage
        self._manifest = manifest
        self._coming = read_ahead(self._read, _without_repeats(wanted))
        self._current: tuple[Record, BlockPart] | None = None

    def get(self, record: Record) -> BlockPart:
        """The next record of the order, or the previous one again; CheckpointCorrupt if a byte of it has changed."""
        if self._current is None or self._current[0] is not record:
            self._current = None
            self._current = (record, next(self._coming))
            assert self._current[1].offset == record.offset
        return self._current[1]

    def _read(self, record: Record) -> BlockPart:
        data = read_record(self._storage, self._manifest, record)
        return decode(record, data, self._manifest.spaces[record.space].fields(record.length, record.segments))

    def close(self) -> None:
        """End the threads."""
        self._coming.close()


def _without_repeats(wanted: Iterable[Sequence[Record]]) -> Iterator[Record]:
    last = None
    for records in wanted:
        for record in records:
            if record is not last:
                yield record
            last = record


def read_record(storage: FileStore, manifest: Manifest, record: Record) -> bytes:
    """The bytes of a record; CheckpointCorrupt if any has changed since it was written."""
    file = data_file(record.part, manifest.shard_count)
    return read_checked(storage, manifest.name, file, record, f"block {record.offset} of space {record.space}")


def read_checked(storage: FileStore, name: str, file: str, place: Place, what: str) -> bytes:
    """The bytes of a place in a file; CheckpointCorrupt if any has changed since it was written."""
    try:
        data = storage.read(name, file, place.start, place.start + place.nbytes)
    except FileNotFoundError:
        raise CheckpointCorrupt(f"{name}/{file}: is missing") from None
    if len(data) != place.nbytes or zlib.crc32(data) != place.crc32:
        raise CheckpointCorrupt(
            f"{name}/{file}: the bytes {place.start} to {place.start + place.nbytes} were changed: "
            f"the checksum of {what} does not match"
        )
    return data


# -- restoring ---------------------------------------------------------------------------------------------------------


def restored_blocks(storage: FileStore, manifest: Manifest, layout: Layout, shard_index: int) -> Iterator[RestoredBlock]:
    """Yield the blocks of one shard, as `CheckpointDirectory.read_blocks` says."""
    if difference := manifest.spec.difference_from_stored(layout.spec, manifest.name):
        raise SpecMismatch(difference)
    blocks = layout.blocks_of(shard_index)
    sources = [overlapping(manifest, block.space, block.offset, block.length) for block in blocks]
    with closing(RecordReader(storage, manifest, sources)) as records:
        for block, source in zip(blocks, sources, strict=True):
            if len(source) == 1 and (source[0].offset, source[0].length) == (block.offset, block.length):
                part = records.get(source[0])
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
                yield _assembled(manifest, block, source, records)


def _assembled(manifest: Manifest, block: Block, source: Sequence[Record], records: RecordReader) -> RestoredBlock:
    """A block that was cut differently, assembled from several records.

    A tensor's pieces may have seen different numbers of updates where gradients arrive one by one; the largest holds, because
    with it no rule takes a larger step than it would have.
    """
    stored = manifest.spaces[block.space]
    parameter = np.empty(block.length, block.dtype)
    slots = {name: np.empty(block.length, block.dtype) for name in stored.slots}
    steps = np.zeros(len(block.segment_ends), np.uint64)
    first = stored.first_tensor(block.offset)
    for record in source:
        part = records.get(record)
        start = max(record.offset, block.offset)
        stop = min(record.offset + record.length, block.offset + block.length)
        to = slice(start - block.offset, stop - block.offset)
        here = slice(start - record.offset, stop - record.offset)
        parameter[to] = part.parameter[here]
        for name, slot in slots.items():
            slot[to] = part.slots[name][here]
        low, high = stored.first_tensor(start), stored.first_tensor(stop - 1) + 1
        its_first = stored.first_tensor(record.offset)
        into = steps[low - first : high - first]
        np.maximum(into, part.steps[low - its_first : high - its_first], out=into)
    version = max(record.version for record in source)
    return RestoredBlock(block, version, parameter, slots, steps, None, None)


# -- checking ----------------------------------------------------------------------------------------------------------


def verify_part(storage: FileStore, manifest: Manifest, part: Part, advance: Advance) -> Iterator[str]:
    """Read every byte of a part's data file; return the problems in words."""
    file = data_file(part.shard_index, manifest.shard_count)
    try:
        header = storage.read(manifest.name, file, 0, part.header_bytes)
        if zlib.crc32(header) != part.header_crc32 or len(header) != part.header_bytes:
            yield f"{manifest.name}/{file}: the header, bytes 0 to {part.header_bytes}, was changed"
        else:
            yield from _header_problems(manifest, part, header)
    except (FileNotFoundError, CheckpointFailed) as error:
        yield f"{manifest.name}/{file}: {error}"
        return
    advance(part.header_bytes)
    yield from problems_of(part.records, lambda record: read_record(storage, manifest, record), advance)


def problems_of(places: Iterable[Place], read: Callable[[Place], object], advance: Advance) -> Iterator[str]:
    """Read all places of a file; return the problems in words."""
    for place in places:
        try:
            read(place)
        except (CheckpointCorrupt, CheckpointFailed) as error:
            yield str(error)
        advance(place.nbytes)


def _header_problems(manifest: Manifest, part: Part, header: bytes) -> Iterator[str]:
    """Compare the file's own header, which other readers use, with the documents; they differ only by a defect of psd."""
    expected = safetensors.lay_out(
        (field.tensor_name(record.space, record.offset), field.dtype, (field.length,))
        for record in part.records
        for field in manifest.spaces[record.space].fields(record.length, record.segments)
    )
    entries, _ = safetensors.parse_header(header[safetensors.PREFIX_BYTES :])
    # Empty tensors have no place of their own, so the order of the bytes is not quite the order of the header.
    if sorted(entries) != sorted(expected):
        yield f"{manifest.name}/{data_file(part.shard_index, manifest.shard_count)}: the header differs from the documents"
