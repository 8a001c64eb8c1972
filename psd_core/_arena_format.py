"""The positions of everything in an arena file, as pure functions; arena.py describes the format in words.

Owns sizes, offsets, the facts in the superblock, and the packing of extent records and of table entries. Must not open, map or
lock anything.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from psd_core import _arena
from psd_core._store_format import CACHE_LINE_BYTES, ArenaCorrupt, ArenaForeign, Superblock, align

SUPERBLOCK = Superblock(b"PSDARENA", 3, "an arena")
PAGE_MAGIC = int.from_bytes(b"PSDPAGE1", "little")

UNIT_BYTES = 4096
"""Unit of pages, whose sizes are whole multiples of it."""
EXTENT_ALIGN_BYTES = 65536
"""Alignment of extents, as mmap requires: the largest memory page of the machines that psd runs on."""

HEADER_WORDS = 8
WORD_SLOTS = 16
MEMBER_WORDS = 8
DECISION_SLOTS = 16  # more than a shard reads, so that writing one never removes one of the last eight

_COUNTS = struct.Struct("<III4x")  # see Front.fixed
SHAPE = struct.Struct("<16sQHHI")

TABLE_CHECK_BITS = 24
NUMBER_BITS, PLANE_BITS, FILE_BITS = 40, 8, 16
"""Bits of a head's last word: of the page whose body it is, of the parameter's plane, plus 1, and of the plane's file."""
_EXTENT_CHECK_BITS = 16
_EXTENT_COUNT_BITS = 32
KINDS_MAX = (1 << 16) - 1
PAGES_PER_EXTENT_MAX = (1 << _EXTENT_COUNT_BITS) - 1

CRASH_POINTS = (
    "arena.create.before_rename",
    "arena.create.after_rename",
    "arena.grow.before_record",
    "arena.grow.after_record",
    "arena.publish.before_header",
    "arena.publish.before_flip",
    "arena.publish.after_flip",
    "arena.free",
    "arena.trim",
    "arena.member",
    "arena.decision",
)
"""Names of the steps at which `crash_point` is called. It returns or ends the process; it must not raise or call the arena."""


class BlockShape(NamedTuple):
    """The sizes of a block.

    Attributes:
        dtype: NumPy's name of the element type, such as "float32".
        length: elements of the parameter and of each slot.
        slot_count: arrays of optimizer state. segment_count: segments, each with a step count.
        extra_count: arrays of whatever else changes with them.
    """

    dtype: str
    length: int
    slot_count: int
    segment_count: int
    extra_count: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter, and of each slot."""
        return self.length * np.dtype(self.dtype).itemsize


def check_shape(index: int, shape: BlockShape) -> None:
    """Raise ValueError for a shape that no page can have."""
    dtype = np.dtype(shape.dtype)
    if dtype.name != shape.dtype or dtype.kind not in "fiu" or len(shape.dtype) > 16:
        raise ValueError(f"shapes[{index}].dtype: expected a name such as 'float32', got {shape.dtype!r}")
    for name, value, limit in zip(shape._fields[1:], shape[1:], (1 << 48, 1 << 16, 1 << 24, 1 << 16), strict=True):
        if not 0 <= value < limit:
            raise ValueError(f"shapes[{index}].{name}: expected 0 to {limit - 1}, got {value}")


class PageLayout(NamedTuple):
    """Byte offsets within a page. `head_words` are those that the head's checksum covers, itself among them; `body_words`, from
    `parameter_at` on, those that the body's does. `size` is that of a page, `head_size` that of a page without a body. If the
    parameter `is_apart`, in a plane, the body begins with the first slot."""

    sessions_at: int
    clocks_at: int
    steps_at: int
    head_words: int
    parameter_at: int
    body_words: int
    slots_at: tuple[int, ...]
    extra_at: tuple[int, ...]
    size: int
    head_size: int
    is_apart: bool = False


def page_layout(shape: BlockShape, workers: int, *, is_apart: bool = False) -> PageLayout:
    """The positions of the parts of a block's page. is_apart: its parameter lies in a plane, and the body has the others."""
    sessions_at = 8 * HEADER_WORDS
    clocks_at = sessions_at + 8 * workers
    steps_at = clocks_at + 8 * workers
    head_words = HEADER_WORDS + 2 * workers + shape.segment_count
    parameter_at = align(8 * head_words, CACHE_LINE_BYTES)
    stride = align(shape.nbytes, CACHE_LINE_BYTES)
    own = 0 if is_apart else 1
    count = own + shape.slot_count + shape.extra_count
    behind = tuple(parameter_at + stride * i for i in range(own, count))
    slots_at, extra_at = behind[: shape.slot_count], behind[shape.slot_count :]
    size = align(parameter_at + stride * count, UNIT_BYTES)
    head_size = align(8 * head_words, UNIT_BYTES)
    body_words = stride * count // 8
    return PageLayout(
        sessions_at, clocks_at, steps_at, head_words, parameter_at, body_words, slots_at, extra_at, size, head_size, is_apart
    )


