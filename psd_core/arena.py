"""The crash-safe block store: the blocks of a shard in one shared mapping of a file, replaced by shadow paging.

A block is a small transaction. An update reads the block's current *page* and writes a *spare* one; `publish` makes it current
by one 8-byte store. Process death at any instant, `kill -9` too, leaves each block whole, old or new: header, dedup window,
steps, parameter, slots and extra arrays change together. (The kernel keeps the mapping's memory; power loss is not survived,
and nothing is fsynced.) Whoever has pinned an old page goes on reading it unchanged.

Must not import psd, read the environment, or know what words, sessions, clocks and rounds mean.

The file `arena` beside `lock`, all numbers little-endian, format 3:

    superblock   see _store_format.py; its facts: u32 workers W, blocks B, named words, 0; B x 32 B: dtype name[16], u64 length,
                 u16 slots, u16 extra arrays, u32 segments; meta, the caller's bytes
    words        16 x u64                                                                          (each one atomic)
    members      W x 64 B: u64 selector s, then twice (u64 session, u64 state << 56 | clock); pair s is valid
    decisions    16 x (u64 round + 1 or 0, u64 checksum, mask of W bits in u64s); round r in place r % 16
    block table  B x u64: page number << 24 | low bits of the page's checksum; 0: never published  (each one atomic)
    extents      u64 each: page size index << 48 | page count << 16 | check; 0: unused             (each one atomic)
    pages        by extent, in the order of the records; each extent begins at a multiple of 64 KiB

    a page       whole multiples of 4 KiB; its number is its offset / 4096. Head: u64 checksum of the head's other words, magic
                 "PSDPAGE1", block, page number, version, words in the head, checksum of the body (csrc/content.h), u16 file
                 << 48 | u8 plane + 1 << 40 | number of the page whose body it is, if not this one's, else 0; sessions u64[W],
                 clocks u64[W], steps u64[k]; then the body: parameter, slots and extra arrays, each from a multiple of 64

If a plane is named (_arena_planes.py), the parameter lies there, in the file `planes-FILE` beside this one, and not in the
body; the checksum then begins with it.

A version with the values of the one before has a page without a body, as large as a head, that names the page that has it. A
page that is named by no table entry, and by no page that one names, is free. So publishing is: write the head, with the body's
checksum, fence, store the entry. Freeing is nothing at all. Growing is: make the file longer, store the extent record. The free
list is what the table leaves over.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from psd_core import _arena_format as form
from psd_core import _arena_recovery as recovery
from psd_core import _store_file as files
from psd_core._arena_accumulators import Accumulators
from psd_core._arena_blocks import Blocks
from psd_core._arena_format import CRASH_POINTS, BlockShape
from psd_core._arena_lent import WORKERS_MAX, LentBlock, LentPage, Terms
from psd_core._arena_page import Page
from psd_core._arena_pages import SPARE_PAGES_KEPT
from psd_core._arena_planes import PLANES, PlaneFile, Region, plane_paths
from psd_core._arena_records import WORDS, Records
from psd_core._block import AHEAD, GIVEN_BACK, NEEDS_PAGE, NOT_SENT, STORE_CLOSED, BlockCore
from psd_core._store_file import ARENA_NAME, LOCK_NAME
from psd_core._store_format import NO_SPACE, ArenaBusy, ArenaCorrupt, ArenaError, ArenaForeign, StoreClosed, StoreFull

__all__ = [
    "ARENA_NAME",
    "CRASH_POINTS",
    "LOCK_NAME",
    "NO_SPACE",
    "PLANES",
    "WORDS",
    "Arena",
    "ArenaBusy",
    "StoreClosed",
    "ArenaCorrupt",
    "ArenaError",
    "ArenaForeign",
    "StoreFull",
    "BlockShape",
    "BlockCore",
    "LentBlock",
    "LentPage",
    "AHEAD",
    "GIVEN_BACK",
    "NEEDS_PAGE",
    "NOT_SENT",
    "STORE_CLOSED",
    "Page",
    "PlaneFile",
    "Region",
    "Terms",
    "WORKERS_MAX",
    "plane_paths",
]


def no_crash(_name: str) -> None:
    """Do nothing at a crash point."""


class Arena:
    """The block store of one shard. Made by `create` or `open`; closed by `close`.

    Thread-safe, but one thread at a time updates a block (`spare` to `publish`). A caller's errors (a page given back twice, a
    rank out of range) are AssertionError, IndexError or KeyError.

    `close` may come while others hold pages. These stay as they are, to be read, and are given back as before, which touches no
    file any more; what would change the arena raises StoreClosed.

    Attributes:
        meta: the caller's bytes, as given to `create`. shapes: of the blocks. workers: W.
        current, pin, unpin, spare, spare_alike, publish, discard: methods of Blocks (_arena_blocks.py), for pages.
        word, set_word, member, set_member, member_word, record_decision, decision: methods of Records (_arena_records.py), for
            durable facts; each call's change is whole or absent after a crash.
        return_accumulator: gives a lent accumulator back.
    """

    def __init__(
        self, directory: files.Directory, file: files.File, front: form.Front, crash_point: Callable[[str], None]
    ) -> None:
        """Take over directory and front; not for callers. Takes both over."""
        self.meta = front.meta
        self.shapes = front.shapes
        self.workers = front.workers
        self._directory = directory
        self._file = file
        self._front = front
        mapping = file.map_shared(0, front.size)
        self._crash_point = crash_point
        self._planning = threading.Lock()
        self._blocks = blocks = Blocks(file, front, mapping, directory.path, crash_point)
        self.current, self.pin, self.unpin = blocks.current, blocks.pin, blocks.unpin
        self.spare, self.spare_alike = blocks.spare, blocks.spare_alike
        self.publish, self.discard = blocks.publish, blocks.discard
        self._records = records = Records(front, mapping, crash_point)
        self.word, self.set_word = records.word, records.set_word
        self.member, self.set_member, self.member_word = records.member, records.set_member, records.member_word
        self.record_decision, self.decision = records.record_decision, records.decision
        self._accumulators = Accumulators(front.shapes)
        self.return_accumulator = self._accumulators.give_back

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike[str],
        *,
        meta: bytes,
        shapes: Sequence[BlockShape],
        workers: int,
        crash_point: Callable[[str], None] = no_crash,
        replace: bool = False,
        instead: Arena | None = None,
        prepare: Callable[[Arena], None] = lambda _: None,
    ) -> Arena:
        """Make an arena with no block published, with all words 0, in a directory that is made if need be.

        The arena appears under its name whole, by a rename. An unfinished one is always replaced.

        Args:
            meta: whatever identifies the contents; `open` gives it back.
            shapes: of the blocks. workers: ranks in the dedup window, members and decision masks.
            crash_point: called at each of CRASH_POINTS.
            replace: a finished arena too. What it held is lost.
            instead: this process's arena in that directory, whose place it takes; that one then has no file any more, and is
                not to be closed.
            prepare: called before it appears, to set words and members.

        Raises:
            ArenaBusy: another live process holds the directory.
            ArenaError: a finished arena is there, and not `replace`.
            StoreFull: no space; nothing of the new arena is left.
            ValueError: a shape that no page can have.
        """
        form.check_shapes(shapes, workers)
        path = Path(directory)
        with files.lack_of_space(f"no space for an arena in {path}"):
            if instead is not None:
                held = instead._directory  # noqa: SLF001 - of its own class
            else:
                held = files.take_lock(path, is_made=files.make_directory(path))
                if (path / ARENA_NAME).exists() and not replace:
                    held.close()
                    raise ArenaError(f"{path} holds an arena already")
            file = None
            try:
                front = form.Front(workers, tuple(shapes), bytes(meta))
                file = files.File(path / files.UNFINISHED_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                file.extend(front.size)
                file.reserve(0, front.size)
                file.write(front.fixed, 0)
                arena = cls(held, file, front, crash_point)
                arena._allocate()
                prepare(arena)
                crash_point("arena.create.before_rename")
                (path / files.UNFINISHED_NAME).rename(path / ARENA_NAME)
                crash_point("arena.create.after_rename")
                arena._blocks.planes.remove_others()
            except BaseException:
                if file is not None:
                    file.close()
                held.remove(files.UNFINISHED_NAME)
                if instead is None:
                    held.close()
                raise
        return arena

    @staticmethod
    def is_in(directory: str | os.PathLike[str]) -> bool:
        """True if a directory holds a finished arena, of whatever process. Takes no lock."""
        return (Path(directory) / ARENA_NAME).exists()

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        crash_point: Callable[[str], None] = no_crash,
        check: Callable[[], None] = lambda: None,
        read: recovery.Read = files.File.read,
    ) -> Arena | None:
        """Take over the arena that a process has left in a directory by dying, or by `close(remove=False)`.

        Every published page is read and verified. An unfinished arena is removed.

        Args:
            check: called when the directory is locked, if there is an arena, before anything of it is read or changed. What it
                raises passes.
            read: how bytes are read before they are trusted, for tests that count or change them.

        Returns:
            None if there is no finished arena.

        Raises:
            ArenaBusy: another live process holds the directory.
            StoreFull: no space even for a lock.
            ArenaCorrupt: the file is not what was written; the message says what is wrong where. The file is left alone.
        """
        path = Path(directory)
        if not path.is_dir():
            return None
        with files.lack_of_space(f"no space in {path}"):
            held = files.take_lock(path, is_made=False)
        file = None
        try:
            (path / files.UNFINISHED_NAME).unlink(missing_ok=True)
            if not (path / ARENA_NAME).exists():
                held.close()
                return None
            check()
            file = files.File(path / ARENA_NAME, os.O_RDWR)
            arena = cls(held, file, recovery.read_front(file, read), crash_point)
            blocks = arena._blocks
            arena._records.verify()
            recovery.add_extents(file, arena._front, blocks.extents, blocks.pool)
            blocks.adopt(recovery.read_table(file, arena._front, blocks.table, blocks.pool, blocks.planes, read))
            blocks.planes.remove_others()
        except BaseException as error:
            if file is not None:
                file.close()
            held.close()
            if isinstance(error, ArenaCorrupt):
                raise type(error)(f"{path / ARENA_NAME}: {error}") from None
            raise
        return arena

    @staticmethod
    def remove_from(directory: str | os.PathLike[str], first: Callable[[], None]) -> None:
        """Delete an arena that `open` refuses, after what `first` deletes. Raises ArenaBusy, OSError."""
        held = files.take_lock(Path(directory), is_made=False)
        try:
            first()
            held.remove(ARENA_NAME, *(path.name for path in plane_paths(Path(directory))))
        finally:
            held.close()

    def _allocate(self) -> None:
        """Make the first extents: a page per block and a few to update into, faulted in now rather than in the first steps.

        Pages without a body come when the first one is asked for."""
        pool = self._blocks.pool
        for kind in pool.kinds:
            blocks = sum(layout.size == kind.size for layout in self._front.layouts)
            if blocks:
                count = blocks + min(SPARE_PAGES_KEPT, 2 + blocks // 16)
                pool.back_all(pool.add_extent(kind, count, publish=True))

    def stop(self) -> None:
        """Refuse from now on, with StoreClosed, whatever would change a byte that counts. Idempotent."""
        self._records.close()
        self._blocks.stop()

    @property
    def path(self) -> Path:
        """Name of the file."""
        return self._directory.path / ARENA_NAME

    @property
    def front_bytes(self) -> int:
        """Length of what lies before the pages, each of which has checksums of its own."""
        return self._front.size

    def close(self, *, remove: bool) -> None:
        """Close the arena, even if pages of it are still held. Idempotent.

        One that stays keeps its directory locked until the last page that somebody holds is back: who opens it next would write
        where that one reads.

        Args:
            remove: delete the arena, and the directory if `create` had made it and nothing else is in it.

        Raises:
            OSError: a file cannot be deleted; the arena is closed all the same.
        """
        if self._file.is_closed:
            return
        self.stop()
        try:
            if remove:
                self.abandon()
        finally:
            self._blocks.pool.close(when_unheld=self._directory.close)
            self._blocks.planes.close()
            self._file.close()

    def abandon(self) -> None:
        """Delete the arena's files as `close` does, and nothing else: at the end of the process, and in finalizers, which may
        strike amid any call. Takes no lock."""
        try:
            self._directory.remove(ARENA_NAME, *(path.name for path in plane_paths(self._directory.path)))
        finally:
            self._directory.close()

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._file.is_closed

    # Pages.

    def lend(self, block: int, terms: Terms) -> LentBlock:
        """Lend a block of float32 or float64 to a C core, which counts gradients and publishes; once, while nobody has pinned a
        page of it. The calls below go on for it, too, one thread at a time where they update.

        Raises:
            ValueError: an unknown rule or flag.
        """
        return self._blocks.lend(block, terms, None if self._crash_point is no_crash else self._crash_point)

    def begin_planes(self, blocks: Collection[int]) -> PlaneFile:
        """Let the parameters of these blocks' next versions lie in planes, which other processes can map, as far as there is
        room, until `end_planes` has been called as often as this. Blocks that are lent to a C core stay as they are.

        Raises:
            StoreFull, StoreClosed, OSError: there is no file for them, and none can be made.
        """
        with self._planning:
            if self._file.is_closed:
                raise StoreClosed("the arena has been closed")
            return self._blocks.begin_planes(blocks)

    def end_planes(self) -> None:
        """Note that one of those who called `begin_planes` is done with them."""
        with self._planning:
            self._blocks.planes.end()

    def lend_accumulator(self, block: int) -> NDArray[Any]:
        """An (n,) array of ordinary memory with undefined contents, to sum a round's gradients in."""
        return self._accumulators.lend(self.shapes[block])

    # Memory.

    @property
    def file_bytes(self) -> int:
        """Length of the file, holes included."""
        return self._blocks.pool.file_end

    @property
    def used_bytes(self) -> int:
        """Memory or disk space that the files take: front, current and pinned pages, spares, planes."""
        return self._blocks.pool.backed_bytes + self._blocks.planes.backed_bytes

    @property
    def spare_bytes(self) -> int:
        """The part of `used_bytes` that no version lives in: spares that nobody has in hand."""
        return self._blocks.spare_bytes

    @property
    def held_bytes(self) -> int:
        """The part of `used_bytes` in old versions that somebody has pinned, and in pages that are being written."""
        return max(0, self.used_bytes - self.spare_bytes - self._blocks.current_bytes - self._front.size)

    def trim(self) -> None:
        """Give the memory of surplus spares back now. Unpinning and publishing do so too, little by little."""
        self._blocks.pool.trim()
