"""Making, locking and removing an arena; its durable words, members and decisions; accumulators."""

import multiprocessing
import os

import numpy as np
import pytest
from arena_workload import SHAPES, WORKERS

from psd_core import _store_file as files
from psd_core.arena import WORDS, Arena, ArenaBusy, ArenaError, BlockShape


def create(path, workers=WORKERS, shapes=SHAPES, **more):
    return Arena.create(path, meta=b"meta", shapes=shapes, workers=workers, **more)


def reopen(arena, path):
    arena.close(remove=False)
    again = Arena.open(path)
    assert again is not None
    return again


def test_what_was_created_is_what_is_opened(memory_path):
    arena = reopen(create(memory_path / "deep" / "state"), memory_path / "deep" / "state")

    assert (arena.meta, arena.shapes, arena.workers) == (b"meta", tuple(SHAPES), WORKERS)
    assert [arena.current(block) for block in range(len(SHAPES))] == [None] * len(SHAPES)
    with pytest.raises(ArenaError, match="block 2 was never published"):
        arena.pin(2)
    arena.close(remove=True)


def test_nothing_there_is_no_error(memory_path):
    assert Arena.open(memory_path / "absent") is None
    assert Arena.open(memory_path) is None
    assert not (memory_path / "absent").exists()


def test_an_unfinished_arena_counts_as_nothing_and_is_removed(memory_path):
    (memory_path / files.UNFINISHED_NAME).write_bytes(b"half")

    assert Arena.open(memory_path) is None

    assert not (memory_path / files.UNFINISHED_NAME).exists()


def test_a_finished_arena_is_replaced_on_demand_only(memory_path):
    arena = create(memory_path)
    arena.set_word("tentative", 5)
    arena.close(remove=False)

    with pytest.raises(ArenaError, match="holds an arena already"):
        create(memory_path)
    arena = create(memory_path, replace=True)

    assert arena.word("tentative") == 0
    arena.close(remove=True)


def test_removing_takes_along_the_directory_that_create_made_and_no_other(memory_path):
    found, made, shared = memory_path / "found", memory_path / "made", memory_path / "shared"
    found.mkdir()

    for path in (found, made, shared):
        arena = reopen(create(path), path)
        (shared / "notes").touch() if path == shared else None
        arena.close(remove=True)
        arena.close(remove=True)

    assert list(found.iterdir()) == []
    assert not made.exists()
    assert list(shared.iterdir()) == [shared / "notes"]


def test_a_directory_in_use_is_refused_and_its_holder_named(memory_path):
    arena = create(memory_path)

    for attempt in (Arena.open, create):
        with pytest.raises(ArenaBusy, match=f"process {os.getpid()}") as caught:
            attempt(memory_path)
        assert caught.value.pid == os.getpid()

    arena.close(remove=False)
    Arena.open(memory_path).close(remove=True)


def _hold(path, connection):
    arena = create(path)
    connection.send(os.getpid())
    connection.recv()
    arena.close(remove=True)


@pytest.mark.process
def test_a_killed_holder_leaves_the_lock_behind_for_nobody(memory_path):
    ours, theirs = multiprocessing.get_context("forkserver").Pipe()
    process = multiprocessing.get_context("forkserver").Process(target=_hold, args=(memory_path, theirs))
    process.start()
    pid = ours.recv()

    with pytest.raises(ArenaBusy, match=f"process {pid}"):
        Arena.open(memory_path)
    process.kill()
    process.join()

    arena = Arena.open(memory_path)
    assert arena is not None
    arena.close(remove=True)


def test_a_lock_file_that_its_last_holder_removed_locks_nothing(memory_path, monkeypatch):
    """Between the open and the flock of a second process the first one removes the file: the second must make another."""
    (memory_path / files.LOCK_NAME).touch()
    flock, calls = files.fcntl.flock, []

    def flock_late(fd, how):
        if not calls:
            (memory_path / files.LOCK_NAME).unlink()
        calls.append(fd)
        flock(fd, how)

    monkeypatch.setattr(files.fcntl, "flock", flock_late)
    arena = create(memory_path)

    assert len(calls) == 2
    with pytest.raises(ArenaBusy):
        Arena.open(memory_path)
    arena.close(remove=True)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (("f4", 1, 0, 1), "dtype"),
        (("object", 1, 0, 1), "dtype"),
        (("float32", -1, 0, 1), "length"),
        (("float32", 1, 1 << 16, 1), "slot_count"),
        (("float32", 1, 0, -1), "segment_count"),
        (("float32", 1, 0, 1, 1 << 16), "extra_count"),
    ],
)
def test_a_shape_that_no_page_can_have_is_refused(shape, message, memory_path):
    with pytest.raises(ValueError, match=rf"shapes\[0\].{message}"):
        create(memory_path, shapes=[BlockShape(*shape)])
    assert list(memory_path.iterdir()) == []


