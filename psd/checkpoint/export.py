"""Writes the tensors of a checkpoint as a plain safetensors file, by name, in the declared shapes and dtypes, and its tables as
two tensors each (plain.py); or one table as a Parquet file.

`safetensors.torch.load_file` and `model.load_state_dict` take the tensors. Nothing else is written. Tensors held in float32 for
a worker's float16 or bfloat16 are rounded to nearest even, like the worker's own copy. A file is streamed, and appears under
its name when it is complete.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.checkpoint import parquet, safetensors
from psd.checkpoint.blocks import BLOCK
from psd.checkpoint.manifest import Manifest
from psd.checkpoint.opening import open_parent
from psd.checkpoint.plain import IDS_SUFFIX, ROWS_SUFFIX
from psd.checkpoint.reading import BlockReader, TensorPlace, overlapping, tensor_places
from psd.checkpoint.row_values import StoredValues
from psd.checkpoint.storage import Chunk, FileStore
from psd.contract.errors import CheckpointFailed
from psd.contract.locations import shown

ExportProgress = Callable[[int, int], None]
"""A callback that takes the bytes written so far and the total."""

ELEMENT_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def export_tensors(storage: FileStore, manifest: Manifest, path: str, progress: ExportProgress, table: str = "") -> None:
    """Write a checkpoint's parameters and tables to one file, as `CheckpointDirectory.export` says."""
    tables = _tables(storage, manifest, table)
    target, file = open_parent(path)
    if path.endswith(parquet.SUFFIX):
        if len(tables) != 1 or not table:
            raise CheckpointFailed(f"{shown(path)}: a Parquet file takes one table, and none was named")
        target.write("", file, parquet.encode(tables[table].rows(), tables[table].dim))
        return
    # Wide elements first, so that each tensor starts on a multiple of its item size.
    places = [] if table else tensor_places(manifest)
    places.sort(key=lambda place: -safetensors.ITEM_BYTES[ELEMENT_TYPES[place.tensor.dtype]])
    entries = safetensors.lay_out(
        [
            *((f"{name}{IDS_SUFFIX}", "I64", (values.count,)) for name, values in tables.items()),
            *((p.name, ELEMENT_TYPES[p.tensor.dtype], p.tensor.shape) for p in places if _is_wide(p)),
            *((f"{name}{ROWS_SUFFIX}", "F32", (values.count, values.dim)) for name, values in tables.items()),
            *((p.name, ELEMENT_TYPES[p.tensor.dtype], p.tensor.shape) for p in places if not _is_wide(p)),
        ]
    )
    _check_names(manifest, entries)
    # "pt" says that weights are laid out as in torch; the transformers library requires it.
    header = safetensors.header(entries, {"format": "pt", "psd_checkpoint": manifest.name})
    chunks = itertools.chain(
        [header],
        (ids.data.cast("B") for values in tables.values() for ids, _ in values.rows()),
        _tensors(storage, manifest, [place for place in places if _is_wide(place)]),
        (np.ascontiguousarray(part).data.cast("B") for values in tables.values() for _, part in values.rows()),
        _tensors(storage, manifest, [place for place in places if not _is_wide(place)]),
    )
    target.write("", file, _counted(chunks, header, entries, progress))


def _tables(storage: FileStore, manifest: Manifest, wanted: str) -> dict[str, StoredValues]:
    names = [table.name for table in manifest.spec.tables]
    if wanted and wanted not in names:
        raise CheckpointFailed(f"there is no table {wanted!r} in {manifest.name}; it has {', '.join(names) or 'none'}")
    return {name: StoredValues(storage, manifest, i) for i, name in enumerate(names) if wanted in ("", name)}


def _is_wide(place: TensorPlace) -> bool:
    """True if the tensor's elements have 8 bytes, like ids."""
    return safetensors.ITEM_BYTES[ELEMENT_TYPES[place.tensor.dtype]] == 8


def _check_names(manifest: Manifest, entries: list[safetensors.Entry]) -> None:
    names = collections.Counter(entry.name for entry in entries)
    name, count = names.most_common(1)[0] if names else ("", 1)
    if count > 1:
        raise CheckpointFailed(f"{manifest.name} has a tensor {name!r}, which is also what a table's rows are written as")


def _tensors(storage: FileStore, manifest: Manifest, places: list[TensorPlace]) -> Iterator[Chunk]:
    full = [place for place in places if place.tensor.size]
    sources = [overlapping(manifest, BLOCK.name, place.space, place.start, place.tensor.size) for place in full]
    with closing(BlockReader(storage, manifest, sources)) as blocks:
        for place, source in zip(full, sources, strict=True):
            for chunk in source:
                start = max(place.start, chunk.first) - chunk.first
                stop = min(place.start + place.tensor.size, chunk.first + chunk.length) - chunk.first
                values = converted(blocks.get(chunk).parameter[start:stop], place.tensor.dtype)
                yield values.data.cast("B")


def _counted(
    chunks: Iterable[Chunk], header: bytes, entries: list[safetensors.Entry], progress: ExportProgress
) -> Iterator[Chunk]:
    total = len(header) + (entries[-1].stop if entries else 0)
    done = 0
    for chunk in chunks:
        yield chunk
        done += len(chunk)
        progress(done, total)


def converted(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Master values in a worker's dtype; bfloat16 as its bits."""
    if dtype == "float16":
        with np.errstate(over="ignore"):  # what is too large becomes infinity, as on the worker
            return values.astype("<f2")
    if dtype != "bfloat16":
        return values
    bits = values.view(np.uint32)
    half = bits >> np.uint32(16)
    rounded = (bits + np.uint32(0x7FFF) + (half & np.uint32(1))) >> np.uint32(16)
    # A NaN could round to infinity or wrap around; it keeps its upper half, made quiet.
    patterns: NDArray[np.uint32] = np.where(np.isnan(values), half | np.uint32(0x40), rounded)
    return patterns.astype("<u2")
