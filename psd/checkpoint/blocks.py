"""A checkpoint's facts about one block, and their layout in a chunk: arrays one after the other.

    version      (1,)    u64
    steps        (k,)    u64   updates applied to each segment
    sessions     (W,)    u64   the dedup window: per rank, session ...
    clocks       (W,)    u64   ... and clock after the last push counted
    parameter    (n,)    in the space's dtype
    slots        (n,)    in the same dtype, one array per slot of the group's rule

Spaces depend only on the job spec. Their division into blocks depends on the number of shards, so each chunk names its place.
Must not know files, or which shard owns a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psd.checkpoint.chunks import Chunk, ChunkKind, NewChunk
from psd.checkpoint.cut import Cut
from psd.contract.errors import CheckpointFailed
from psd.contract.jobspec import JobSpec
from psd.contract.layout import Block, Layout, Space


class BlockPart(NamedTuple):
    """A block at the cut, as its shard provides it: views of a pinned page, and facts about the block.

    Attributes:
        space, offset, length: the block's place, in elements of its space.
        version: updates applied.
        parameter: (n,) in the space's dtype. slots: (n,) in the same dtype, by name, in the order of the rule.
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
    """A block to restore. The arrays may be read-only views; copy them.

    Attributes:
        block: the block in the new layout.
        version: the largest of the stored blocks from which it is made; under sync all are equal.
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


@dataclass(frozen=True, eq=False)
class StoredSpace:
    """A flat space of the stored job.

    Attributes:
        space: the layout's space; its blocks do not matter. ends: end of each of its tensors, in elements.
        slots: names of its group's slots. world_size: length of the dedup windows.
    """

    space: Space
    ends: NDArray[np.int64]
    slots: tuple[str, ...]
    world_size: int

    def first_tensor(self, offset: int) -> int:
        """Number, in the space, of the tensor that holds an element."""
        return int(np.searchsorted(self.ends, offset, side="right"))

    def segments_in(self, chunk: Chunk) -> int:
        """Number of tensors with elements in a chunk."""
        return self.first_tensor(chunk.first + chunk.length - 1) - self.first_tensor(chunk.first) + 1

    def nbytes_of(self, chunk: Chunk) -> int:
        """Bytes that a chunk must have."""
        numbers = 1 + self.segments_in(chunk) + 2 * self.world_size
        return 8 * numbers + (1 + len(self.slots)) * chunk.length * self.space.dtype.itemsize


BLOCK = ChunkKind("block", "space", StoredSpace.nbytes_of, is_run=True)


def stored_spaces(spec: JobSpec) -> list[StoredSpace]:
    """The spaces of a job, in their order."""
    sizes = np.array([tensor.size for tensor in spec.tensors], dtype=np.int64)
    stored = []
    for space in Layout(spec, 1).spaces:
        group = spec.groups[space.group]
        slots = group.info.slots(group.flags)
        stored.append(StoredSpace(space, space.starts + sizes[space.tensors], slots, spec.world_size))
    return stored


def block_chunks(cut: Cut, shard_index: int, blocks: Iterable[BlockPart]) -> Iterator[NewChunk]:
    """A shard's blocks as chunks; CheckpointFailed if one is not of the cut. Each is used only until the next is asked for."""
    for plan, block in zip(cut.layout.blocks_of(shard_index), blocks, strict=True):
        assert (block.space, block.offset, block.length) == (plan.space, plan.offset, plan.length), (block, plan)
        assert len(block.steps) == len(plan.segment_ends), (block, plan)
        if cut.spec.consistency.has_rounds and plan.trained and block.version != cut.step:
            raise CheckpointFailed(f"{cut.name}: block {plan.index} is at version {block.version}, the cut at {cut.step}")
        numbers = [np.array([block.version], np.uint64), block.steps, block.sessions, block.clocks]
        elements = [block.parameter, *block.slots.values()]
        assert all(array.dtype == np.uint64 for array in numbers), block
        assert all((array.dtype, array.shape) == (plan.dtype, (plan.length,)) for array in elements), block
        yield NewChunk(BLOCK.name, block.space, block.offset, block.length, [*numbers, *elements])


def decode_block(stored: StoredSpace, chunk: Chunk, data: bytes) -> BlockPart:
    """A block, as read-only views of its bytes."""
    segments, world = stored.segments_in(chunk), stored.world_size
    numbers = np.frombuffer(data, "<u8", 1 + segments + 2 * world)
    version, steps, sessions, clocks = np.split(numbers, [1, 1 + segments, 1 + segments + world])
    dtype = stored.space.dtype.newbyteorder("<")
    parameter, *slots = np.frombuffer(data, dtype, offset=numbers.nbytes).reshape(-1, chunk.length)
    of_slots = dict(zip(stored.slots, slots, strict=True))
    return BlockPart(chunk.of, chunk.first, chunk.length, int(version[0]), parameter, of_slots, steps, sessions, clocks)