def test_extreme_shapes_have_pages_whose_arrays_do_not_overlap(memory_path):
    shapes = [
        BlockShape("float64", n, slots, k, extra)
        for n in (0, 1, 511)
        for slots in (0, 3)
        for k in (0, 1, 700)
        for extra in (0, 1)
    ]
    arena = create(memory_path, workers=70, shapes=shapes)
    for block, shape in enumerate(shapes):
        page = arena.spare(block)
        arrays = (*page.arrays, page.steps, page.sessions, page.clocks)
        for i, array in enumerate(arrays):
            array[:] = i
        arena.publish(block, page, 1)
        count = 1 + shape.slot_count + shape.extra_count
        assert [array.size for array in arrays] == [*[shape.length] * count, shape.segment_count, 70, 70]
        assert all(array.ctypes.data % 64 == 0 for array in page.arrays)
    arena = reopen(arena, memory_path)

    for block in range(len(shapes)):
        page = arena.current(block)
        for i, array in enumerate((*page.arrays, page.steps, page.sessions, page.clocks)):
            assert (array == i).all()
    arena.close(remove=True)


def test_words_are_kept(memory_path):
    arena = create(memory_path)
    assert [arena.word(name) for name in WORDS] == [0] * len(WORDS)
    for i, name in enumerate(WORDS):
        arena.set_word(name, (1 << 64) - 1 - i)
    arena = reopen(arena, memory_path)

    assert [arena.word(name) for name in WORDS] == [(1 << 64) - 1 - i for i in range(len(WORDS))]
    with pytest.raises(KeyError):
        arena.word("unheard_of")
    with pytest.raises(OverflowError):
        arena.set_word("tentative", 1 << 64)
    arena.close(remove=True)


def test_members_are_kept_to_the_last_bit(memory_path):
    arena = create(memory_path)
    largest = ((1 << 64) - 1, (1 << 56) - 1, 255)
    arena.set_member(0, *largest)
    arena.set_member(1, 5, 6, 7)
    arena.set_member(1, 5, 8, 9)
    arena = reopen(arena, memory_path)

    assert [arena.member(rank) for rank in range(3)] == [largest, (5, 8, 9), (0, 0, 0)]
    for refused in ((1 << 64, 0, 0), (0, 1 << 56, 0), (0, 0, 256), (-1, 0, 0)):
        with pytest.raises(ValueError, match="member 2"):
            arena.set_member(2, *refused)
    with pytest.raises(IndexError):
        arena.member(3)
    arena.close(remove=True)


@pytest.mark.parametrize("workers", [1, 64, 65, 200])
def test_the_last_eight_decisions_are_kept(workers, memory_path):
    arena = create(memory_path, workers=workers)
    masks = {round_: (1 << workers) - 1 - round_ % 2 for round_ in range(100)}
    for round_, mask in masks.items():
        arena.record_decision(round_, mask)
        assert [arena.decision(r) for r in range(max(0, round_ - 7), round_ + 1)] == [
            masks[r] for r in range(max(0, round_ - 7), round_ + 1)
        ]
    arena = reopen(arena, memory_path)

    assert arena.decision(99) == masks[99]
    assert arena.decision(0) is arena.decision(100) is None
    with pytest.raises(ValueError, match="mask"):
        arena.record_decision(100, 1 << workers)
    arena.close(remove=True)


def test_accumulators_are_reused_up_to_one_per_block(memory_path):
    arena = create(memory_path)
    lent = [arena.lend_accumulator(0) for _ in range(5)]
    assert all((a.size, a.dtype, a.ctypes.data % 64) == (1000, np.float32, 0) for a in lent)

    for array in lent:
        arena.return_accumulator(array)
    again = [arena.lend_accumulator(block) for block in (0, 3, 0)]

    assert sum(any(a is b for b in lent) for a in again) == 2  # blocks 0 and 3 have this shape
    arena.close(remove=True)
