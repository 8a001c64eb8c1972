"""A fixed sequence of changes to an arena, which a process may die in at any point and another go on with.

Round v brings every block to version v, in order, then sets members, the round's decision and a word. All contents are
functions of (block, version), so that whoever opens the arena sees what is whole; two of four versions have the body of the one
before. Snapshots hold old pages for a few rounds.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
from collections import Counter
from pathlib import Path

import numpy as np

from psd_core.arena import Arena, BlockShape, Page

WORKERS = 3
SHAPES = [
    BlockShape("float32", 1000, 1, 2),
    BlockShape("float64", 300, 1, 1, 1),
    BlockShape("float32", 9000, 0, 5),
    BlockShape("float32", 1000, 1, 2),
    BlockShape("float32", 9000, 0, 5),
]
SNAPSHOT_ROUNDS = 6
IN_PLANES = {0, 1, 2, 4}
ENDLESS = 1 << 30


def fill(page: Page, version: int, body: int | None = None) -> None:
    """Write a version of the page's block. body: the version whose parameter and slots it has; None: its own, written here."""
    seed = 1000 * page.block + version
    for i, array in enumerate((*page.arrays, page.steps, page.sessions, page.clocks)):
        if body is None or i >= len(page.arrays):
            array[:] = np.arange(array.size) % 7 + seed + i


def is_whole(page: Page, block: int, version: int, body: int | None = None) -> bool:
    """True if a page is that version of that block, all of it. body: as of `fill`."""
    contents = True
    for i, array in enumerate((*page.arrays, page.steps, page.sessions, page.clocks)):
        seed = 1000 * block + (version if body is None or i >= len(page.arrays) else body)
        contents = contents and np.array_equal(array, np.arange(array.size) % 7 + seed + i)
    return contents and page.block == block and page.version == version


def of_body(version: int) -> int:
    """The version whose parameter and slots a version of the sequence has."""
    return version - max(0, version % 4 - 1)


def update(arena: Arena, block: int, version: int, body: int | None = None) -> None:
    """Publish a version. body: as of `fill`; it must be that of the version before."""
    page = arena.spare(block) if body is None else arena.spare_alike(block)
    fill(page, version, body)
    arena.publish(block, page, version)


def create_published(path: Path, shapes=SHAPES) -> Arena:
    """A new arena with version 1 of every block."""
    arena = Arena.create(path, meta=b"", shapes=shapes, workers=WORKERS)
    for block in range(len(shapes)):
        update(arena, block, 1)
    return arena


def snapshot_bytes(page: Page) -> tuple[int, bytes]:
    """A copy of all that a page says."""
    arrays = (*page.arrays, page.steps, page.sessions, page.clocks)
    return page.version, b"".join(array.tobytes() for array in arrays)


