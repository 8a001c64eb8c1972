"""Rows of tables at one worker: divides the gradients of a push, and the ids of a pull, among the shards.

Each distinct id is sent once. Must not know sessions, rounds or what tables are for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import psd_core
from psd.contract.errors import InvalidRequest
from psd.contract.layout import Layout
from psd.contract.rows import TableRows
from psd_client.lanes.rows_memory import RowsMemory
from psd_client.lanes.shards import THROUGHPUT_MIN
from psd_core.distinct import Distinct, distinct_of_each, expand_each, sum_each

PULL_IDS_MAX = 1 << 16
"""Most ids in one call, if the shards allow so many. Larger pulls are made of several calls."""

REMEMBERED = 2
"""Number of batches whose distinct ids are remembered: if rows are fetched ahead, the next pull comes before the push."""
REMEMBERED_BYTES_MAX = 8 << 20
"""Most bytes of ids in a batch that is remembered."""

_FLOAT32, _UINT16 = np.dtype(np.float32), np.dtype(np.uint16)

Gradients = Mapping[int, tuple[NDArray[Any], NDArray[Any]]]
"""Gradients of rows, by index of the table: ids, int64 or uint64, of any shape; and values of shape (*ids.shape, dim), in
float32, float16, or uint16 with the bits of bfloat16. They are sent in their dtype."""


class Batches:
    """Remembers the distinct ids of one worker's latest batches: a push usually has the ids of the last pull."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._dims = {number: table.dim for number, table in enumerate(layout.spec.tables)}
        self._latest: list[tuple[list[tuple[int, bytes]], list[Distinct]]] = []

    def dims(self, tables: Iterable[int]) -> list[int]:
        """Length of a row of each of these tables; InvalidRequest if one does not exist."""
        try:
            return [self._dims[table] for table in tables]
        except KeyError as error:
            raise InvalidRequest(f"rows: there is no table {error}; the job has {len(self._dims)}") from None

    def of(self, ids: Mapping[int, NDArray[Any]]) -> list[Distinct]:
        """The distinct ids of each table, by shard."""
        bits = [(table, batch.tobytes()) for table, batch in ids.items()]
        for known, found in self._latest:
            if known == bits:
                return found
        flat = [np.ascontiguousarray(batch).reshape(-1) for batch in ids.values()]
        found = distinct_of_each(flat, self.layout.shard_count)
        if sum([batch.nbytes for batch in flat]) <= REMEMBERED_BYTES_MAX:
            self._latest.insert(0, (bits, found))
            del self._latest[REMEMBERED:]
        return found


