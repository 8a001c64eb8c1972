"""Tables as Parquet files: a column of ids, int64 bits, and one of rows, lists of float32. Needs pyarrow, which is an extra.

Files are read and written as streams, one group of rows at a time. Must not know checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from typing_extensions import override

from psd.checkpoint.plain import PIECE_BYTES, ValueRows, ValueTable
from psd.contract.config import ConfigError
from psd.contract.errors import CheckpointFailed
from psd.contract.locations import cleared, shown

SUFFIX = ".parquet"
IDS, ROWS = "id", "row"


def _packages() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError("Parquet files need the package pyarrow: pip install pyarrow") from None
    return pa, pq


class _Pieces:
    """A writable file whose bytes are taken out piece by piece."""

    closed = False

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._taken = 0

    def write(self, data: Any) -> int:
        self._bytes += memoryview(data)
        return len(data)

    def tell(self) -> int:
        return self._taken + len(self._bytes)

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def take(self) -> bytes:
        taken, self._bytes = bytes(self._bytes), bytearray()
        self._taken += len(taken)
        return taken


def encode(batches: Iterable[ValueRows], dim: int) -> Iterator[bytes]:
    """The bytes of a file; each batch becomes a group of rows.

    Raises:
        ConfigError: pyarrow is missing.
    """
    pa, pq = _packages()
    schema = pa.schema([(IDS, pa.int64()), (ROWS, pa.list_(pa.float32(), dim))])
    file = _Pieces()
    with pq.ParquetWriter(pa.PythonFile(file, "w"), schema) as writer:
        for ids, values in batches:
            rows = pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), dim)
            writer.write_batch(pa.record_batch([pa.array(ids.view(np.int64)), rows], schema=schema))
            yield file.take()
    yield file.take()


class ParquetTable(ValueTable):
    """A table in a local Parquet file, by the names of two columns; see ValueTable.

    Raises:
        CheckpointFailed: the file or a column is missing, or not as it should be. ConfigError: pyarrow is missing.
    """

    def __init__(self, path: str, ids: str, rows: str) -> None:
        pa, pq = _packages()
        self.location = shown(path)
        self._columns = [ids, rows]
        try:
            self._file = pq.ParquetFile(path)
        except (OSError, pa.ArrowException) as error:
            raise CheckpointFailed(f"{self.location}: {cleared(str(error), path)}") from None
        schema = self._file.schema_arrow
        for name in self._columns:
            if name not in schema.names:
                raise CheckpointFailed(f"{self.location}: there is no column {name!r}; there are {', '.join(schema.names)}")
        types = [schema.field(name).type for name in self._columns]
        if not pa.types.is_integer(types[0]):
            raise CheckpointFailed(f"{self.location}: column {ids!r}: expected whole numbers, got {types[0]}")
        is_list = any(check(types[1]) for check in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))
        if not (is_list and pa.types.is_floating(types[1].value_type)):
            raise CheckpointFailed(f"{self.location}: column {rows!r}: expected lists of floating numbers, got {types[1]}")
        self.count = self._file.metadata.num_rows
        self._errors = (OSError, pa.ArrowException)
        if pa.types.is_fixed_size_list(types[1]):
            self.dim = types[1].list_size
        else:
            first = next(self._batches(1, [rows]), None)
            self.dim = 1 if first is None else len(first[0][0].as_py() or ())
        if self.dim < 1:
            expected = "expected at least one number in each row, got none in the first"
            raise CheckpointFailed(f"{self.location}: column {rows!r}: {expected}")

    def _batches(self, rows: int, columns: list[str]) -> Iterator[Any]:
        try:
            yield from self._file.iter_batches(rows, columns=columns)
        except self._errors as error:
            raise CheckpointFailed(f"{self.location}: {error}") from None

    @override
    def rows(self) -> Iterator[ValueRows]:
        at = 0
        for batch in self._batches(max(1, PIECE_BYTES // (4 * self.dim)), self._columns):
            if not len(batch):
                continue
            ids, rows = (batch.column(name) for name in self._columns)
            values = rows.flatten()
            lengths = np.diff(rows.offsets.to_numpy()) if hasattr(rows, "offsets") else np.full(len(rows), self.dim)
            if ids.null_count or rows.null_count or values.null_count or (lengths != self.dim).any():
                raise CheckpointFailed(
                    f"{self.location}: rows {at} to {at + len(ids)}: expected an id and {self.dim} numbers in each"
                )
            at += len(ids)
            keys = ids.to_numpy(zero_copy_only=False)
            keys = keys.view(np.uint64) if keys.dtype.itemsize == 8 else keys.astype(np.int64).view(np.uint64)
            with np.errstate(over="ignore"):  # as in plain.py
                numbers = values.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
            yield ValueRows(keys, numbers.reshape(len(keys), self.dim))
