"""Writes the tensors of a checkpoint as a plain safetensors file, by name, in the declared shapes and dtypes, and its tables as
two tensors each (plain.py); or one table as a Parquet file.

`safetensors.torch.load_model` takes the file, and transformers' `from_pretrained` a directory with it. So each tensor is there
once, under its first name, and a table under the name of the module that looks its rows up; the other names, and a table's own,
are listed beside (plain.py). Nothing else is written. Tensors held in float32 for a worker's float16 or bfloat16 are rounded to
nearest even, like the worker's own copy. A file is streamed, and appears under its name when it is complete.
"""

from __future__ import annotations

import collections
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

import psd_core
from psd.checkpoint import parquet, safetensors
from psd.checkpoint.blocks import BLOCK
from psd.checkpoint.manifest import Manifest
from psd.checkpoint.opening import open_parent
from psd.checkpoint.plain import IDS_SUFFIX, ROWS_SUFFIX, SUFFIXES
from psd.checkpoint.reading import BlockReader, TensorPlace, overlapping, tensor_places
from psd.checkpoint.row_values import StoredValues
from psd.checkpoint.storage import Chunk, FileStore
from psd.contract.errors import CheckpointFailed
from psd.contract.locations import shown

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
"""Files of a directory that transformers' `from_pretrained` takes."""

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
    places = [] if table else [place for place in tensor_places(manifest) if place.name == place.tensor.name]
    place_of = {spec.name: (*spec.modules, spec.name)[0] for spec in manifest.spec.tables}
    places.sort(key=lambda place: -safetensors.ITEM_BYTES[ELEMENT_TYPES[place.tensor.dtype]])
    entries = safetensors.lay_out(
        [
            *((f"{place_of[name]}{IDS_SUFFIX}", "I64", (values.count,)) for name, values in tables.items()),
            *((p.name, ELEMENT_TYPES[p.tensor.dtype], p.tensor.shape) for p in places if _is_wide(p)),
            *((f"{place_of[name]}{ROWS_SUFFIX}", "F32", (values.count, values.dim)) for name, values in tables.items()),
            *((p.name, ELEMENT_TYPES[p.tensor.dtype], p.tensor.shape) for p in places if not _is_wide(p)),
        ]
    )
    _check_names(manifest, entries)
    # "pt" says that weights are laid out as in torch; the transformers library requires it.
    aliases = _aliases(manifest, {entry.name for entry in entries})
    header = safetensors.header(entries, {**aliases, "format": "pt", "psd_checkpoint": manifest.name})
    chunks = itertools.chain(
        [header],
        (ids.data.cast("B") for values in tables.values() for ids, _ in values.rows()),
        _tensors(storage, manifest, [place for place in places if _is_wide(place)]),
        (np.ascontiguousarray(part).data.cast("B") for values in tables.values() for _, part in values.rows()),
        _tensors(storage, manifest, [place for place in places if not _is_wide(place)]),
    )
    target.write("", file, _counted(chunks, header, entries, progress))


def export_model(storage: FileStore, manifest: Manifest, directory: str, config: str, progress: ExportProgress) -> None:
    """Write a directory for `from_pretrained`, as `CheckpointDirectory.export_model` says."""
    source, file = open_parent(config)
    where = f"{source.location}/{file}"
    try:
        text = source.read("", file)
        is_config = isinstance(json.loads(text), dict)
    except FileNotFoundError:
        raise CheckpointFailed(f"there is no file {where}") from None
    except (ValueError, RecursionError):
        is_config = False
    if not is_config:
        raise CheckpointFailed(f"{where}: is no config.json, a JSON object as model.config.save_pretrained writes it")
    export_tensors(storage, manifest, f"{directory.rstrip('/')}/{WEIGHTS_FILE}", progress)
    target, file = open_parent(f"{directory.rstrip('/')}/{CONFIG_FILE}")
    target.write("", file, [text])


def _tables(storage: FileStore, manifest: Manifest, wanted: str) -> dict[str, StoredValues]:
    names = [table.name for table in manifest.spec.tables]
    if wanted and wanted not in names:
        raise CheckpointFailed(f"there is no table {wanted!r} in {manifest.name}; it has {', '.join(names) or 'none'}")
    return {name: StoredValues(storage, manifest, i) for i, name in enumerate(names) if wanted in ("", name)}


def _aliases(manifest: Manifest, written: Set[str]) -> dict[str, str]:
    """The names under which tensors and tables are also known, each with the one under which the file has them."""
    found = {alias: tensor.name for tensor in manifest.spec.tensors for alias in tensor.aliases}
    for table in manifest.spec.tables:
        first, *others = (*table.modules, table.name)
        found.update({f"{other}{suffix}": f"{first}{suffix}" for other in others for suffix in SUFFIXES})
    return {alias: name for alias, name in found.items() if name in written and alias not in written}


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
    half = {"float16": "<f2", "bfloat16": "<u2"}.get(dtype)
    return values if half is None else psd_core.narrowed(values, half)