class RowGradients:
    """The gradients of rows in one push, summed for each distinct id. The program may change its own arrays afterwards.

    Args:
        gradients: the program's gradients; may be empty. memory: provides memory for the sums.

    Attributes:
        is_empty: True if there are none. by_shard: the rows of each shard. transfer_s: seconds that sending them may take.
    """

    def __init__(self, batches: Batches, gradients: Gradients, memory: RowsMemory) -> None:
        self.is_empty = not gradients
        self._layout = layout = batches.layout
        self._tables = tables = sorted(gradients)
        dims = batches.dims(tables)
        self._found = found = batches.of({table: gradients[table][0] for table in tables})
        given = [np.ascontiguousarray(gradients[table][1]).reshape(-1, dim) for table, dim in zip(tables, dims, strict=True)]
        sums = memory.arrays([(len(batch.ids), dim) for batch, dim in zip(found, dims, strict=True)], [_FLOAT32] * len(tables))
        sum_each(found, given, sums)
        self._values = [
            values if numbers.dtype == _FLOAT32 else psd_core.narrowed(values, numbers.dtype)
            for values, numbers in zip(sums, given, strict=True)
        ]
        self.by_shard = [
            _rows_of(shard, layout.shard_count, tables, found, self._values) for shard in range(layout.shard_count)
        ]
        nbytes = sum([batch.ids.nbytes + values.nbytes for batch, values in zip(found, self._values, strict=True)])
        self.transfer_s = nbytes / THROUGHPUT_MIN

    def squares(self) -> int | None:
        """The sum of the squares of all sums; see psd_core.square_sum."""
        return psd_core.total_squares(psd_core.square_sum_of_rows(values) for values in self._values)

    def first_nonfinite(self) -> tuple[str, int] | None:
        """The table and the id of the first sum that holds NaN or infinity; None if all are finite."""
        for table, batch, values in zip(self._tables, self._found, self._values, strict=True):
            element = psd_core.first_nonfinite(values.reshape(-1))
            if element >= 0:
                return self._layout.spec.tables[table].name, int(batch.ids[element // values.shape[1]])
        return None


def is_same_rows(some: Sequence[Sequence[TableRows]], others: Sequence[Sequence[TableRows]]) -> bool:
    """True if both have the same tables, and rows with the same bits for all shards."""
    mine, theirs = ([rows for shard in by_shard for rows in shard] for by_shard in (some, others))
    return len(mine) == len(theirs) and all(
        a.table == b.table
        and a.values.dtype == b.values.dtype
        and np.array_equal(a.ids, b.ids)
        and np.array_equal(a.values.view(np.uint8), b.values.view(np.uint8))
        for a, b in zip(mine, theirs, strict=True)
    )


class RowPull:
    """One pull of rows: what it asks each shard for, and the rows that have come. If it is repeated, these are overwritten.

    Args:
        wanted: ids by index of the table: int64 or uint64, of any shape. memory: provides memory for the rows.
        ids_max: the most ids that each shard takes in one call.

    Attributes:
        rows: number of distinct ids, over all tables. transfer_s: seconds that receiving the rows may take.
    """

    def __init__(self, batches: Batches, wanted: Mapping[int, NDArray[Any]], memory: RowsMemory, ids_max: int) -> None:
        self._layout = batches.layout
        self._portion = min(PULL_IDS_MAX, ids_max)
        self._tables = tables = sorted(wanted)
        dims, specs = batches.dims(tables), batches.layout.spec.tables
        self._shapes = [(*wanted[table].shape, dim) for table, dim in zip(tables, dims, strict=True)]
        self._found = batches.of({table: wanted[table] for table in tables})
        # Rows that are stored in 16 bits are sent in 16 bits: nothing is lost.
        dtypes = [_UINT16 if specs[table].dtype == "bfloat16" else _FLOAT32 for table in tables]
        shapes = [(len(batch.ids), dim) for batch, dim in zip(self._found, dims, strict=True)]
        self._values = memory.arrays(shapes, dtypes)
        self.rows = sum([rows for rows, _ in shapes])
        self.transfer_s = sum([values.nbytes for values in self._values]) / THROUGHPUT_MIN

    def at(self, shard: int) -> list[list[TableRows]]:
        """The rows of one shard, whose values are still to be filled, in portions for one call each; empty if it has none."""
        whole = _rows_of(shard, self._layout.shard_count, self._tables, self._found, self._values)
        if self.rows <= self._portion:
            return [whole] if sum([len(rows.ids) for rows in whole]) else []
        portions: list[list[TableRows]] = []
        left = 0
        for table, ids, values in whole:
            begin = 0
            while begin < len(ids):
                if not left:
                    portions.append([])
                    left = self._portion
                end = min(begin + left, len(ids))
                portions[-1].append(TableRows(table, ids[begin:end], values[begin:end]))
                begin, left = end, left - (end - begin)
        return portions

    def results(self) -> dict[int, NDArray[np.float32]]:
        """The rows of all ids, repeated ones included, by table: shape (*ids.shape, dim)."""
        expanded = expand_each(self._found, self._values)
        return {table: rows.reshape(shape) for table, rows, shape in zip(self._tables, expanded, self._shapes, strict=True)}


def _rows_of(
    shard: int, shards: int, tables: Sequence[int], found: Sequence[Distinct], values: Sequence[NDArray[Any]]
) -> list[TableRows]:
    """One shard's part of the distinct ids of some tables, and of their rows of values."""
    if shards == 1:
        return [TableRows(table, batch.ids, rows) for table, batch, rows in zip(tables, found, values, strict=True)]
    cut = [slice(batch.starts[shard], batch.starts[shard + 1]) for batch in found]
    return [
        TableRows(table, batch.ids[part], rows[part])
        for table, batch, rows, part in zip(tables, found, values, cut, strict=True)
    ]
