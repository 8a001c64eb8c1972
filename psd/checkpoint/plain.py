"""Plain safetensors files, as any program writes them: named tensors, and tables as two tensors each.

    user.ids     (n,) I64 or U64: the ids' bits
    user.rows    (n, dim) F32, F16, BF16 or F64: the values of each id's row

A tensor may have more names: in the file's metadata, each with the name under which the tensor is there, as safetensors'
`save_model` writes them. Values are read in pieces. Must not know checkpoints, or who wants the values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import psd_core
from psd.checkpoint import safetensors
from psd.checkpoint.opening import open_parent
from psd.checkpoint.storage import FileStore
from psd.contract.errors import CheckpointCorrupt, CheckpointFailed

IDS_SUFFIX, ROWS_SUFFIX = SUFFIXES = ".ids", ".rows"

PIECE_BYTES = 4 << 20

DTYPES = safetensors.NUMPY_DTYPES | {"BOOL": np.dtype("u1"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_FLOATS = ("F32", "F16", "BF16", "F64")


class Run(NamedTuple):
    """Elements of a tensor, in row-major order."""

    name: str
    start: int
    length: int


class ValueRows(NamedTuple):
    """Values of rows. `ids`: (n,) uint64; `values`: (n, dim) float32."""

    ids: NDArray[np.uint64]
    values: NDArray[np.float32]


class ValueTable(Protocol):
    """A table in some file, without slots. Each call of `rows` reads the file again.

    Attributes:
        count: number of rows, or an upper bound. dim: length of a row. location: path or URL, for messages.
    """

    count: int
    dim: int
    location: str

    def rows(self) -> Iterator[ValueRows]:
        """All rows, in pieces of some MiB, none of them empty."""
        ...


class PlainFile:
    """A safetensors file.

    Raises:
        CheckpointFailed: the file does not exist, or cannot be read. CheckpointCorrupt: it is no safetensors file.

    Attributes:
        location: path or URL, for messages. all_entries: all tensors. aliases: further names, each with the tensor's own.
        entries: by each name, the tensors whose types psd can compute with. shapes: shapes of `entries`, by name.
    """

    def __init__(self, url: str) -> None:
        self._storage, self._file = open_parent(url)
        self.location = f"{self._storage.location}/{self._file}"
        try:
            length = safetensors.header_length(self._read(0, safetensors.PREFIX_BYTES))
            self._begin = safetensors.PREFIX_BYTES + length
            self.all_entries, more = safetensors.parse_header(self._read(safetensors.PREFIX_BYTES, self._begin))
        except FileNotFoundError:
            raise CheckpointFailed(f"there is no file {self.location}") from None
        except ValueError as error:
            raise CheckpointCorrupt(f"{self.location}: {error}") from None
        names = {entry.name for entry in self.all_entries}
        self.aliases = {alias: name for alias, name in more.items() if name in names and alias not in names}
        self.entries = {entry.name: entry for entry in self.all_entries if entry.dtype in DTYPES}
        self.entries |= {alias: self.entries[name] for alias, name in self.aliases.items() if name in self.entries}
        self.shapes = {name: entry.shape for name, entry in self.entries.items()}

    def _read(self, start: int, stop: int) -> bytes:
        return self._storage.read("", self._file, start, stop)

    def raw(self, run: Run) -> NDArray[Any]:
        """Elements in the stored dtype; bfloat16 as its bits."""
        entry = self.entries[run.name]
        dtype = DTYPES[entry.dtype]
        return np.frombuffer(self._content(entry, run.start * dtype.itemsize, run.length * dtype.itemsize), dtype)

    def copied(self, entry: safetensors.Entry) -> Iterator[bytes]:
        """The bytes of a tensor of any type, in pieces of some MiB."""
        nbytes = entry.stop - entry.start
        for first in range(0, nbytes, PIECE_BYTES):
            yield self._content(entry, first, min(PIECE_BYTES, nbytes - first))

    def _content(self, entry: safetensors.Entry, first: int, nbytes: int) -> bytes:
        start = self._begin + entry.start + first
        data = self._read(start, start + nbytes)
        if len(data) != nbytes:
            raise CheckpointCorrupt(f"{self.location}: ends in the middle of tensor {entry.name!r}")
        return data

    def read(self, runs: Sequence[Run]) -> Iterator[NDArray[Any]]:
        """The elements of each run, in the order in which they are asked for."""
        for run in runs:
            values = self.raw(run)
            yield psd_core.widened(values) if self.entries[run.name].dtype == "BF16" else values

    @property
    def tables(self) -> list[str]:
        """Names of the tables."""
        names = [name.removesuffix(IDS_SUFFIX) for name in self.entries if name.endswith(IDS_SUFFIX)]
        return [name for name in names if f"{name}{ROWS_SUFFIX}" in self.entries]

    def table(self, name: str) -> PlainTable:
        """The table with this name; raises what PlainTable raises."""
        return PlainTable(self, f"{name}{IDS_SUFFIX}", f"{name}{ROWS_SUFFIX}")


class PlainTable(ValueTable):
    """A table in a safetensors file, by the names of its two tensors; see ValueTable.

    Raises:
        CheckpointFailed: one of them is missing, or has another type or shape.
    """

    def __init__(self, file: PlainFile, ids: str, rows: str) -> None:
        self.location = file.location
        self._file = file
        self._names = ids, rows
        for name in self._names:
            if name not in file.entries:
                raise CheckpointFailed(f"{file.location}: there is no tensor {name!r}")
        (ids_type, ids_shape), (rows_type, rows_shape) = (file.entries[name][1:3] for name in self._names)
        if len(ids_shape) != 1 or ids_type not in ("I64", "U64"):
            raise CheckpointFailed(f"{file.location}: {ids!r}: expected ids, (n,) int64 or uint64, got {ids_shape} {ids_type}")
        if len(rows_shape) != 2 or rows_shape[0] != ids_shape[0] or rows_shape[1] < 1 or rows_type not in _FLOATS:
            raise CheckpointFailed(
                f"{file.location}: {rows!r}: expected rows, ({ids_shape[0]}, dim) floating, got {rows_shape} {rows_type}"
            )
        self.count, self.dim = rows_shape

    @override
    def rows(self) -> Iterator[ValueRows]:
        ids, rows = self._names
        step = max(1, PIECE_BYTES // (8 * max(1, self.dim)))
        for first in range(0, self.count, step):
            n = min(step, self.count - first)
            keys = self._file.raw(Run(ids, first, n)).view(np.uint64)
            (values,) = self._file.read([Run(rows, first * self.dim, n * self.dim)])
            with np.errstate(over="ignore"):  # what is too large becomes infinity, and is refused as such
                yield ValueRows(keys, values.astype(np.float32, copy=False).reshape(n, self.dim))


def write_file(target: FileStore, file: str, table: ValueTable, name: str, others: PlainFile | None) -> None:
    """Write a table by name, and all other tensors of another file, to one safetensors file, as a stream; all or nothing.

    A table that the other file has under another name of its own is written under that one.

    Raises:
        CheckpointFailed: a file cannot be read or written.
    """
    aliases = {} if others is None else others.aliases
    of_ids, of_rows = (aliases.get(f"{name}{suffix}", f"{name}{suffix}") for suffix in SUFFIXES)
    own = {of_ids: ("I64", (table.count,)), of_rows: ("F32", (table.count, table.dim))}
    kept = {} if others is None else {entry.name: entry for entry in others.all_entries if entry.name not in own}
    facts = own | {name: (entry.dtype, entry.shape) for name, entry in kept.items()}
    tensors = sorted(facts.items(), key=lambda item: -safetensors.ITEM_BYTES[item[1][0]])
    entries = safetensors.lay_out((name, *of_it) for name, of_it in tensors)

    def chunks() -> Iterator[memoryview | bytes]:
        yield safetensors.header(entries, {**aliases, "format": "pt"})
        for entry in entries:
            if entry.name in own:
                for ids, values in table.rows():
                    array = ids if entry.dtype == "I64" else values
                    yield np.ascontiguousarray(array).data.cast("B")
                continue
            assert others is not None
            yield from others.copied(kept[entry.name])

    target.write("", file, chunks())
