"""The layout: a pure function of the job spec and the shard count that gives each block a shard.

The tensors of one group and dtype are laid end to end in one *flat space*; each space is cut into equal blocks of at most
BLOCK_BYTES_MAX, smaller if a shard would have only a few; block b of the job belongs to shard b mod N. psd's own workers and
shards compute the same layout and compare its digest; other programs are sent it (layout_message.py).

Tensors of 16 bits have masters of 32, and gradients of 16: these are sent as they are, and a shard's kernels widen them.

A space of more than a few thousand elements is cut into a multiple of N blocks, so that shards differ by less than a block's
rounding; tiny spaces stay whole, because a block costs a message. Elementwise rules give the same bits however it is cut.

Where a job asks for compression, each block has a codec, or none: it travels compressed if it is of float32 and then has fewer
bytes.

A job with tables has one more block on each shard, after all others: its part of all tables, by the ids' hash. It is in no
space; it is pushed to, versioned and waited for like the trained blocks.

Must not know values, versions or sockets.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.contract.jobspec import JobSpec
from psd_core.codecs import BLOCK as SCALED_ELEMENTS
from psd_core.codecs import encoded_bytes

BLOCK_BYTES_MAX = 4 << 20
"""Largest block. A block costs a shard some 0.2 ms of Python, since touching that much memory empties the caches. With 2 MiB
the dense step took a tenth longer over TCP, with 1 MiB over shared memory, too; for gRPC it makes no difference."""
PIPELINED_BLOCKS = 8
"""Fewest blocks of a space on a shard, unless they are too small: on slow networks it matters that it answers the first while
the last still arrive."""
PIPELINED_BYTES_MIN = 512 << 10
BLOCK_ELEMENTS_MIN = 512  # 2 KiB: below this a message costs more than the balance between shards gains
BLOCK_ELEMENTS_STEP = 16  # blocks start on 64-byte boundaries of the space, so that kernels run on whole cache lines


_GRADIENT_DTYPES = {"bfloat16": "uint16"}
"""Stand-ins for dtypes that NumPy lacks: their bits."""

_OWN_CODECS = {"bfloat16": "bf16", "float16": "fp16"}

READ_CODECS = ("", *_OWN_CODECS.values())
"""Codecs that a reader may ask for."""


@dataclass(frozen=True, eq=False)
class Space:
    """One flat space.

    Attributes:
        group: index of the group; dtype: master dtype of all its tensors; size: elements.
        gradient_dtype: dtype of gradients in memory and on the wire: the tensors' own; uint16, the bits, for bfloat16.
        tensors: indices of its tensors in the spec; starts: where each begins, in elements.
        block_count, block_length: the blocks it is cut into; the last one may be shorter.
    """

    group: int
    dtype: np.dtype[np.floating]
    gradient_dtype: np.dtype[Any]
    size: int
    tensors: NDArray[np.int64]
    starts: NDArray[np.int64]
    block_count: int
    block_length: int


@dataclass(frozen=True, eq=False)
class Block:
    """A contiguous run of a space, made of segments: tensors, or the pieces of tensors that fall into it.

    Attributes:
        index: the block's index in the job; space: index of its space; offset, length: in elements of the space.
        dtype, gradient_dtype: the space's.
        trained: False in static groups, to which nothing is pushed.
        segment_tensors: (k,) index of each segment's tensor in the spec.
        segment_ends: (k,) uint32, where each segment ends, in elements from the block's start; the last is `length`.
        codec: of its gradient in pushes, pull_codec: of its parameters in workers' pulls; "": they travel as they are.
        has_differences: the latter is of differences: shards keep a copy of the parameters as workers have them.
        publisher: rank of the worker that publishes it; -1: it is trained, or static.
        own_codec: which loses nothing of its parameters, because they are published, and of 16 bits; "": there is none.
        pushed_nbytes, pulled_nbytes: bytes of these on the wire.
    """

    index: int
    space: int
    group: int
    dtype: np.dtype[np.floating]
    gradient_dtype: np.dtype[Any]
    offset: int
    length: int
    trained: bool
    segment_tensors: NDArray[np.int64]
    segment_ends: NDArray[np.uint32]
    codec: str
    pull_codec: str
    has_differences: bool
    pushed_nbytes: int
    pulled_nbytes: int
    publisher: int = -1
    own_codec: str = ""

    def read_codec(self, asked: str) -> str:
        """The codec of its parameters in an answer to a reader that asks for this one, of READ_CODECS."""
        return self.own_codec or (asked if self.dtype == np.float32 else "")

    @property
    def nbytes(self) -> int:
        """Bytes of the block's parameters."""
        return self.length * self.dtype.itemsize

    def elements_without(self, present: NDArray[Any]) -> NDArray[np.bool_]:
        """The elements of segments that are not present, as (length,) truth values. present: (k,) 0 or False for those."""
        found: NDArray[np.bool_] = np.repeat(present == 0, np.diff(self.segment_ends, prepend=np.uint32(0)))
        return found

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of the block's gradient in a worker's memory."""
        return self.length * self.gradient_dtype.itemsize


def _block_count(size: int, itemsize: int, shard_count: int) -> int:
    nbytes = size * itemsize
    count = max(-(-nbytes // BLOCK_BYTES_MAX), min(PIPELINED_BLOCKS * shard_count, nbytes // PIPELINED_BYTES_MIN))
    balanced = -(-count // shard_count) * shard_count
    if size < balanced * BLOCK_ELEMENTS_MIN:
        balanced = max(count, size // BLOCK_ELEMENTS_MIN, 1)
    return balanced


def _codec(asked: str, dtype: np.dtype[Any], length: int) -> str:
    """The codec of a block: none unless it is of float32, and then fewer bytes."""
    is_shorter = asked and dtype == np.float32 and encoded_bytes(asked, length) < length * dtype.itemsize
    return asked if is_shorter else ""


def _nbytes(codec: str, dtype: np.dtype[Any], length: int) -> int:
    return encoded_bytes(codec, length) if codec else length * dtype.itemsize


class Layout:
    """The place of every element of the job, for `shard_count` shards.

    Attributes:
        spec: the job spec. spaces: the flat spaces. blocks: all blocks of the job, by index.
        client_state_shard: the shard to which workers send the state that they save: the one with the first trained block.
        digest: 16 bytes that two layouts share exactly if they are equal.

    Args:
        is_gathered: True for a relay, which has the blocks of all shards and is asked as shard 0; they are cut as for these.
    """

    def __init__(self, spec: JobSpec, shard_count: int, *, is_gathered: bool = False) -> None:
        self.spec = spec
        self.shard_count = shard_count
        self.is_gathered = is_gathered
        self.spaces: list[Space] = []
        self.blocks: list[Block] = []
        members: dict[tuple[int, str], list[int]] = {}
        for index, tensor in enumerate(spec.tensors):
            if tensor.size:
                members.setdefault((tensor.group, tensor.dtype), []).append(index)
        for (group, dtype_name), tensors in sorted(members.items()):
            self._add_space(group, dtype_name, tensors)
        self.client_state_shard = self.shard_of(next((block.index for block in self.blocks if block.trained), 0))
        self.digest = self._digest()

    def _add_space(self, group: int, dtype_name: str, tensors: list[int]) -> None:
        dtype = np.dtype(self.spec.tensors[tensors[0]].master_dtype)
        gradient_dtype = np.dtype(_GRADIENT_DTYPES.get(dtype_name, dtype_name))
        sizes = np.array([self.spec.tensors[i].size for i in tensors], dtype=np.int64)
        ends = np.cumsum(sizes)
        size = int(ends[-1])
        length = -(-size // _block_count(size, dtype.itemsize, self.shard_count))
        asked = self.spec.compression  # cut so, elements share the same scales for any number of shards
        is_cut_alike = _codec(asked.push, gradient_dtype, size) or (asked.has_differences and _codec(asked.pull, dtype, size))
        step = SCALED_ELEMENTS if is_cut_alike else BLOCK_ELEMENTS_STEP
        length = -(-length // step) * step
        space = Space(
            group=group,
            dtype=dtype,
            gradient_dtype=gradient_dtype,
            size=size,
            tensors=np.array(tensors, dtype=np.int64),
            starts=ends - sizes,
            block_count=-(-size // length),
            block_length=length,
        )
        self.spaces.append(space)
        is_published = self.spec.groups[group].is_published
        trained = not self.spec.groups[group].is_static
        for offset in range(0, size, length):
            stop = min(offset + length, size)
            # The segments are the tensors from the one that holds `offset` to the one that holds `stop - 1`.
            first, last = np.searchsorted(ends, [offset, stop - 1], side="right")
            count = stop - offset
            codec = _codec(asked.push, gradient_dtype, count) if trained else ""
            pull_codec = _codec(asked.pull, dtype, count) if trained else ""
            self.blocks.append(
                Block(
                    index=len(self.blocks),
                    space=len(self.spaces) - 1,
                    group=group,
                    dtype=dtype,
                    gradient_dtype=gradient_dtype,
                    offset=offset,
                    length=count,
                    trained=trained,
                    segment_tensors=space.tensors[first : last + 1],
                    segment_ends=np.minimum(ends[first : last + 1] - offset, count).astype(np.uint32),
                    codec=codec,
                    pull_codec=pull_codec,
                    has_differences=bool(pull_codec) and asked.has_differences,
                    pushed_nbytes=_nbytes(codec, gradient_dtype, count),
                    pulled_nbytes=_nbytes(pull_codec, dtype, count),
                    publisher=group % self.spec.world_size if is_published else -1,
                    own_codec=_OWN_CODECS.get(dtype_name, "") if is_published else "",
                )
            )

    def _digest(self) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"psd layout 1, {self.shard_count} shards\n".encode())
        for group in self.spec.groups:
            words = (*group.flags, *(value.hex() for value in group.constants), *group.slots, *group.scalars)
            words += (group.staleness,) if group.staleness else ()
            digest.update(f"group {group.rule} {' '.join(words)}\n".encode())
        for tensor in self.spec.tensors:
            digest.update(f"tensor {str(tensor.name)!r} {tensor.shape} {tensor.dtype} {tensor.group}\n".encode())
        for table in self.spec.tables:
            digest.update(f"{table}\n".encode())
        for space in self.spaces:
            dtype = space.dtype.str + (f" of {space.gradient_dtype.str}" if space.gradient_dtype != space.dtype else "")
            digest.update(f"space {space.group} {dtype} {space.size} {space.block_length}\n".encode())
        if str(self.spec.compression):
            digest.update(f"compression {self.spec.compression}\n".encode())
        return digest.digest()

    def shard_of(self, block: int) -> int:
        """The shard that owns a block, or the tables' block of that index."""
        beyond = block - len(self.blocks)
        if self.is_gathered:
            return 0
        return beyond if beyond >= 0 else block % self.shard_count

    def tables_block(self, shard: int) -> int | None:
        """Index of the block for a shard's part of the tables; None in a job without tables."""
        return len(self.blocks) + shard if self.spec.tables else None

    def blocks_of(self, shard: int) -> list[Block]:
        """The blocks that a shard owns, in ascending order; perhaps none, if there are fewer blocks than shards."""
        if self.is_gathered:
            return self.blocks
        return self.blocks[shard :: self.shard_count]

    @property
    def untrained_shards(self) -> list[int]:
        """Shards that own blocks, but no trained ones."""
        if self.spec.tables:
            return []
        owned = [self.blocks_of(shard) for shard in range(self.shard_count)]
        return [shard for shard, blocks in enumerate(owned) if blocks and not any(block.trained for block in blocks)]

    def tensor_at(self, block: Block, element: int) -> str:
        """Name of the tensor that holds an element of a block, for messages."""
        segment = int(np.searchsorted(block.segment_ends, element, side="right"))
        return self.spec.tensors[int(block.segment_tensors[segment])].name
