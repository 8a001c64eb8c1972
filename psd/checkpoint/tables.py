"""A checkpoint's facts about tables, and their layout in chunks:

    rows       ids (n,) u64, last use (n,) u64, rows (n, width) f32: value and slots
    removed    ids (n,) u64 of rows that were removed
    history    (n, k) f64: if rows catch up, the scalars, and the step from which on each set was in force

A table's part is *full*, or has only the changes since the checkpoint on which its own builds: ids of removed rows, and written
rows; readers apply them in this order. The order of rows has no meaning. Must not know files or stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from psd.checkpoint.chunks import Chunk, ChunkKind, NewChunk
from psd.contract.errors import CheckpointCorrupt
from psd_core.table import CLOCK_MAX, STEP_MAX

CHUNK_BYTES = 4 << 20
"""Bytes of rows from which a chunk is written."""


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
    """A shard's part of a table at the cut: a psd_core.table.TableSnapshot, which can be iterated once.

    Attributes:
        step: the table's step. clock: clock of its last push. count: number of all its rows on the shard.
        width: numbers in a row. is_full: True if it has all rows; else it has those written after a mark.
        removed: ids of rows removed after the mark.
    """

    step: int
    clock: int
    count: int
    width: int
    is_full: bool
    removed: NDArray[np.uint64]

    def __iter__(self) -> Iterator[_Batch]: ...


class TableRecord(NamedTuple):
    """The entry of a table in a part's document. `rows`: their number on the shard; the others are as in TablePart."""

    step: int
    clock: int
    rows: int
    width: int
    is_full: bool


def _history_nbytes(_: TableRecord, chunk: Chunk) -> int:
    return chunk.nbytes if chunk.nbytes % (8 * chunk.length) == 0 else -1


ROWS = ChunkKind("rows", "table", lambda table, chunk: chunk.length * (16 + 4 * table.width))
REMOVED = ChunkKind("removed", "table", lambda table, chunk: -1 if table.is_full else 8 * chunk.length)
HISTORY = ChunkKind("history", "table", _history_nbytes)


def table_chunks(parts: Iterable[TablePart]) -> Iterator[NewChunk]:
    """A shard's tables as chunks."""
    for table, part in enumerate(parts):
        history: NDArray[np.float64] = getattr(part, "history", np.empty((0, 0)))
        if history.size:
            yield NewChunk(HISTORY.name, table, 0, len(history), [history])
        for first in range(0, len(part.removed), CHUNK_BYTES // 8):
            removed = part.removed[first : first + CHUNK_BYTES // 8]
            yield NewChunk(REMOVED.name, table, 0, len(removed), [removed])
        batches: list[_Batch] = []
        nbytes = 0
        for batch in part:
            batches.append(batch)
            nbytes += batch.rows.nbytes
            if nbytes >= CHUNK_BYTES:
                yield _rows(table, batches)
                batches, nbytes = [], 0
        if nbytes:
            yield _rows(table, batches)


def _rows(table: int, batches: list[_Batch]) -> NewChunk:
    ids = np.concatenate([batch.heads["id"] for batch in batches])
    used = np.concatenate([batch.heads["used"] for batch in batches])
    return NewChunk(ROWS.name, table, 0, len(ids), [ids, used, *(batch.rows for batch in batches if batch.rows.size)])


def decode_rows(chunk: Chunk, data: bytes) -> StoredRows:
    """A chunk's rows, as read-only views of its bytes."""
    n = chunk.length
    rows = np.frombuffer(data, "<f4", offset=16 * n).reshape(n, -1)
    return StoredRows(np.frombuffer(data, "<u8", n), np.frombuffer(data, "<u8", n, 8 * n), rows)


def check_tables(records: Sequence[TableRecord], chunks: Iterable[Chunk]) -> None:
    """Raise CheckpointCorrupt if a part's document contradicts itself."""
    found = [0] * len(records)
    for chunk in chunks:
        if chunk.kind == ROWS.name:
            found[chunk.of] += chunk.length
    for table, (record, count) in enumerate(zip(records, found, strict=True)):
        numbers = [record.step, record.clock, record.rows, record.width - 1]
        if not all(type(n) is int and n >= 0 for n in numbers) or type(record.is_full) is not bool:
            raise CheckpointCorrupt(f"describes table {table} wrongly: {record}")
        if record.step > STEP_MAX or record.clock > CLOCK_MAX:
            is_at = f"has table {table} at step {record.step} and clock {record.clock}"
            raise CheckpointCorrupt(f"{is_at}, from which no table goes on")
        if count > record.rows or (record.is_full and count != record.rows):
            raise CheckpointCorrupt(f"has {count} rows of table {table} instead of {record.rows}")
