"""Parameters alone, by name, from the checkpoint of any job or from a plain safetensors file, for another job to begin with.

What must match is each tensor's name and shape. Its dtype is converted, and groups, rules and slots do not matter; tensors that
the new job does not have stay where they are. Must not know who asks, nor where the numbers go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from psd.checkpoint import safetensors
from psd.checkpoint.cut import CutName
from psd.checkpoint.directory import CheckpointDirectory
from psd.checkpoint.manifest import Manifest
from psd.checkpoint.reading import RecordReader, overlapping, tensor_places
from psd.checkpoint.storage import FileStore, open_parent
from psd.contract.config import SAFETENSORS_SUFFIX
from psd.contract.errors import CheckpointCorrupt, CheckpointFailed, SpecMismatch
from psd.contract.layout import Block, Layout

_DTYPES = safetensors.NUMPY_DTYPES | {"BOOL": np.dtype("u1"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


class Run(NamedTuple):
    """Elements of a tensor, in row-major order."""

    name: str
    start: int
    length: int


class ParameterSource(Protocol):
    """Named tensors in files.

    Attributes:
        location: for messages. shapes: by name.
    """

    location: str
    shapes: dict[str, tuple[int, ...]]

    def read(self, runs: Sequence[Run]) -> Iterator[NDArray[Any]]:
        """The elements of each run, in the order in which they are asked for."""
        ...


def directory_at(url: str) -> CheckpointDirectory:
    """The checkpoints at a URL, which may also be that of one checkpoint: then of this one alone."""
    parent, _, name = url.rstrip("/").rpartition("/")
    return CheckpointDirectory(parent or ".", only=name) if CutName.of(name) else CheckpointDirectory(url)


def open_parameters(url: str) -> ParameterSource:
    """The parameters of the newest valid checkpoint at a URL, of one checkpoint, or of a safetensors file.

    Raises:
        CheckpointFailed, CheckpointCorrupt, CheckpointUnsupported: there is none that can be read.
    """
    if url.endswith(SAFETENSORS_SUFFIX):
        return _File(*open_parent(url))
    directory = directory_at(url)
    manifest = directory.newest()
    if manifest is None:
        raise CheckpointFailed(f"there is no checkpoint in {directory.location} that can be read")
    return _Checkpoint(directory.storage, manifest)


def parameter_blocks(source: ParameterSource, layout: Layout, shard_index: int) -> Iterator[tuple[Block, NDArray[Any]]]:
    """The initial values of a shard's blocks, in order, in the dtypes of the masters; a few blocks in memory at a time.

    Raises:
        SpecMismatch: the source lacks a tensor of the job, or has it in another shape. Nothing was read.
        CheckpointCorrupt, CheckpointFailed: it cannot be read.
    """
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


def _name_of(name: str, aliases: Sequence[str], shape: tuple[int, ...], source: ParameterSource) -> str:
    found = next((known for known in (name, *aliases) if known in source.shapes), None)
    if found is None:
        raise SpecMismatch(f"parameter {name!r}: is in this worker's declaration, is not in {source.location}")
    if source.shapes[found] != shape:
        raise SpecMismatch(
            f"shape of parameter {name!r}: {source.shapes[found]} in {source.location}, {shape} in this worker's declaration"
        )
    return found


class _File:
    """A plain safetensors file."""

    def __init__(self, storage: FileStore, file: str) -> None:
        self.location = f"{storage.location}/{file}"
        self._storage = storage
        self._file = file
        try:
            length = safetensors.header_length(storage.read("", file, 0, safetensors.PREFIX_BYTES))
            self._begin = safetensors.PREFIX_BYTES + length
            entries, _ = safetensors.parse_header(storage.read("", file, safetensors.PREFIX_BYTES, self._begin))
        except FileNotFoundError:
            raise CheckpointFailed(f"there is no file {self.location}") from None
        except ValueError as error:
            raise CheckpointCorrupt(f"{self.location}: {error}") from None
        self._entries = {entry.name: entry for entry in entries if entry.dtype in _DTYPES}
        self.shapes = {name: entry.shape for name, entry in self._entries.items()}

    def read(self, runs: Sequence[Run]) -> Iterator[NDArray[Any]]:
        """See ParameterSource."""
        for run in runs:
            entry = self._entries[run.name]
            dtype = _DTYPES[entry.dtype]
            start = self._begin + entry.start + run.start * dtype.itemsize
            data = self._storage.read("", self._file, start, start + run.length * dtype.itemsize)
            if len(data) != run.length * dtype.itemsize:
                raise CheckpointCorrupt(f"{self.location}: ends in the middle of tensor {run.name!r}")
            values = np.frombuffer(data, dtype)
            yield (values.astype(np.uint32) << 16).view(np.float32) if entry.dtype == "BF16" else values


class _Checkpoint:
    """A checkpoint of a job that may have been any other one."""

    def __init__(self, storage: FileStore, manifest: Manifest) -> None:
        self.location = f"checkpoint {manifest.name}"
        self._storage = storage
        self._manifest = manifest
        self._places = {place.name: place for place in tensor_places(manifest)}
        self.shapes = {name: place.tensor.shape for name, place in self._places.items()}

    def read(self, runs: Sequence[Run]) -> Iterator[NDArray[Any]]:
        """See ParameterSource."""
        places = [(self._places[run.name].space, self._places[run.name].start + run.start, run.length) for run in runs]
        sources = [overlapping(self._manifest, *place) for place in places]
        with closing(RecordReader(self._storage, self._manifest, sources)) as records:
            for (_, start, length), source in zip(places, sources, strict=True):
                parts = [records.get(record) for record in source]
                yield np.concatenate(
                    [part.parameter[max(0, start - part.offset) : start + length - part.offset] for part in parts]
                )
