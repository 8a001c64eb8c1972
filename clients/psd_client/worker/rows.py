"""Rows of tables at one worker: the gradients of a push, and what a pull asks for, by shard.

Each distinct id travels once. Must not know sessions, rounds or what tables are for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import psd_core
from psd.contract.errors import InvalidRequest
from psd.contract.layout import Layout
from psd.contract.rows import TableRows
from psd_client.lanes.rows_memory import RowsMemory
from psd_client.lanes.shards import THROUGHPUT_MIN
from psd_core.distinct import Distinct, distinct

PULL_IDS_MAX = 1 << 16
"""Ids of one call: larger pulls are made of several. A shard may be told to take fewer; it then says so."""

REMEMBERED = 2
"""Batches of a table whose distinct ids are remembered: where rows are fetched ahead, the next pull comes before a push."""
REMEMBERED_BYTES_MAX = 8 << 20
"""Bytes of ids of the largest batch that is remembered."""

Gradients = Mapping[int, tuple[NDArray[Any], NDArray[Any]]]
"""Gradients of rows, by index of the table: ids, int64 or uint64, of any shape; and numbers of shape (*ids.shape, dim), in
float32, float16, or uint16, the bits of bfloat16. They travel in their dtype."""


class _Sums(NamedTuple):
    """The gradients of one table's rows: the sum of each distinct id's."""

    table: int
    batch: Distinct
    values: NDArray[Any]


class Batches:
    """The distinct ids of one worker's latest batches: a push mostly has those of the pull before."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._latest: dict[int, list[tuple[bytes, Distinct]]] = {}

    def of(self, table: int, ids: NDArray[Any]) -> Distinct:
        """The distinct ids, by shard."""
        latest, bits = self._latest.setdefault(table, []), ids.tobytes()
        for known, batch in latest:
            if known == bits:
                return batch
        batch = distinct(np.ascontiguousarray(ids).reshape(-1), self.layout.shard_count)
        if len(bits) <= REMEMBERED_BYTES_MAX:
            latest.insert(0, (bits, batch))
            del latest[REMEMBERED:]
        return batch