@dataclass(frozen=True)
class Front:
    """The part of the file before the first extent, which determines all positions."""

    workers: int
    shapes: tuple[BlockShape, ...]
    meta: bytes

    @cached_property
    def layouts(self) -> tuple[PageLayout, ...]:
        """Layouts of the blocks' pages, by block."""
        return tuple(page_layout(shape, self.workers) for shape in self.shapes)

    @cached_property
    def apart_layouts(self) -> tuple[PageLayout, ...]:
        """Layouts of pages whose parameter lies in a plane, by block."""
        return tuple(page_layout(shape, self.workers, is_apart=True) for shape in self.shapes)

    @cached_property
    def _whole_sizes(self) -> list[int]:
        return sorted({size for layout in self.layouts for size in (layout.size, layout.head_size)})

    @cached_property
    def page_sizes(self) -> tuple[int, ...]:
        """The kinds of pages: their sizes, ascending, those without a body among them; then those without a parameter alone. A
        kind is known by its place here."""
        further = {layout.size for layout in self.apart_layouts}.difference(self._whole_sizes)
        return (*self._whole_sizes, *sorted(further))

    @cached_property
    def fixed(self) -> bytes:
        """The superblock, with the shapes and meta: never written again."""
        shapes = b"".join(
            SHAPE.pack(shape.dtype.encode(), shape.length, shape.slot_count, shape.extra_count, shape.segment_count)
            for shape in self.shapes
        )
        return SUPERBLOCK.pack(_COUNTS.pack(self.workers, len(self.shapes), WORD_SLOTS) + shapes + self.meta)

    @property
    def words_at(self) -> int:
        """Position of the named words."""
        return len(self.fixed)

    @property
    def members_at(self) -> int:
        """Position of the members, MEMBER_WORDS each."""
        return self.words_at + 8 * WORD_SLOTS

    @property
    def decisions_at(self) -> int:
        """Position of the ring of decisions, `decision_words` each."""
        return self.members_at + 8 * MEMBER_WORDS * self.workers

    @property
    def decision_words(self) -> int:
        """Words of a decision: stamp, checksum, mask."""
        return 2 + -(-self.workers // 64)

    @property
    def table_at(self) -> int:
        """Position of the block table, a word per block."""
        return self.decisions_at + 8 * self.decision_words * DECISION_SLOTS

    @property
    def extents_at(self) -> int:
        """Position of the extent records, a word each."""
        return self.table_at + 8 * len(self.shapes)

    @property
    def extents_max(self) -> int:
        """Number of records that fit. A kind grows by an eighth each time, so 64 make it a thousand times as large."""
        return 64 * (len(self._whole_sizes) + 1)

    @property
    def size(self) -> int:
        """Bytes before the first extent."""
        return align(self.extents_at + 8 * self.extents_max, EXTENT_ALIGN_BYTES)


def read_front(read: Callable[[int, int], bytes], size: int) -> Front:
    """The front of a file of this size, as Superblock.read reads it. Raises ArenaCorrupt."""
    facts = SUPERBLOCK.read(read, size)
    try:
        workers, count, words = _COUNTS.unpack_from(facts)
        if words != WORD_SLOTS:
            raise ArenaForeign(f"superblock: expected {WORD_SLOTS} words, got {words}: another release wrote it")
        end = _COUNTS.size + SHAPE.size * count
        shapes = tuple(
            BlockShape(name.rstrip(b"\0").decode("ascii"), length, slots, segments, extra)
            for name, length, slots, extra, segments in SHAPE.iter_unpack(facts[_COUNTS.size : end])
        )
        if len(shapes) != count:
            raise ArenaCorrupt(f"superblock: has {len(shapes)} of {count} shapes")
        check_shapes(shapes, workers)
    except (ValueError, TypeError, struct.error) as error:  # what is no dtype is a TypeError to NumPy
        raise ArenaCorrupt(f"superblock: {error}") from None
    return Front(workers, shapes, facts[end:])


def pack_extent(index: int, kind: int, count: int) -> int:
    """The record of `count` pages of a kind: kind, count and a check of both and of the record's own place."""
    value = (kind << _EXTENT_COUNT_BITS | count) << _EXTENT_CHECK_BITS
    return value | _arena.checksum(struct.pack("<QQ", index, value)) & ((1 << _EXTENT_CHECK_BITS) - 1)


def unpack_extent(index: int, record: int) -> tuple[int, int]:
    """Kind and page count. Raises ArenaCorrupt."""
    kind = record >> (_EXTENT_CHECK_BITS + _EXTENT_COUNT_BITS)
    count = record >> _EXTENT_CHECK_BITS & PAGES_PER_EXTENT_MAX
    if count == 0 or pack_extent(index, kind, count) != record:
        raise ArenaCorrupt(f"extent {index}: the record {record:#x} does not have its checksum")
    return kind, count


def pack_entry(page_number: int, page_checksum: int) -> int:
    """The table entry of a page: its number, and low bits of its checksum, so that both vouch for each other."""
    return page_number << TABLE_CHECK_BITS | page_checksum & ((1 << TABLE_CHECK_BITS) - 1)


def pack_body(page_number: int, plane: int, file: int) -> int:
    """A head's last word. page_number: 0: the body is the page's own. plane: -1: the parameter is in the body."""
    return page_number | (plane + 1) << NUMBER_BITS | file << (NUMBER_BITS + PLANE_BITS)


def unpack_body(word: int) -> tuple[int, int, int]:
    """Page number, plane and file."""
    plane = word >> NUMBER_BITS & ((1 << PLANE_BITS) - 1)
    return word & ((1 << NUMBER_BITS) - 1), plane - 1, word >> (NUMBER_BITS + PLANE_BITS)


def check_shapes(shapes: Sequence[BlockShape], workers: int) -> None:
    """Raise ValueError for shapes that no arena can hold."""
    if not 0 < workers < 1 << 20:
        raise ValueError(f"workers: expected 1 to {(1 << 20) - 1}, got {workers}")
    for i, shape in enumerate(shapes):
        check_shape(i, shape)
    kinds = len({page_layout(shape, workers).size for shape in shapes})
    if kinds > KINDS_MAX:
        raise ValueError(f"shapes: at most {KINDS_MAX} page sizes, got {kinds}")
