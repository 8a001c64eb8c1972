"""A checkpoint's facts about one block, and their layout in a shard's data file: a *record*, its arrays one after the other.

    space-0/steps/4096            (k,)  U64   updates applied to each segment
    space-0/sessions/4096         (W,)  U64   the dedup window: per rank, session ...
    space-0/clocks/4096           (W,)  U64   ... and clock after the last push counted
    space-0/parameter/4096        (n,)  F32 or F64; of buffers also I64, I32, I16, I8, U8
    space-0/slots/momentum/4096   (n,)  likewise; one per slot of the group's rule
    space-0/padding/4096          (p,)  U8    zeros that fill the record to a multiple of 8 bytes; seldom needed

4096 is the block's offset in its space, in elements. A record is contiguous: one ranged read fetches it, one CRC-32 covers it.
Spaces depend on the job spec alone; how they are cut into blocks depends on the number of shards, so records say where they
belong. Must not know files, nor who owns a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psd.checkpoint.safetensors import ITEM_BYTES, NUMPY_DTYPES
from psd.contract.jobspec import JobSpec
from psd.contract.layout import Block, Layout, Space

RECORD_ALIGNMENT_BYTES = 8

_ELEMENT_TYPES = {dtype.name: name for name, dtype in NUMPY_DTYPES.items()}


class BlockPart(NamedTuple):
    """A block at the cut, as its shard hands it over: views of a pinned page, and the facts beside it.

    Attributes:
        space, offset, length: which block, in elements of its space.
        version: updates applied.
        parameter: (n,) in the space's dtype. slots: likewise, by name, in the order of the rule.
        steps: (k,) uint64, updates applied to each segment.
        sessions, clocks: (W,) uint64, the dedup window, by rank.
    """

    space: int
    offset: int
    length: int
    version: int
    parameter: NDArray[Any]
    slots: Mapping[str, NDArray[Any]]
    steps: NDArray[np.uint64]
    sessions: NDArray[np.uint64]
    clocks: NDArray[np.uint64]


class RestoredBlock(NamedTuple):
    """A block to be restored. The arrays may be read-only views; copy them.

    Attributes:
        block: of the new layout.
        version: the largest of the stored blocks it is made of; under sync they are all equal.
        parameter, slots, steps: as in BlockPart.
        sessions, clocks: the dedup window, or None if the block was cut differently or the job had another world size.
    """

    block: Block
    version: int
    parameter: NDArray[Any]
    slots: Mapping[str, NDArray[Any]]
    steps: NDArray[np.uint64]
    sessions: NDArray[np.uint64] | None
    clocks: NDArray[np.uint64] | None


class Record(NamedTuple):
    """The place of a stored block, and the checksum of its bytes.

    Attributes:
        part: index of the shard that wrote it.
        segments: length of `steps`.
        start, nbytes: in the part's data file, counted from its first byte.
    """

    part: int
    space: int
    offset: int
    length: int
    version: int
    segments: int
    start: int
    nbytes: int
    crc32: int


class Field(NamedTuple):
    """One array of a record: its kind and, for a slot, its name; element type and length."""

    kind: str
    slot: str
    dtype: str
    length: int

    def tensor_name(self, space: int, offset: int) -> str:
        """Name of an array in the file."""
        middle = f"slots/{self.slot}" if self.kind == "slots" else self.kind
        return f"space-{space}/{middle}/{offset}"


@dataclass(frozen=True, eq=False)
class StoredSpace:
    """A flat space of the stored job, with the arrays of its records.

    Attributes:
        space: of the layout; its blocks do not matter. ends: where each of its tensors ends, in elements.
        slots: names of the slots of its group. world_size: length of the dedup windows.
    """

    space: Space
    ends: NDArray[np.int64]
    slots: tuple[str, ...]
    world_size: int

    def fields(self, length: int, segments: int) -> list[Field]:
        """The arrays of a record of `length` elements."""
        element_type = _ELEMENT_TYPES[self.space.dtype.name]
        fields = [
            Field("steps", "", "U64", segments),
            Field("sessions", "", "U64", self.world_size),
            Field("clocks", "", "U64", self.world_size),
            Field("parameter", "", element_type, length),
            *(Field("slots", slot, element_type, length) for slot in self.slots),
        ]
        padding = -sum(field.length * ITEM_BYTES[field.dtype] for field in fields) % RECORD_ALIGNMENT_BYTES
        return [*fields, Field("padding", "", "U8", padding)] if padding else fields

    def first_tensor(self, offset: int) -> int:
        """The space's tensor that holds an element."""
        return int(np.searchsorted(self.ends, offset, side="right"))

    def segments_in(self, offset: int, length: int) -> int:
        """Number of tensors with elements in a run."""
        return self.first_tensor(offset + length - 1) - self.first_tensor(offset) + 1


def stored_spaces(spec: JobSpec) -> list[StoredSpace]:
    """The spaces of a job, in their order."""
    sizes = np.array([tensor.size for tensor in spec.tensors], dtype=np.int64)
    stored = []
    for space in Layout(spec, 1).spaces:
        group = spec.groups[space.group]
        slots = group.info.slots(group.flags)
        stored.append(StoredSpace(space, space.starts + sizes[space.tensors], slots, spec.world_size))
    return stored


def encode(part: BlockPart, fields: Iterable[Field]) -> Iterator[memoryview]:
    """The bytes of a record, array by array, without a copy."""
    arrays: dict[str, NDArray[Any]] = {
        "steps": part.steps,
        "sessions": part.sessions,
        "clocks": part.clocks,
        "parameter": part.parameter,
    }
    for field in fields:
        if field.kind == "padding":
            yield memoryview(bytes(field.length))
            continue
        array = part.slots[field.slot] if field.kind == "slots" else arrays[field.kind]
        dtype = NUMPY_DTYPES[field.dtype]
        assert array.shape == (field.length,), (field, array.shape)
        assert array.dtype == dtype, (field, array.dtype)
        yield np.ascontiguousarray(array).data.cast("B")


def decode(record: Record, data: bytes, fields: Iterable[Field]) -> BlockPart:
    """A record's arrays, as read-only views of its bytes."""
    arrays: dict[str, NDArray[Any]] = {}
    slots: dict[str, NDArray[Any]] = {}
    start = 0
    for field in fields:
        array = np.frombuffer(data, NUMPY_DTYPES[field.dtype], field.length, start)
        start += array.nbytes
        if field.kind == "slots":
            slots[field.slot] = array
        else:
            arrays[field.kind] = array
    return BlockPart(
        record.space,
        record.offset,
        record.length,
        record.version,
        arrays["parameter"],
        slots,
        arrays["steps"],
        arrays["sessions"],
        arrays["clocks"],
    )