class RowGradients:
    """The gradients of rows in one push. The program may change its own arrays afterwards.

    Args:
        gradients: see Gradients; may be empty. memory: for their sums.

    Attributes:
        by_shard: the rows of each shard. transfer_s: seconds that they may take.
    """

    def __init__(self, batches: Batches, gradients: Gradients, memory: RowsMemory) -> None:
        self._layout = layout = batches.layout
        tables = sorted(gradients)
        given = [_numbers(layout, table, *gradients[table]) for table in tables]
        found = [batches.of(table, gradients[table][0]) for table in tables]
        shapes = [(len(batch.ids), numbers.shape[1]) for batch, numbers in zip(found, given, strict=True)]
        sums = memory.arrays(shapes, [np.dtype(np.float32)] * len(tables))
        for batch, numbers, out in zip(found, given, sums, strict=True):
            batch.sum(numbers, out)
        self._sums = [
            _Sums(table, batch, total if numbers.dtype == total.dtype else _narrowed(total, numbers.dtype))
            for table, batch, numbers, total in zip(tables, found, given, sums, strict=True)
        ]
        self.by_shard = [
            [TableRows(table, *_slices(shard, batch, values)) for table, batch, values in self._sums]
            for shard in range(layout.shard_count)
        ]
        self.transfer_s = sum(sums.batch.ids.nbytes + sums.values.nbytes for sums in self._sums) / THROUGHPUT_MIN

    def squares(self) -> int | None:
        """The sum of the squares of all sums, see psd_core.square_sum."""
        return psd_core.total_squares(psd_core.square_sum_of_rows(values) for _, _, values in self._sums)

    def first_nonfinite(self) -> tuple[str, int] | None:
        """The first table, and the id, whose sum holds NaN or infinity; None if all are finite."""
        for table, batch, values in self._sums:
            element = psd_core.first_nonfinite(values.reshape(-1))
            if element >= 0:
                return self._layout.spec.tables[table].name, int(batch.ids[element // values.shape[1]])
        return None


def is_same_rows(some: Sequence[Sequence[TableRows]], others: Sequence[Sequence[TableRows]]) -> bool:
    """True if the rows of all shards have the same bits."""
    mine, theirs = ([rows for shard in by_shard for rows in shard if len(rows.ids)] for by_shard in (some, others))
    return len(mine) == len(theirs) and all(
        a.table == b.table
        and a.values.dtype == b.values.dtype
        and np.array_equal(a.ids, b.ids)
        and np.array_equal(a.values.view(np.uint8), b.values.view(np.uint8))
        for a, b in zip(mine, theirs, strict=True)
    )


class RowPull:
    """One pull of rows: what it asks each shard for, and what has come. May be made again: what came before is overwritten.

    Args:
        wanted: by index of the table, ids: int64 or uint64, of any shape. memory: for what comes.

    Attributes:
        rows: number of distinct ids, of all tables. transfer_s: seconds that they may take.
    """

    def __init__(self, batches: Batches, wanted: Mapping[int, NDArray[Any]], memory: RowsMemory) -> None:
        layout = batches.layout
        self._shapes = {table: (*ids.shape, _dim(layout, table)) for table, ids in wanted.items()}
        self._batches = {table: batches.of(table, ids) for table, ids in wanted.items()}
        shapes = [(len(batch.ids), _dim(layout, table)) for table, batch in self._batches.items()]
        # What is stored in 16 bits loses nothing by travelling so.
        dtypes = [np.dtype(np.uint16 if layout.spec.tables[table].dtype == "bfloat16" else np.float32) for table in wanted]
        self._values: dict[int, NDArray[Any]] = dict(zip(wanted, memory.arrays(shapes, dtypes), strict=True))
        self.rows = sum(len(batch.ids) for batch in self._batches.values())
        self.transfer_s = sum(values.nbytes for values in self._values.values()) / THROUGHPUT_MIN

    def concerns(self, shard: int) -> bool:
        """True if rows of that shard are wanted."""
        return any(batch.starts[shard] < batch.starts[shard + 1] for batch in self._batches.values())

    def at(self, shard: int) -> Iterator[Sequence[TableRows]]:
        """The rows of one shard, whose values are to be filled, in portions of PULL_IDS_MAX ids; at least one portion."""
        portion: list[TableRows] = []
        left = PULL_IDS_MAX
        for table, batch in self._batches.items():
            ids, values = _slices(shard, batch, self._values[table])
            while len(ids):
                portion.append(TableRows(table, ids[:left], values[:left]))
                ids, values, left = ids[left:], values[left:], left - len(portion[-1].ids)
                if not left:
                    yield portion
                    portion, left = [], PULL_IDS_MAX
        if portion or not self.concerns(shard):
            yield portion

    def results(self) -> dict[int, NDArray[np.float32]]:
        """The rows of all ids (*ids.shape, dim), by table."""
        return {table: batch.expand(self._values[table]).reshape(self._shapes[table]) for table, batch in self._batches.items()}


def _dim(layout: Layout, table: int) -> int:
    tables = layout.spec.tables
    if not 0 <= table < len(tables):
        raise InvalidRequest(f"rows: there is no table {table}; the job has {len(tables)}")
    return tables[table].dim


def _numbers(layout: Layout, table: int, ids: NDArray[Any], grads: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(grads).reshape(ids.size, _dim(layout, table))


def _slices(shard: int, batch: Distinct, values: NDArray[Any]) -> tuple[NDArray[np.uint64], NDArray[Any]]:
    begin, end = batch.starts[shard], batch.starts[shard + 1]
    return batch.ids[begin:end], values[begin:end]


def _narrowed(values: NDArray[np.float32], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Numbers in float16, or as the bits of bfloat16, rounded to the nearest, ties to even."""
    if dtype == np.float16:
        with np.errstate(over="ignore"):  # infinity is looked for afterwards
            return values.astype(np.float16)
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
