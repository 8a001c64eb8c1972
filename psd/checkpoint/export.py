"""Writes the tensors of a checkpoint as a plain safetensors file, by name, in the declared shapes and dtypes.

`safetensors.torch.load_file` and `model.load_state_dict` take it. All else stays behind. Tensors held in float32 for
a worker's float16 or bfloat16 are rounded to nearest even, as the worker's own copy is. The file is streamed, and appears
under its name when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.checkpoint import safetensors
from psd.checkpoint.manifest import Manifest
from psd.checkpoint.reading import RecordReader, TensorPlace, overlapping, tensor_places
from psd.checkpoint.storage import Chunk, FileStore, open_parent

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


def export_tensors(storage: FileStore, manifest: Manifest, path: str, progress: ExportProgress) -> None:
    """See CheckpointDirectory.export."""
    # Wide elements first, so that each tensor starts on a multiple of its item size.
    places = sorted(tensor_places(manifest), key=lambda place: -safetensors.ITEM_BYTES[ELEMENT_TYPES[place.tensor.dtype]])
    entries = safetensors.lay_out((p.name, ELEMENT_TYPES[p.tensor.dtype], p.tensor.shape) for p in places)
    # "pt" says that the layouts of weights are torch's; the transformers library asks for it.
    header = safetensors.header(entries, {"format": "pt", "psd_checkpoint": manifest.name})
    target, file = open_parent(path)
    target.write("", file, _counted(_chunks(storage, manifest, places, header), header, entries, progress))


def _chunks(storage: FileStore, manifest: Manifest, places: list[TensorPlace], header: bytes) -> Iterator[Chunk]:
    yield header
    full = [place for place in places if place.tensor.size]
    sources = [overlapping(manifest, place.space, place.start, place.tensor.size) for place in full]
    with closing(RecordReader(storage, manifest, sources)) as records:
        for place, source in zip(full, sources, strict=True):
            for record in source:
                start = max(place.start, record.offset) - record.offset
                stop = min(place.start + place.tensor.size, record.offset + record.length) - record.offset
                values = converted(records.get(record).parameter[start:stop], place.tensor.dtype)
                yield values.data.cast("B")


def _counted(
    chunks: Iterator[Chunk], header: bytes, entries: list[safetensors.Entry], progress: ExportProgress
) -> Iterator[Chunk]:
    total = len(header) + (entries[-1].stop if entries else 0)
    done = 0
    for chunk in chunks:
        yield chunk
        done += len(chunk)
        progress(done, total)


def converted(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Master values in a worker's dtype; bfloat16 as its bit patterns."""
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
