"""An arena that is closed while others hold its pages: they stay good memory, and nothing of it touches a file any more."""

import gc
import os
import threading

import pytest
from arena_workload import SHAPES, WORKERS, check_places, create_published, fill, is_whole, snapshot_bytes, update, versions

from psd_core import _store_file as files
from psd_core._arena_pages import SPARE_PAGES_KEPT
from psd_core.arena import Arena, ArenaBusy, BlockShape, StoreClosed

BLOCKS = range(len(SHAPES))
MANY = [BlockShape("float32", 4000, 1, 1)] * 64


def holes(path):
    """Bytes of the arena's file that take no space."""
    status = (path / files.ARENA_NAME).stat()
    return status.st_size - status.st_blocks * 512


@pytest.fixture
def hold_everything(memory_path):
    """An arena of which pages of every kind are held: current ones, old ones, spares that are written, surplus that is free."""
    arena = create_published(memory_path, MANY)
    old = [arena.pin(block) for block in range(64)]
    for block in range(64):
        update(arena, block, 2)
    current = [arena.pin(block) for block in range(64)]
    spares = [arena.spare(block) for block in range(8)]
    return arena, old, current, spares


def give_everything_back(arena, old, current, spares):
    """In the ways that there are; a spare cannot be published any more."""
    for page in (*old, *current):
        arena.unpin(page)
    for page in spares[::2]:
        arena.discard(page)
    for page in spares[1::2]:
        fill(page, 3)
        with pytest.raises(StoreClosed):
            arena.publish(page.block, page, 3)
    arena.trim()


def test_pages_of_an_arena_that_was_replaced_are_given_back_without_a_trace(memory_path, hold_everything):
    """The new arena's file has the descriptors of the old one, which must not be used for that."""
    arena, old, current, spares = hold_everything
    before = [snapshot_bytes(page) for page in (*old, *current)]
    arena.close(remove=True)
    new = create_published(memory_path, MANY)
    file_bytes, used_bytes, taken = new.file_bytes, new.used_bytes, holes(memory_path)

    assert [snapshot_bytes(page) for page in (*old, *current)] == before
    give_everything_back(arena, old, current, spares)

    assert (new.file_bytes, new.used_bytes, holes(memory_path)) == (file_bytes, used_bytes, taken)
    assert (memory_path / files.ARENA_NAME).stat().st_size == file_bytes
    assert all(is_whole(new.current(block), block, 1) for block in range(64))
    for block in range(64):
        update(new, block, 2)
    check_places(new)
    new.close(remove=False)
    new = Arena.open(memory_path)
    assert all(is_whole(new.current(block), block, 2) for block in range(64))
    new.close(remove=True)


def test_an_arena_that_stays_is_locked_until_the_last_page_is_back(memory_path, hold_everything):
    """Whoever opened it earlier would write into pages that others still read, and find what they still write."""
    arena, old, current, spares = hold_everything
    arena.close(remove=False)
    arena.close(remove=True)  # again: changes nothing

    *most, last = old
    give_everything_back(arena, most, current, spares)
    with pytest.raises(ArenaBusy, match=f"process {os.getpid()}"):
        Arena.open(memory_path)
    arena.unpin(last)

    again = Arena.open(memory_path)
    assert all(is_whole(again.current(block), block, 2) for block in range(64))
    check_places(again)
    again.close(remove=True)


def test_nothing_of_a_closed_arena_can_be_changed_or_begun(memory_path):
    """What is asked of it is refused by name; what it says can still be read."""
    arena = create_published(memory_path)
    arena.set_word("timeline", 3)
    arena.set_member(1, 7, 8, 2)
    arena.record_decision(4, 0b11)
    arena.close(remove=False)
    stored = (memory_path / files.ARENA_NAME).read_bytes()

    for change in (
        lambda: arena.spare(0),
        lambda: arena.pin(0),
        lambda: arena.set_word("timeline", 4),
        lambda: arena.set_member(1, 8, 0, 2),
        lambda: arena.record_decision(5, 0b1),
    ):
        with pytest.raises(StoreClosed, match="has been closed"):
            change()
    arena.trim()

    assert arena.is_closed
    assert (arena.word("timeline"), arena.member(1), arena.decision(4)) == (3, (7, 8, 2), 0b11)
    assert versions(arena) == [1] * len(SHAPES)
    assert (memory_path / files.ARENA_NAME).read_bytes() == stored
    Arena.open(memory_path).close(remove=True)


def test_accumulators_outlive_their_arena(memory_path):
    """They are ordinary memory."""
    arena = create_published(memory_path)
    lent = arena.lend_accumulator(0)
    arena.close(remove=True)

    lent[:] = 1
    arena.return_accumulator(lent)

    assert arena.lend_accumulator(0) is lent


def test_close_waits_for_a_call_that_uses_the_file_and_the_next_one_is_refused(memory_path, monkeypatch):
    """A hole that is just being punched is punched in this file: its number is not free before."""
    arena = create_published(memory_path, MANY)
    pinned = [arena.pin(block) for block in range(64)]
    for block in range(64):
        update(arena, block, 2)
    begun, goes_on, punched = threading.Event(), threading.Event(), []
    punch_hole = files._arena.punch_hole

    def punch_slowly(fd, start, nbytes):
        begun.set()
        assert goes_on.wait(100)
        punched.append(os.fstat(fd).st_ino)
        return punch_hole(fd, start, nbytes)

    monkeypatch.setattr(files._arena, "punch_hole", punch_slowly)
    inode = (memory_path / files.ARENA_NAME).stat().st_ino

    def give_back():
        for page in pinned:
            arena.unpin(page)
        arena.trim()

    giving, closing = threading.Thread(target=give_back), threading.Thread(target=arena.close, kwargs={"remove": True})
    giving.start()
    assert begun.wait(100)
    closing.start()
    assert not arena._file.is_closed
    goes_on.set()
    giving.join()
    closing.join()

    assert arena._file.is_closed
    assert set(punched) == {inode}
    assert len(punched) <= len(pinned) - SPARE_PAGES_KEPT + 2


def test_an_abandoned_arena_leaves_no_files_and_keeps_its_pages(memory_path):
    """As at the end of a process, amid whatever its threads are about."""
    arena = create_published(memory_path / "state")
    pinned = arena.pin(0)

    arena.abandon()
    update(arena, 0, 2)

    assert not (memory_path / "state").exists()
    assert is_whole(pinned, 0, 1)
    arena.unpin(pinned)
    arena.close(remove=True)


def test_an_arena_that_nobody_refers_to_any_more_has_let_go(memory_path):
    """Neither its lock nor its descriptors outlive it."""
    arena = Arena.create(memory_path, meta=b"", shapes=SHAPES, workers=WORKERS)
    descriptors = [arena._directory._fd, arena._file._fd]
    assert [os.fstat(fd).st_ino for fd in descriptors] == [
        (memory_path / name).stat().st_ino for name in (files.LOCK_NAME, files.ARENA_NAME)
    ]
    closings = [arena._directory._closing, arena._file._closing]
    del arena
    gc.collect()

    assert not any(closing.alive for closing in closings)
    Arena.open(memory_path).close(remove=True)
