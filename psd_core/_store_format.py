"""The common part of the formats of all stores' files: the superblock, and the errors that stores raise.

A file begins with its superblock, little-endian, which is written once:

    magic        8 B
    u32          format
    u32          byte order mark
    u64          bytes of the facts
    u64          checksum of the whole superblock, with this word 0
    facts        whatever determines the rest of the file; then zeros

Must not know what the facts say, or open, map or lock anything.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable
from typing import NamedTuple

from psd_core import _arena

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)
"""Errors that mean no space, be it on a disk, in a quota, under a limit or in memory."""
CACHE_LINE_BYTES = 64
FRONT = struct.Struct("<8sIIQQ")
"""The superblock before its facts."""
_CHECK = slice(24, 32)
_BYTE_ORDER_MARK = 0x01020304


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


def align(value: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below `value`."""
    return -(-value // unit) * unit


class Superblock(NamedTuple):
    """The superblock of one kind of file.

    Attributes:
        what: the kind of file, for messages, such as "a table".
        nbytes: its length; 0: what the facts need, a multiple of 64.
    """

    magic: bytes
    version: int
    what: str
    nbytes: int = 0

    def end(self, facts: int) -> int:
        """Length of the superblock with so many bytes of facts."""
        return self.nbytes or align(FRONT.size + facts, CACHE_LINE_BYTES)

    def pack(self, facts: bytes) -> bytes:
        """The superblock. Raises ValueError if the facts do not fit."""
        block = bytearray(self.end(len(facts)))
        if FRONT.size + len(facts) > len(block):
            raise ValueError(f"{self.what} has {len(facts)} bytes of facts, at most {len(block) - FRONT.size} fit")
        FRONT.pack_into(block, 0, self.magic, self.version, _BYTE_ORDER_MARK, len(facts), 0)
        block[FRONT.size : FRONT.size + len(facts)] = facts
        block[_CHECK] = _arena.checksum(block).to_bytes(8, "little")
        return bytes(block)

    def read(self, read: Callable[[int, int], bytes], size: int) -> bytes:
        """The facts in a superblock that is not trusted.

        Args:
            read: takes the number of bytes and the first one; returns fewer at the end of the file. size: of the file.

        Raises:
            ArenaForeign: another program or release wrote it. ArenaCorrupt: it is not what was written.
        """
        front = read(FRONT.size, 0)
        if len(front) < FRONT.size:
            raise ArenaCorrupt(f"superblock: the file has {size} bytes, fewer than {FRONT.size}: truncated")
        magic, version, order, facts, check = FRONT.unpack(front)
        if magic != self.magic:
            raise ArenaForeign(f"superblock: expected magic {self.magic!r}, got {magic!r}: not {self.what}")
        if version != self.version:
            raise ArenaForeign(f"superblock: expected format {self.version}, got {version}: another release wrote it")
        if order != _BYTE_ORDER_MARK:
            raise ArenaCorrupt(f"superblock: expected byte order mark {_BYTE_ORDER_MARK:#x}, got {order:#x}")
        end = self.end(facts)
        block = bytearray(read(end, 0)) if end <= size else bytearray()
        if len(block) < end:
            raise ArenaCorrupt(f"superblock: would end at byte {end}, the file at {size}: truncated")
        block[_CHECK] = bytes(8)
        if FRONT.size + facts > end or _arena.checksum(block) != check:
            raise ArenaCorrupt(f"superblock: bytes 0 to {end} do not have the checksum {check:#x}")
        return bytes(block[FRONT.size : FRONT.size + facts])
