"""Parameters alone, by name, from the checkpoint of any job or from a plain safetensors file, for another job to begin with.

Each tensor's name and shape must match, and each table's name and dim. The dtype is converted; groups, rules and slots do not
matter; what the new job does not have is ignored. Must not know who asks, or where the values go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from psd.checkpoint.blocks import BLOCK
from psd.checkpoint.cut import CutName
from psd.checkpoint.directory import CheckpointDirectory
from psd.checkpoint.manifest import Manifest
from psd.checkpoint.plain import PlainFile, Run, ValueRows, ValueTable
from psd.checkpoint.reading import BlockReader, overlapping, tensor_places
from psd.checkpoint.row_values import StoredValues
from psd.checkpoint.storage import FileStore
from psd.contract.config import SAFETENSORS_SUFFIX
from psd.contract.errors import CheckpointFailed, SpecMismatch
from psd.contract.layout import Block, Layout
from psd.contract.tables import SparseTableSpec
from psd_core.distinct import shard_of


class ParameterSource(Protocol):
    """Named tensors and tables in files.

    Attributes:
        location: path or URL, for messages. shapes: the tensors' shapes, by name.
    """

    location: str
    shapes: dict[str, tuple[int, ...]]

    @property
    def tables(self) -> Sequence[str]:
        """Names of the tables."""
        ...

    def read(self, runs: Sequence[Run]) -> Iterator[NDArray[Any]]:
        """The elements of each run, in the order in which they are asked for."""
        ...

    def table(self, name: str) -> ValueTable:
        """The values of a table's rows."""
        ...


def directory_at(url: str) -> CheckpointDirectory:
    """The checkpoints at a URL, which may also be the URL of one checkpoint: then only this one."""
    parent, _, name = url.rstrip("/").rpartition("/")
    return CheckpointDirectory(parent or ".", only=name) if CutName.of(name) else CheckpointDirectory(url)


def open_parameters(url: str) -> ParameterSource:
    """The parameters of the newest valid checkpoint at a URL, of one checkpoint, or of a safetensors file.

    Raises:
        CheckpointFailed, CheckpointCorrupt, CheckpointUnsupported: none can be read.
    """
    if url.endswith(SAFETENSORS_SUFFIX):
        return PlainFile(url)
    directory = directory_at(url)
    manifest = directory.newest()
    if manifest is None:
        raise CheckpointFailed(f"there is no checkpoint in {directory.location} that can be read")
    return _Checkpoint(directory.storage, manifest)


def parameter_blocks(source: ParameterSource, layout: Layout, shard_index: int) -> Iterator[tuple[Block, NDArray[Any]]]:
    """The initial values of a shard's blocks, in order, in the dtypes of the masters; a few blocks in memory at a time.

    Raises:
        SpecMismatch: the source lacks a tensor or a table of the job, or has it in another shape. Nothing was read.
        CheckpointCorrupt, CheckpointFailed: the source cannot be read.
    """
    for table in layout.spec.tables:
        _table_of(source, table)
    names = [_name_of(tensor.name, tensor.aliases, tensor.shape, source) for tensor in layout.spec.tensors]
    blocks = layout.blocks_of(shard_index)
    starts = {
        int(tensor): int(start) for space in layout.spaces for tensor, start in zip(space.tensors, space.starts, strict=True)
    }
    runs: list[list[Run]] = []
    for block in blocks:
        ends = [int(end) for end in block.segment_ends]
        runs.append(
            [
                Run(names[tensor], block.offset + begin - starts[int(tensor)], end - begin)
                for tensor, begin, end in zip(block.segment_tensors, [0, *ends], ends, strict=False)
            ]
        )
    pieces = source.read([run for of_block in runs for run in of_block])
    for block, of_block in zip(blocks, runs, strict=True):
        values = np.empty(block.length, block.dtype)
        begin = 0
        for run in of_block:
            with np.errstate(over="ignore"):  # what is too large becomes infinity, and is refused as such
                values[begin : begin + run.length] = next(pieces)
            begin += run.length
        yield block, values


def table_values(source: ParameterSource, layout: Layout, shard_index: int) -> Iterator[tuple[int, Iterator[ValueRows]]]:
    """The values of a shard's rows, for each of its tables: the most that there may be, and the rows, in pieces of some MiB.

    Raises what `parameter_blocks` raises.
    """
    for spec in layout.spec.tables:
        table = _table_of(source, spec)
        share = -(-table.count // layout.shard_count)
        yield share + share // 8, _of_shard(table, shard_index, layout.shard_count)


def _of_shard(table: ValueTable, shard_index: int, shard_count: int) -> Iterator[ValueRows]:
    for ids, values in table.rows():
        mask = shard_of(ids, shard_count) == shard_index
        yield ValueRows(ids[mask], values[mask])


def _table_of(source: ParameterSource, spec: SparseTableSpec) -> ValueTable:
    if spec.name not in source.tables:
        raise SpecMismatch(f"table {spec.name!r}: is in this worker's declaration, is not in {source.location}")
    table = source.table(spec.name)
    if table.dim != spec.dim:
        raise SpecMismatch(
            f"dim of table {spec.name!r}: {table.dim} in {source.location}, {spec.dim} in this worker's declaration"
        )
    return table


def _name_of(name: str, aliases: Sequence[str], shape: tuple[int, ...], source: ParameterSource) -> str:
    found = next((known for known in (name, *aliases) if known in source.shapes), None)
    if found is None:
        raise SpecMismatch(f"parameter {name!r}: is in this worker's declaration, is not in {source.location}")
    if source.shapes[found] != shape:
        raise SpecMismatch(
            f"shape of parameter {name!r}: {source.shapes[found]} in {source.location}, {shape} in this worker's declaration"
        )
    return found


class _Checkpoint:
    """The parameters in a checkpoint of any job."""

    def __init__(self, storage: FileStore, manifest: Manifest) -> None:
        self.location = f"checkpoint {manifest.name}"
        self._storage = storage
        self._manifest = manifest
        self._places = {place.name: place for place in tensor_places(manifest)}
        self.shapes = {name: place.tensor.shape for name, place in self._places.items()}
        self.tables = [table.name for table in manifest.spec.tables]

    def read(self, runs: Sequence[Run]) -> Iterator[NDArray[Any]]:
        """The elements of each run, in the order in which they are asked for."""
        places = [(self._places[run.name].space, self._places[run.name].start + run.start, run.length) for run in runs]
        sources = [overlapping(self._manifest, BLOCK.name, *place) for place in places]
        with closing(BlockReader(self._storage, self._manifest, sources)) as blocks:
            for (_, start, length), source in zip(places, sources, strict=True):
                parts = [blocks.get(chunk) for chunk in source]
                yield np.concatenate(
                    [part.parameter[max(0, start - part.offset) : start + length - part.offset] for part in parts]
                )

    def table(self, name: str) -> ValueTable:
        """The values of a table's rows."""
        return StoredValues(self._storage, self._manifest, self.tables.index(name))
