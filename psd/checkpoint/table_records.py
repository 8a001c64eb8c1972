"""A checkpoint's facts about tables, and their layout in a shard's `.rows` file: *chunks*, one behind the other.

    rows       ids (n,) u64, last use (n,) u64, rows (n, width) f32: value and slots
    removed    ids (n,) u64 of rows that are not there any more
    history    (n, k) f64: where rows catch up, from which step on which scalars held

Nobody knows how many rows there will be when the first is written, so the file has no header: the part's document says where
each chunk is, and has its CRC-32. A chunk has some MiB, and is all that writers and readers hold of a table.

A table's part is *full*, or has what has changed since the checkpoint that its own builds on: ids that were removed, and rows
that were written; first the ones go, then the others come. Rows are in no order that means anything. Must not know files, nor
stores.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from psd_core.table import CLOCK_MAX, STEP_MAX

CHUNK_BYTES = 4 << 20
"""Bytes of rows from which on a chunk is written."""

ROWS, REMOVED, HISTORY = "rows", "removed", "history"


class StoredRows(NamedTuple):
    """Rows of a table. `ids`: (n,) uint64; `used`: (n,) uint64, clock of the last use; `rows`: (n, width) float32."""

    ids: NDArray[np.uint64]
    used: NDArray[np.uint64]
    rows: NDArray[np.float32]


class _Batch(Protocol):
    @property
    def heads(self) -> NDArray[Any]: ...
    @property
    def rows(self) -> NDArray[np.float32]: ...


class TablePart(Protocol):
    """A table's partition at the cut, as its shard hands it over: a psd_core.table.TableSnapshot, iterated once.

    Attributes:
        step: of the table. clock: of its last push. count: of all its rows on the shard. width: numbers of a row.
        is_full: it has all rows; else those that came after a mark. removed: ids that went after it.
    """

    step: int
    clock: int
    count: int
    width: int
    is_full: bool
    removed: NDArray[np.uint64]

    def __iter__(self) -> Iterator[_Batch]: ...


class TableRecord(NamedTuple):
    """The entry of a table in a part's document. `rows`: how many there are on the shard; else see TablePart."""

    step: int
    clock: int
    rows: int
    width: int
    is_full: bool


class Chunk(NamedTuple):
    """The place of a chunk, and the checksum of its bytes.

    Attributes:
        table: index in the job spec. kind: ROWS, REMOVED or HISTORY. rows: how many.
        start, nbytes: in the part's `.rows` file.
    """

    table: int
    kind: str
    rows: int
    start: int
    nbytes: int
    crc32: int


def rows_nbytes(count: int, width: int) -> int:
    """Bytes of a chunk of rows."""
    return 16 * count + 4 * count * width


def encode_tables(parts: Iterable[TablePart], chunks: list[Chunk]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a `.rows` file; append to `chunks` the place and checksum of each chunk."""
    start = 0
    for table, part in enumerate(parts):
        for kind, count, arrays in _chunks_of(part):
            crc32 = nbytes = 0
            for array in arrays:
                view = np.ascontiguousarray(array).data.cast("B")
                crc32 = zlib.crc32(view, crc32)
                nbytes += view.nbytes
                yield view
            chunks.append(Chunk(table, kind, count, start, nbytes, crc32))
            start += nbytes


def _chunks_of(part: TablePart) -> Iterator[tuple[str, int, list[NDArray[Any]]]]:
    history: NDArray[np.float64] = getattr(part, "history", np.empty((0, 0)))
    if history.size:
        yield HISTORY, len(history), [history]
    for first in range(0, len(part.removed), CHUNK_BYTES // 8):
        removed = part.removed[first : first + CHUNK_BYTES // 8]
        yield REMOVED, len(removed), [removed]
    batches: list[_Batch] = []
    nbytes = 0
    for batch in part:
        batches.append(batch)
        nbytes += batch.rows.nbytes
        if nbytes >= CHUNK_BYTES:
            yield _rows_chunk(batches)
            batches, nbytes = [], 0
    if batches:
        yield _rows_chunk(batches)


def _rows_chunk(batches: list[_Batch]) -> tuple[str, int, list[NDArray[Any]]]:
    ids = np.concatenate([batch.heads["id"] for batch in batches])
    used = np.concatenate([batch.heads["used"] for batch in batches])
    return ROWS, len(ids), [ids, used, *(batch.rows for batch in batches if batch.rows.size)]


def decode_rows(chunk: Chunk, data: bytes, width: int) -> StoredRows:
    """A chunk's rows, as read-only views of its bytes."""
    return StoredRows(
        np.frombuffer(data, "<u8", chunk.rows),
        np.frombuffer(data, "<u8", chunk.rows, 8 * chunk.rows),
        np.frombuffer(data, "<f4", chunk.rows * width, 16 * chunk.rows).reshape(chunk.rows, width),
    )


def problem_of(records: tuple[TableRecord, ...], chunks: tuple[Chunk, ...], nbytes: int) -> str:
    """The first way in which a part's document contradicts itself, in words; empty if it does not."""
    numbers = [n for r in records for n in (r.step, r.clock, r.rows, r.width)]
    numbers += [n for c in chunks for n in (c.table, c.rows, c.start, c.nbytes, c.crc32)]
    if not all(type(n) is int and n >= 0 for n in numbers) or not all(type(r.is_full) is bool and r.width for r in records):
        return "describes tables wrongly"
    for table, record in enumerate(records):
        if record.step > STEP_MAX or record.clock > CLOCK_MAX:
            return f"has table {table} at step {record.step} and clock {record.clock}, from which no table goes on"
    end = 0
    found = [0] * len(records)
    for chunk in chunks:
        record = records[chunk.table]
        of_history = chunk.nbytes if chunk.rows and chunk.nbytes % (8 * chunk.rows) == 0 else -1
        expected = {ROWS: rows_nbytes(chunk.rows, record.width), REMOVED: 8 * chunk.rows, HISTORY: of_history}.get(chunk.kind)
        if chunk.start != end or chunk.nbytes != expected or (chunk.kind == REMOVED and record.is_full):
            return f"describes rows wrongly: {chunk}"
        found[chunk.table] += chunk.rows if chunk.kind == ROWS else 0
        end += chunk.nbytes
    if end != nbytes:
        return f"has rows that end at {end}, not at {nbytes}"
    for table, (record, count) in enumerate(zip(records, found, strict=True)):
        if count > record.rows or (record.is_full and count != record.rows):
            return f"has {count} rows of table {table} instead of {record.rows}"
    return ""
