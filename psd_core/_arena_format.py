"""The positions of everything in an arena file, as pure functions; arena.py describes the format in words.

Owns sizes, offsets, the packing of the superblock, of extent records and of table entries, and the errors. Must not open,
map or lock anything.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from psd_core import _arena

MAGIC = b"PSDARENA"
FORMAT_VERSION = 3
BYTE_ORDER_MARK = 0x01020304
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)
"""Errors that mean no space, be it on a disk, in a quota, under a limit or in memory."""
PAGE_MAGIC = int.from_bytes(b"PSDPAGE1", "little")

UNIT_BYTES = 4096
"""Unit of pages, whose sizes are whole multiples of it."""
EXTENT_ALIGN_BYTES = 65536
"""Alignment of extents, as mmap requires: the largest memory page of the machines that psd runs on."""
CACHE_LINE_BYTES = 64

HEADER_WORDS = 8
WORD_SLOTS = 16
MEMBER_WORDS = 8
DECISION_SLOTS = 16  # more than a shard reads, so that writing one never removes one of the last eight

SUPERBLOCK = struct.Struct("<8sIIIII4xQQ16x")  # see Front.pack
_CHECK_AT = 40  # of the checksum in it
SHAPE = struct.Struct("<16sQII")

TABLE_CHECK_BITS = 24
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


class ArenaError(Exception):
    """An error of the block store."""


class ArenaCorrupt(ArenaError):
    """An arena file differs from what was written; the message says where and how."""


class ArenaForeign(ArenaCorrupt):
    """A file is none of this release's: another release's, or something else that has the name of one."""


class StoreClosed(ArenaError):
    """The arena, or another store, has been closed or replaced by another one, and does not change any more."""


class StoreFull(ArenaError, OSError):
    """There is no memory or disk space for what is to be stored. Nothing has changed; `errno` is ENOSPC."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.ENOSPC, message)


class ArenaBusy(ArenaError):
    """Another live process holds the directory.

    Attributes:
        pid: its process id, or None if it has not said yet.
    """

    def __init__(self, message: str, pid: int | None) -> None:
        super().__init__(message)
        self.pid = pid


class BlockShape(NamedTuple):
    """The sizes of a block.

    Attributes:
        dtype: NumPy's name of the element type, such as "float32".
        length: elements of the parameter and of each slot.
        slot_count: arrays of optimizer state. segment_count: segments, each with a step count.
    """

    dtype: str
    length: int
    slot_count: int
    segment_count: int


def check_shape(index: int, shape: BlockShape) -> None:
    """Raise ValueError for a shape that no page can have."""
    dtype = np.dtype(shape.dtype)
    if dtype.name != shape.dtype or dtype.kind not in "fiu" or len(shape.dtype) > 16:
        raise ValueError(f"shapes[{index}].dtype: expected a name such as 'float32', got {shape.dtype!r}")
    for name, value, limit in zip(shape._fields[1:], shape[1:], (1 << 48, 1 << 16, 1 << 24), strict=True):
        if not 0 <= value < limit:
            raise ValueError(f"shapes[{index}].{name}: expected 0 to {limit - 1}, got {value}")


