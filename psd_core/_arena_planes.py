"""Planes: room for parameters of pages in a file beside the arena, which other processes of this user may map, to read them.

A plane has room for one version of each block's parameter, block after block. So versions that lie in the same plane are one
piece of memory to a process that has mapped it, and the file shows nothing else: no slots, members or windows.

A process writes only to a file that it has made itself: what an earlier one has shown may still be read somewhere. Versions
that were found in an earlier file stay there until they are replaced; with the last of them the file goes. Must not know what a
page is, or who reads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psd_core import _arena_format as form
from psd_core import _store_file as files
from psd_core._arena import LARGE_PAGE_BYTES
from psd_core._store_format import CACHE_LINE_BYTES, ArenaCorrupt, StoreClosed, StoreFull, align

PLANES = 4
"""Planes of a file. An update needs two; the others are for when somebody still holds what lies in these."""

MODE = 0o400
"""Permissions of the file, once it is open: a descriptor to read from cannot be made one to write to."""

PREFIX = "planes-"
NUMBERS_MAX = (1 << form.FILE_BITS) - 1
IDLE_MAX = 64
"""Updates of a block after which its room in a plane beyond the first two is given back, if none of them has used it."""


class Region(NamedTuple):
    """The room of one version. file: where. plane, block: indices."""

    file: PlaneFile
    plane: int
    block: int


class PlaneFile:
    """One file.

    Attributes:
        number: part of its name. starts: of the blocks within a plane, in bytes. plane_bytes: length of a plane.
        used: versions that lie in it. found_bytes: of those that an earlier process has left.
    """

    def __init__(self, directory: Path, number: int, shapes: Sequence[form.BlockShape], *, is_new: bool) -> None:
        self.number = number
        self.used = 0
        self.found_bytes = 0
        self._shapes = shapes
        self._nbytes = [shape.nbytes for shape in shapes]  # an update asks for it again and again
        self.starts: list[int] = []
        end = 0
        for nbytes in self._nbytes:
            self.starts.append(end)
            end = align(end + nbytes, CACHE_LINE_BYTES)
        self.plane_bytes = align(end, LARGE_PAGE_BYTES)
        self.path = directory / f"{PREFIX}{number}"
        self.file = files.File(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL if is_new else os.O_RDONLY)
        try:
            if is_new:
                self.file.extend(PLANES * self.plane_bytes)
                self.path.chmod(MODE)
            self._check_size()
            self._mapping = self.file.map_large(PLANES * self.plane_bytes, is_read_only=not is_new)
        except BaseException:
            self.file.close()
            if is_new:
                self.path.unlink(missing_ok=True)
            raise
        self._arrays: dict[tuple[int, int], NDArray[Any]] = {}

    def _check_size(self) -> None:
        size, expected = self.file.size, PLANES * self.plane_bytes
        if size != expected:
            raise ArenaCorrupt(f"{self.path}: has {size} bytes, expected {expected}")

    def nbytes(self, block: int) -> int:
        """Bytes of a block's parameter."""
        return self._nbytes[block]

    def place(self, plane: int, block: int) -> tuple[int, int]:
        """Offset in the file, and length, in bytes."""
        return plane * self.plane_bytes + self.starts[block], self.nbytes(block)

    def array(self, plane: int, block: int) -> NDArray[Any]:
        """The (n,) parameter of a block in a plane."""
        found = self._arrays.get((plane, block))
        if found is None:
            shape, (start, _) = self._shapes[block], self.place(plane, block)
            found = self._arrays[plane, block] = np.ndarray((shape.length,), shape.dtype, memoryview(self._mapping), start)
        return found

    def reserve(self, plane: int, block: int) -> None:
        """Take memory for a parameter, so that writing to it cannot fail. Raises StoreFull, StoreClosed."""
        start, nbytes = self.place(plane, block)
        self.file.reserve(start, nbytes)
        files.populate(self._mapping, start, nbytes)
        self._mapping.make_large(start, nbytes)

    def release(self, plane: int, block: int) -> None:
        """Give that memory back, if the system can."""
        self.file.release(*self.place(plane, block))

    def open_read_only(self) -> int:
        """Another descriptor of the file, which the caller closes, with which nobody can write to it."""
        return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def remove(self) -> None:
        """Delete the file. What is mapped stays as it is."""
        self.path.unlink(missing_ok=True)
        self.file.close()


