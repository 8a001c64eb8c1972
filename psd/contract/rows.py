"""Rows of tables in frames: turns arrays into the parts of a frame's payload, and back. Shared by both sides.

A payload has the ids of all parts, one part after the other, then the values of all parts in that order; either may be absent.
Must not know sockets, shards or what rows mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import InvalidRequest, InvalidTensor
from psd.contract.frames import FRAME_BYTES_MAX, present_bits
from psd.v1 import data_pb2, job_pb2

ID_BYTES = 8
_ID = np.dtype(np.uint64)

DTYPES: dict[job_pb2.DType, np.dtype[Any]] = {
    job_pb2.DTYPE_FLOAT32: np.dtype(np.float32),
    job_pb2.DTYPE_FLOAT16: np.dtype(np.float16),
    job_pb2.DTYPE_BFLOAT16: np.dtype(np.uint16),
}
"""Dtypes in which values are sent; uint16 has the bits of bfloat16."""
_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}


class TableRows(NamedTuple):
    """Rows of one table.

    Attributes:
        table: index in the job spec. ids: (n,) uint64. values: (n, dim), in a dtype of DTYPES.
    """

    table: int
    ids: NDArray[np.uint64]
    values: NDArray[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of ids and values."""
        return self.ids.nbytes + self.values.nbytes


def in_frames(
    tables: Iterable[TableRows], nbytes_max: int = FRAME_BYTES_MAX, *, ids_alone: bool = False
) -> list[list[TableRows]]:
    """Cut rows into frames of at most so many bytes, or of one larger row: views of the arrays, in order. None without rows.

    ids_alone: True if only ids are sent, without values.
    """
    some = [rows for rows in tables if len(rows.ids)]
    nbytes = sum([rows.ids.nbytes + (0 if ids_alone else rows.values.nbytes) for rows in some])
    return list(_cut(some, nbytes_max, ids_alone=ids_alone)) if nbytes > nbytes_max else [some] if some else []


def _cut(tables: Iterable[TableRows], nbytes_max: int, *, ids_alone: bool) -> Iterator[list[TableRows]]:
    frame: list[TableRows] = []
    left = nbytes_max
    for table, ids, values in tables:
        row_bytes = ID_BYTES if ids_alone else ID_BYTES + values.shape[1] * values.dtype.itemsize
        begin = 0
        while begin < len(ids):
            count = min(len(ids) - begin, left // row_bytes)
            if not count and frame:
                yield frame
                frame, left = [], nbytes_max
                continue
            count = max(1, count)
            frame.append(TableRows(table, ids[begin : begin + count], values[begin : begin + count]))
            left -= count * row_bytes
            begin += count
    if frame:
        yield frame


def parts_of(frame: Iterable[TableRows]) -> list[data_pb2.RowsPart]:
    """The descriptions of a frame's parts."""
    return [data_pb2.RowsPart(table=table, rows=len(ids), dtype=_NUMBERS[values.dtype]) for table, ids, values in frame]


def tables_present(rows: Iterable[TableRows], count: int) -> bytes:
    """PushFrame.present for a push of these rows, in a job with so many tables. A table that is named has a gradient, even if
    it has no rows on this shard."""
    mask = np.zeros(count, np.bool_)
    mask[[each.table for each in rows]] = True
    return present_bits(mask)


def payload_of(frame: Sequence[TableRows]) -> list[NDArray[Any]]:
    """The pieces of a frame's payload in their order: all ids, then all values."""
    return [*(rows.ids for rows in frame), *(rows.values for rows in frame)]


def rows_in(
    parts: Sequence[data_pb2.RowsPart],
    payload: memoryview,
    dims: Sequence[int],
    *,
    has_values: bool,
    memory: Sequence[memoryview] = (),
) -> list[TableRows]:
    """The rows of a frame: views of the payload, copied only if they are not aligned.

    Args:
        dims: dims of the job's tables. has_values: False if the payload has only ids; `values` are then new arrays to fill.
        memory: each part's memory for values, if they are not in the payload: `values` are then views of it.

    Raises:
        InvalidRequest: there is no such table, or the payload has another number of bytes. InvalidTensor: a wrong dtype.
    """
    nbytes, count, travels = 0, 0, not memory
    described = []
    for part in parts:
        table, rows = part.table, part.rows
        row_bytes = row_bytes_of(part, dims) if travels else 0
        if rows > 1 and rows * (ID_BYTES + row_bytes) > FRAME_BYTES_MAX:
            raise InvalidRequest(f"rows.rows: {rows} of table {table} are above {FRAME_BYTES_MAX} bytes in one frame")
        nbytes += rows * (ID_BYTES + (row_bytes if has_values else 0))
        count += rows
        described.append((table, (rows, dims[table]), DTYPES[part.dtype]))
    if nbytes != payload.nbytes:
        raise InvalidRequest(f"payload: has {payload.nbytes} bytes, expected {nbytes} for these rows")
    at_ids, at_values = 0, count * ID_BYTES
    found = []
    ids: NDArray[np.uint64]
    values: NDArray[Any]
    for number, (table, shape, dtype) in enumerate(described):
        ids = np.ndarray(shape[:1], _ID, payload, at_ids)
        at_ids += ids.nbytes
        if not travels:
            values = np.ndarray(shape, dtype, memory[number])
        elif not has_values:
            values = np.empty(shape, dtype)
        else:
            values = np.ndarray(shape, dtype, payload, at_values)
            at_values += values.nbytes
            values = values if values.flags.aligned else values.copy()
        found.append(TableRows(table, ids if ids.flags.aligned else ids.copy(), values))
    return found


def row_bytes_of(part: data_pb2.RowsPart, dims: Sequence[int]) -> int:
    """Bytes of the values of one row of a part.

    Raises:
        InvalidRequest: there is no such table. InvalidTensor: a wrong dtype.
    """
    if part.table >= len(dims):
        raise InvalidRequest(f"rows.table: {part.table} is not below {len(dims)}, the number of tables")
    if part.dtype not in DTYPES:
        raise InvalidTensor(f"rows.dtype: expected float32, float16 or bfloat16, got number {part.dtype}")
    return dims[part.table] * DTYPES[part.dtype].itemsize