def align(value: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below `value`."""
    return -(-value // unit) * unit


class PageLayout(NamedTuple):
    """Byte offsets within a page. `head_words` are those that the head's checksum covers, itself among them; `body_words`, from
    the parameter on, those that the body's does. `size` is that of a page, `head_size` that of a page without a body."""

    sessions_at: int
    clocks_at: int
    steps_at: int
    head_words: int
    parameter_at: int
    body_words: int
    slots_at: tuple[int, ...]
    size: int
    head_size: int


def page_layout(shape: BlockShape, workers: int) -> PageLayout:
    """The positions of the parts of a block's page."""
    sessions_at = 8 * HEADER_WORDS
    clocks_at = sessions_at + 8 * workers
    steps_at = clocks_at + 8 * workers
    head_words = HEADER_WORDS + 2 * workers + shape.segment_count
    parameter_at = align(8 * head_words, CACHE_LINE_BYTES)
    stride = align(shape.length * np.dtype(shape.dtype).itemsize, CACHE_LINE_BYTES)
    slots_at = tuple(parameter_at + stride * (i + 1) for i in range(shape.slot_count))
    size = align(parameter_at + stride * (shape.slot_count + 1), UNIT_BYTES)
    body_words = stride * (shape.slot_count + 1) // 8
    head_size = align(8 * head_words, UNIT_BYTES)
    return PageLayout(sessions_at, clocks_at, steps_at, head_words, parameter_at, body_words, slots_at, size, head_size)


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
    def page_sizes(self) -> tuple[int, ...]:
        """The kinds of pages: their sizes, ascending, those without a body among them. A kind is known by its place here."""
        return tuple(sorted({size for layout in self.layouts for size in (layout.size, layout.head_size)}))

    @property
    def fixed_bytes(self) -> int:
        """Superblock, shapes and meta: never written again, under one checksum."""
        return SUPERBLOCK.size + SHAPE.size * len(self.shapes) + align(len(self.meta), 8)

    @property
    def words_at(self) -> int:
        """Position of the named words."""
        return align(self.fixed_bytes, CACHE_LINE_BYTES)

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
        return 64 * (len(self.page_sizes) + 1)

    @property
    def size(self) -> int:
        """Bytes before the first extent."""
        return align(self.extents_at + 8 * self.extents_max, EXTENT_ALIGN_BYTES)

    def pack(self) -> bytes:
        """Pack the fixed part; its last superblock word is the checksum of all of it, taken with that word zero."""
        counts = (FORMAT_VERSION, BYTE_ORDER_MARK, self.workers, len(self.shapes), WORD_SLOTS)
        fixed = bytearray(self.fixed_bytes)
        SUPERBLOCK.pack_into(fixed, 0, MAGIC, *counts, len(self.meta), 0)
        for i, shape in enumerate(self.shapes):
            name = shape.dtype.encode()
            SHAPE.pack_into(fixed, SUPERBLOCK.size + SHAPE.size * i, name, *shape[1:])
        start = SUPERBLOCK.size + SHAPE.size * len(self.shapes)
        fixed[start : start + len(self.meta)] = self.meta
        SUPERBLOCK.pack_into(fixed, 0, MAGIC, *counts, len(self.meta), _arena.checksum(fixed))
        return bytes(fixed)


def check_front(found: tuple[bytes, int, int], magic: bytes, version: int, what: str) -> None:
    """Raise ArenaForeign unless a superblock begins with this magic and version; ArenaCorrupt for another byte order."""
    if found[0] != magic:
        raise ArenaForeign(f"superblock: expected magic {magic!r}, got {found[0]!r}: not {what}")
    if found[1] != version:
        raise ArenaForeign(f"superblock: expected format {version}, got {found[1]}: another release wrote it")
    if found[2] != BYTE_ORDER_MARK:
        raise ArenaCorrupt(f"superblock: expected byte order mark {BYTE_ORDER_MARK:#x}, got {found[2]:#x}")


def fixed_bytes(superblock: bytes) -> int:
    """Length of the fixed part that begins with this superblock. Raises ArenaCorrupt if it is none."""
    magic, version, order, _workers, block_count, words, meta_bytes, _check = SUPERBLOCK.unpack(superblock)
    check_front((magic, version, order), MAGIC, FORMAT_VERSION, "an arena")
    if words != WORD_SLOTS:
        raise ArenaForeign(f"superblock: expected {WORD_SLOTS} words, got {words}: another release wrote it")
    return SUPERBLOCK.size + SHAPE.size * int(block_count) + align(int(meta_bytes), 8)


def unpack(fixed: bytes) -> Front:
    """The inverse of Front.pack. Raises ArenaCorrupt."""
    _magic, _version, _order, workers, block_count, _words, meta_bytes, check = SUPERBLOCK.unpack_from(fixed)
    unsigned = bytearray(fixed)
    unsigned[_CHECK_AT : _CHECK_AT + 8] = bytes(8)
    if _arena.checksum(unsigned) != check:
        raise ArenaCorrupt(f"superblock, shapes and meta: bytes 0 to {len(fixed)} do not have the checksum {check:#x}")
    shapes = []
    try:
        for i in range(block_count):
            name, *numbers = SHAPE.unpack_from(fixed, SUPERBLOCK.size + SHAPE.size * i)
            shapes.append(BlockShape(name.rstrip(b"\0").decode("ascii"), *numbers))
        check_shapes(shapes, workers)
    except (ValueError, TypeError) as error:  # what is no dtype is a TypeError to NumPy
        raise ArenaCorrupt(f"superblock: {error}") from None
    start = SUPERBLOCK.size + SHAPE.size * block_count
    return Front(workers, tuple(shapes), fixed[start : start + meta_bytes])


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


def check_shapes(shapes: Sequence[BlockShape], workers: int) -> None:
    """Raise ValueError for shapes that no arena can hold."""
    if not 0 < workers < 1 << 20:
        raise ValueError(f"workers: expected 1 to {(1 << 20) - 1}, got {workers}")
    for i, shape in enumerate(shapes):
        check_shape(i, shape)
    kinds = len({page_layout(shape, workers).size for shape in shapes})
    if kinds > KINDS_MAX:
        raise ValueError(f"shapes: at most {KINDS_MAX} page sizes, got {kinds}")