def member(rank: int, round_: int) -> tuple[int, int, int]:
    """A member after a round; the session changes now and then, and the clock with it."""
    return (0, 0, 0) if round_ == 0 else (1000 * rank + round_ // 3, round_ % 3 * 10 + rank, round_ % 5)


def mask(round_: int) -> int:
    """The decision of a round."""
    return round_ % (1 << WORKERS)


def versions(arena: Arena) -> list[int]:
    """Per block; 0 if never published."""
    pages = [arena.current(block) for block in range(len(SHAPES))]
    return [0 if page is None else page.version for page in pages]


class Journal:
    """Updates begun and done, in memory that outlives the process."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(16)
            self._memory = mmap.mmap(file.fileno(), 16)

    def begin(self) -> None:
        self._memory[0:8] = struct.pack("<Q", self.begun + 1)

    def end(self) -> None:
        self._memory[8:16] = self._memory[0:8]

    def settle(self, count: int) -> None:
        """After a crash: so many updates are there."""
        self._memory[:] = struct.pack("<QQ", count, count)

    @property
    def begun(self) -> int:
        return int(struct.unpack("<Q", self._memory[0:8])[0])

    @property
    def done(self) -> int:
        return int(struct.unpack("<Q", self._memory[8:16])[0])


def run(arena: Arena, journal: Journal, rounds: int, report=lambda round_: None) -> None:
    """Go on from wherever the arena is, up to and with a round."""
    pinned: list[Page] = []
    for round_ in range(min(versions(arena)), rounds + 1):
        if round_ > 0 and round_ % SNAPSHOT_ROUNDS != 0:
            pinned += [arena.pin(block) for block, version in enumerate(versions(arena)) if version]
        else:
            while pinned:
                arena.unpin(pinned.pop())
            arena.trim()
        for block, version in enumerate(versions(arena)):
            if version < round_:
                journal.begin()
                update(arena, block, round_, None if of_body(round_) == round_ else of_body(round_))
                journal.end()
        if round_ > 0:
            for rank in range(WORKERS):
                arena.set_member(rank, *member(rank, round_))
            arena.record_decision(round_, mask(round_))
            arena.set_word("tentative", round_)
        report(round_)
    for page in pinned:
        arena.unpin(page)


class CrashAt:
    """A crash_point that kills this process the n-th time that it comes by; counts otherwise."""

    def __init__(self, name: str = "", occurrence: int = 0) -> None:
        self.counts: Counter[str] = Counter()
        self._name = name
        self._occurrence = occurrence

    def __call__(self, name: str) -> None:
        self.counts[name] += 1
        if name == self._name and self.counts[name] == self._occurrence:
            os.kill(os.getpid(), signal.SIGKILL)


def open_or_create(directory: Path, crash_point, *, has_planes: bool = False) -> Arena:
    """Open the arena, or create it, as a shard does when it starts. has_planes: some blocks' versions lie in planes."""
    arena = Arena.open(directory, crash_point=crash_point)
    arena = arena or Arena.create(directory, meta=b"workload", shapes=SHAPES, workers=WORKERS, crash_point=crash_point)
    if has_planes:
        arena.begin_planes(IN_PLANES)
    return arena


def main_until_crash(directory: Path, name: str, occurrence: int, rounds: int) -> None:
    """A process that ends itself."""
    run(open_or_create(directory / "state", CrashAt(name, occurrence)), Journal(directory / "journal"), rounds)


def main_in_planes_until_killed(directory: Path, connection) -> None:
    """A process that does as the next one, whose pages lie in planes."""
    arena = open_or_create(directory / "state", CrashAt(), has_planes=True)
    run(arena, Journal(directory / "journal"), ENDLESS, connection.send)


def main_until_killed(directory: Path, connection) -> None:
    """A process that reports its rounds and goes on until somebody ends it."""
    run(open_or_create(directory / "state", CrashAt()), Journal(directory / "journal"), ENDLESS, connection.send)


def check(arena: Arena, journal: Journal) -> int:
    """Assert that an arena that was opened after a crash is exactly what the journal allows; return the updates in it."""
    found = versions(arena)
    count = sum(found)
    assert journal.done <= count <= journal.begun
    assert found == [count // len(SHAPES) + (block < count % len(SHAPES)) for block in range(len(SHAPES))]
    for block, version in enumerate(found):
        page = arena.current(block)
        assert page is None or is_whole(page, block, version, of_body(version))
    complete = count // len(SHAPES)
    for rank in range(WORKERS):
        assert arena.member(rank) in (member(rank, max(0, complete - 1)), member(rank, complete))
    if complete:
        assert arena.decision(complete) in (None, mask(complete))
        earlier = range(max(1, complete - 8), complete)
        assert [arena.decision(round_) for round_ in earlier] == [mask(round_) for round_ in earlier]
        assert arena.word("tentative") in (complete - 1, complete)
    check_places(arena)
    return count


def check_places(arena: Arena) -> None:
    """Assert that, with nothing pinned or in hand, every place is current, has the body of a current one, or is free, and that
    memory is accounted for."""
    pool = arena._blocks.pool
    current = [arena.current(block) for block in range(len(arena.shapes))]
    pages = [page for page in current if page is not None]
    planes = arena._blocks.planes
    used = Counter(page.place.kind.size for page in [*pages, *(page.base for page in pages if page.base is not None)])
    for kind in pool.kinds:
        free = [*kind.backed, *kind.holes]
        assert len(set(free)) == len(free) == kind.places - used[kind.size]
    assert sum(kind.places for kind in pool.kinds) == len(pool.places)
    backed = sum(kind.size * (len(kind.backed) + used[kind.size]) for kind in pool.kinds)
    assert arena.used_bytes == backed + arena._front.size + planes.backed_bytes
    assert arena.spare_bytes == sum(kind.size * len(kind.backed) for kind in pool.kinds) + planes.idle_bytes
