"""The safetensors file format, written and read without its library, because a shard streams its values and never copies all.

    8 bytes    length of the header, little-endian
    header     JSON: name -> {"dtype", "shape", "data_offsets": [start, stop]}, optionally "__metadata__": {str: str};
               padded with blanks, so that the data begin on a multiple of 8 bytes
    data       the tensors' bytes, little-endian, row-major, without gaps; offsets count from here

Sizes are known before the values, so the header is written first. Tensors that the library refuses are refused here, too:
overlaps, gaps, sizes that do not fit the shape. Callers of `lay_out` must order tensors so that each starts on a multiple of
its item size, as torch requires. Must not know checkpoints, blocks or file systems.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

ITEM_BYTES = {
    "U8": 1,
    "I8": 1,
    "BOOL": 1,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "U32": 4,
    "C64": 8,
}
"""Bytes of element types by their names in the format; psd never writes the last five, and skips them when reading."""

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "U64": np.dtype("<u8"),
}
"""Element types of checkpoints."""

PREFIX_BYTES = 8
HEADER_BYTES_MAX = 100_000_000  # the library's own limit
ALIGNMENT_BYTES = 8


class Entry(NamedTuple):
    """One tensor: name, element type, shape, and place of its bytes, counted from the first byte after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> list[Entry]:
    """Place tensors (name, element type, shape) one after the other."""
    entries = []
    start = 0
    for name, dtype, shape in tensors:
        stop = start + math.prod(shape) * ITEM_BYTES[dtype]
        entries.append(Entry(name, dtype, shape, start, stop))
        start = stop
    return entries


def header(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    """The file up to the first tensor's bytes.

    Raises:
        ValueError: there are so many tensors that readers would not accept the header.
    """
    document: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for entry in entries:
        document[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.stop],
        }
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    if len(text) > HEADER_BYTES_MAX:
        raise ValueError(f"the header would have {len(text)} bytes; readers accept {HEADER_BYTES_MAX}")
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


def header_length(prefix: bytes) -> int:
    """Bytes of the header after a file's first 8 bytes; ValueError if these cannot begin a safetensors file."""
    length = int.from_bytes(prefix, "little")
    if len(prefix) != PREFIX_BYTES or length > HEADER_BYTES_MAX:
        raise ValueError("the first 8 bytes are not the length of a safetensors header")
    return length


def parse_header(text: bytes) -> tuple[list[Entry], dict[str, str]]:
    """The tensors in the order of their bytes, and the metadata, from a header without its first 8 bytes.

    Raises:
        ValueError: it is no such header, its metadata are no strings, or its tensors overlap, leave gaps or do not fit their
            shapes.
    """
    try:
        document = json.loads(text)
    except RecursionError as error:
        raise ValueError("the header is nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError("the header is not a JSON object")  # noqa: TRY004 - wrong input, not a wrong argument
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__: is not an object of strings")
    try:
        entries = [
            Entry(name, str(value["dtype"]), tuple(map(int, value["shape"])), *map(int, value["data_offsets"]))
            for name, value in document.items()
        ]
    except (KeyError, TypeError, ArithmeticError) as error:
        raise ValueError(f"the header has an entry that is not a tensor: {error!r}") from None
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    end = 0
    for entry in entries:
        if entry.dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {entry.name!r}: element type {entry.dtype!r} is not one of {sorted(ITEM_BYTES)}")
        if entry.start != end or entry.stop - entry.start != math.prod(entry.shape) * ITEM_BYTES[entry.dtype]:
            raise ValueError(f"tensor {entry.name!r}: its bytes {entry.start} to {entry.stop} are not in their place")
        end = entry.stop
    return entries, metadata