class Planes:
    """The planes of one arena. `begin` and `end` are for one thread at a time.

    Args:
        lock: guards who has which room.

    Attributes:
        backed_bytes: memory of the files. idle_bytes: the part of it in which no version lies.
    """

    def __init__(self, directory: Path, shapes: Sequence[form.BlockShape], lock: threading.Lock) -> None:
        self.backed_bytes = 0
        self.idle_bytes = 0
        self._directory = directory
        self._shapes = shapes
        self._lock = lock
        self._own: PlaneFile | None = None
        self._found: dict[int, PlaneFile] = {}  # by number, of earlier processes
        self._blocks: frozenset[int] = frozenset()  # whose next versions lie here
        self._users = 0
        self._taken: set[tuple[int, int]] = set()  # plane and block, of the own file
        self._backed: dict[tuple[int, int], int] = {}  # those with memory: the block's updates at the last use
        self._updates: dict[int, int] = {}
        self._is_closed = False

    # -- who maps them -------------------------------------------------------------------------------------------------

    def begin(self, blocks: Collection[int]) -> PlaneFile:
        """Let the next versions of these blocks lie in planes, until `end` has been called as often as this.

        Raises:
            StoreFull, StoreClosed, OSError: there is no file, and none can be made.
        """
        if self._own is None:
            taken = {number for number, _ in paths(self._directory)}
            number = next(number for number in range(1, NUMBERS_MAX + 1) if number not in taken)
            self._own = PlaneFile(self._directory, number, self._shapes, is_new=True)
        with self._lock:
            self._users += 1
            self._blocks = frozenset(blocks)
        return self._own

    def end(self) -> None:
        """Note that one of those who called `begin` is done. With the last of them, memory that is not in use goes back."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            self._blocks = frozenset()
            idle = self._withdraw([room for room in self._backed if room not in self._taken])
        self.release(idle)

    def has(self, block: int) -> bool:
        """True if the block's next version is to lie in a plane."""
        return block in self._blocks

    # -- room ----------------------------------------------------------------------------------------------------------

    def take(self, block: int, version: int) -> Region | None:
        """Room for a version; blocks that are updated alike get it in the same plane. None if there is none.

        Raises:
            StoreClosed: the file is closed.
        """
        if block not in self._blocks:
            return None
        with self._lock:
            own, is_odd = self._own, version % 2
            free = [plane for plane in (is_odd, 1 - is_odd, *range(2, PLANES)) if (plane, block) not in self._taken]
            if own is None or not free:
                return None
            room = free[0], block
            count = self._updates[block] = self._updates.get(block, 0) + 1
            is_backed = room in self._backed
            self._taken.add(room)
            self._backed[room] = count
            own.used += 1
            nbytes = own.nbytes(block)
            if is_backed:
                self.idle_bytes -= nbytes
            else:
                self.backed_bytes += nbytes
            others = [(plane, block) for plane in free[1:] if plane > 1]
            idle = self._withdraw([other for other in others if count - self._backed.get(other, count) > IDLE_MAX])
        self.release(idle)
        region = Region(own, *room)
        if is_backed:
            return region
        try:
            own.reserve(*room)
        except (StoreFull, StoreClosed) as error:
            with self._lock:
                own.used -= 1
                self.idle_bytes += nbytes
            self.release([region])
            if isinstance(error, StoreClosed):
                raise
            return None
        return region

    def give(self, region: Region) -> list[Region]:
        """Take room back. Call with the lock held, and `release` the result without it."""
        file, plane, block = region
        if self._is_closed:
            return []
        file.used -= 1
        if file is self._own:
            self.idle_bytes += file.nbytes(block)
            if block not in self._blocks:
                return [region]
            self._taken.discard((plane, block))
        elif not file.used and self._found.pop(file.number, None) is not None:
            self.backed_bytes -= file.found_bytes
            file.remove()
        return []

    def release(self, regions: Iterable[Region]) -> None:
        """Give the memory of taken room, in which no version lies, back to the system; then it is free."""
        for file, plane, block in regions:
            file.release(plane, block)
            with self._lock:
                self._backed.pop((plane, block), None)
                self._taken.discard((plane, block))
                self.backed_bytes -= file.nbytes(block)
                self.idle_bytes -= file.nbytes(block)

    def _withdraw(self, rooms: Iterable[tuple[int, int]]) -> list[Region]:
        """Take free room that has memory, to be released."""
        assert self._own is not None
        found = [Region(self._own, *room) for room in rooms]
        self._taken.update((plane, block) for _, plane, block in found)
        return found

    # -- opening and closing -------------------------------------------------------------------------------------------

    def adopt(self, number: int, plane: int, block: int) -> Region:
        """Take over a version that an earlier process has left. Raises ArenaCorrupt if it cannot be there."""
        if plane >= PLANES:
            raise ArenaCorrupt(f"{PREFIX}{number}: has {PLANES} planes, none of number {plane}")
        file = self._found.get(number)
        if file is None:
            try:
                file = self._found[number] = PlaneFile(self._directory, number, self._shapes, is_new=False)
            except FileNotFoundError:
                raise ArenaCorrupt(f"{self._directory / PREFIX}{number}: is missing") from None
        file.used += 1
        file.found_bytes += file.nbytes(block)
        self.backed_bytes += file.nbytes(block)
        return Region(file, plane, block)

    def remove_others(self) -> None:
        """Delete the files in the directory in which no version lies."""
        for number, path in paths(self._directory):
            if number not in self._found and (self._own is None or number != self._own.number):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files; what is mapped of them stays as it is. What comes back changes nothing any more."""
        with self._lock:
            self._is_closed = True
        for file in (self._own, *self._found.values()):
            if file is not None:
                file.file.close()


def plane_paths(directory: Path) -> list[Path]:
    """The files of planes in a directory."""
    return sorted(path for _, path in paths(directory))


def paths(directory: Path) -> list[tuple[int, Path]]:
    """The files of planes in a directory, with their numbers."""
    found = [(path.name.removeprefix(PREFIX), path) for path in directory.glob(f"{PREFIX}*")]
    return [(int(number), path) for number, path in found if number.isascii() and number.isdigit()]
