"""Memory that a worker shares with the shards on its machine: an anonymous file, which ends when no process uses it any more.

It has no name in any file system, so nothing is left behind, whichever process dies. It is sealed against shrinking, as shards
demand. A forked child gets it like all other memory: what it writes there is its own. Must not know layouts, sockets or shards.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd_core.distinct import offsets
from psd_core.large_pages import LARGE_PAGE_BYTES, LargeMap, punch_hole

NONCE_BYTES = 16
ALIGN_BYTES = 4096


class Segment:
    """Shared memory, zero at first, from which arrays are cut one after the other.

    Args:
        nbytes: the most bytes of all arrays together, each rounded up to ALIGN_BYTES.

    Raises:
        OSError: the system has no memory files, or no memory.

    Attributes:
        fd: the file's descriptor. nbytes: its size. nonce: its first bytes, which only processes that see the memory know.
        is_given_up: True once the memory is private: no other process sees what is written to it.
    """

    def __init__(self, nbytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory files")
        self.is_given_up = False
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.nbytes = ALIGN_BYTES + nbytes
        self.fd = os.memfd_create("psd-worker", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._finalizer = weakref.finalize(self, os.close, self.fd)
        self._finalizer.atexit = False  # a connection that breaks at exit may have to be opened again
        os.ftruncate(self.fd, self.nbytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._mapping = LargeMap(self.fd, self.nbytes)
        memoryview(self._mapping)[:NONCE_BYTES] = self.nonce
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._end = ALIGN_BYTES
        _segments.add(self)

    def zeros(self, size: int, dtype: np.dtype[Any]) -> tuple[NDArray[Any], int]:
        """A (size,) array and its offset in bytes. It keeps the memory, not the descriptor. Unused pages cost nothing."""
        start = self.reserve(size * dtype.itemsize)
        return self.array(start, size, dtype), start

    def reserve(self, nbytes: int) -> int:
        """Set bytes aside for the caller; return their offset."""
        start = self._end
        self._end += aligned(nbytes)
        return start

    def array(self, start: int, size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """A (size,) array over the memory from byte `start` on."""
        array: NDArray[Any] = np.ndarray((size,), dtype, memoryview(self._mapping), start)
        return array

    def discard(self, array: NDArray[Any]) -> None:
        """Give the memory of an array back, which begins at a multiple of ALIGN_BYTES and has the room up to the next one to
        itself. It is zero then. Does nothing where the system cannot, or if the memory was given up."""
        for start in self.where([array]) if array.nbytes else ():
            assert start % ALIGN_BYTES == 0
            punch_hole(self.fd, start, aligned(array.nbytes))

    def make_large(self, array: NDArray[Any]) -> None:
        """Have large pages hold an array, which takes its memory now, as far as the system can."""
        for start in self.where([array]) if array.nbytes >= LARGE_PAGE_BYTES else ():
            some = array.view(np.uint8)[::LARGE_PAGE_BYTES]
            np.bitwise_or(some, 0, out=some)
            self._mapping.make_large(start, array.nbytes)

    def where(self, arrays: list[NDArray[Any]]) -> list[int]:
        """Offsets of C-contiguous arrays in the file, in bytes; empty if one is not in it, or the memory was given up."""
        starts = offsets(arrays, self._address, self.nbytes) if not self.is_given_up else None
        return starts or []

    def give_up(self, received: Sequence[NDArray[Any]]) -> None:
        """Make the memory private to this process, at the same address and with the same contents. Other processes keep the old
        contents.

        A page becomes this process's own when it first writes there. received: arrays of this memory to which only others
        write; their pages become its own at once, so that it does not see what others still write there.
        """
        self.is_given_up = True
        own = _mmap(None, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE, self.fd, 0)
        # Two steps, since a mapping that is refused may have removed what was in its place.
        if own in (None, _MAP_FAILED) or _mremap(own, self.nbytes, self.nbytes, _MREMAP_HERE, self._address) != self._address:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        for array in received:
            flat = array.reshape(-1).view(np.uint8)
            for pages in (flat[::ALIGN_BYTES], flat[-1:]):
                np.bitwise_or(pages, 0, out=pages)
        self._finalizer()


_segments: weakref.WeakSet[Segment] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for segment in list(_segments):
        if not segment.is_given_up:
            with contextlib.suppress(OSError):
                segment.give_up(())


os.register_at_fork(after_in_child=_after_fork_in_child)

_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_NORESERVE = 0x4000  # most of it is never written, and may be more than the system would promise
_MREMAP_HERE = 3  # MREMAP_MAYMOVE | MREMAP_FIXED: Linux, as memory files are
_library: Any = ctypes.CDLL(None, use_errno=True)
if hasattr(os, "memfd_create"):
    _mmap, _mremap = _library.mmap, _library.mremap
    _mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    _mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    _mmap.restype = _mremap.restype = ctypes.c_void_p


def aligned(nbytes: int) -> int:
    """A number of bytes, rounded up to ALIGN_BYTES."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
