"""Pages of an arena: snapshots, growth, giving memory back."""

import itertools

import numpy as np
import pytest
from arena_workload import SHAPES, check_places, create_published, fill, is_whole, snapshot_bytes, update, versions

from psd_core import _store_file as files
from psd_core._arena_pages import SPARE_PAGES_KEPT
from psd_core.arena import Arena, BlockShape

BLOCKS = range(len(SHAPES))


def disk_bytes(path):
    return (path / files.ARENA_NAME).stat().st_blocks * 512


def test_a_pinned_page_stays_as_it_was_while_updates_go_on(memory_path):
    arena = create_published(memory_path)
    pinned = [arena.pin(block) for block in BLOCKS]
    before = [snapshot_bytes(page) for page in pinned]

    for version in range(2, 40):
        for block in BLOCKS:
            update(arena, block, version)

    assert [snapshot_bytes(page) for page in pinned] == before
    assert versions(arena) == [39] * len(SHAPES)
    for page in pinned:
        arena.unpin(page)
    check_places(arena)
    arena.close(remove=True)


def test_a_page_goes_back_with_its_last_pin_only(memory_path):
    arena = create_published(memory_path)
    first, second = arena.pin(0), arena.pin(0)
    assert first is second is arena.current(0)
    assert first.pins == 3

    update(arena, 0, 2)
    arena.unpin(first)
    assert first.pins == 1
    assert is_whole(first, 0, 1)
    arena.unpin(second)

    check_places(arena)
    arena.close(remove=True)


def test_a_freed_page_is_the_next_spare(memory_path):
    """It is still in the processor's cache."""
    arena = create_published(memory_path)
    freed = arena.current(0)
    update(arena, 0, 2)

    assert arena.spare(0).parameter.ctypes.data == freed.parameter.ctypes.data
    arena.close(remove=True)


def test_pages_that_are_given_back_twice_or_to_the_wrong_block_are_refused(memory_path):
    arena = create_published(memory_path)
    current, spare, discarded = arena.pin(0), arena.spare(0), arena.spare(0)
    arena.unpin(current)
    arena.discard(discarded)

    for call in (
        lambda: arena.discard(discarded),
        lambda: arena.discard(current),
        lambda: arena.publish(0, current, 2),
        lambda: arena.publish(3, spare, 2),
        lambda: arena.unpin(spare),
        lambda: arena.publish(0, discarded, 2),
    ):
        with pytest.raises(AssertionError):
            call()

    arena.discard(spare)
    check_places(arena)
    assert is_whole(arena.current(0), 0, 1)
    arena.close(remove=True)


def test_a_snapshot_makes_the_file_grow_by_steps_and_trim_gives_it_back(memory_path):
    shapes = [BlockShape("float32", 4000, 1, 1)] * 64
    arena = create_published(memory_path, shapes)
    start_file, start_used = arena.file_bytes, arena.used_bytes
    extents = lambda: sum(arena._blocks.extents.load(i) != 0 for i in range(arena._blocks.extents.count))  # noqa: E731
    assert extents() == 1

    pinned = [arena.pin(block) for block in range(64)]
    for version, block in itertools.product((2, 3), range(64)):
        update(arena, block, version)
    assert arena.file_bytes > start_file
    assert arena.used_bytes >= start_used + 56 * max(arena._front.page_sizes)
    assert extents() <= 9
    for page in pinned:
        arena.unpin(page)
    grown = arena.used_bytes
    arena.trim()

    assert arena.spare_bytes == SPARE_PAGES_KEPT * max(arena._front.page_sizes)
    assert arena.used_bytes <= start_used + 2 * max(arena._front.page_sizes) < grown
    assert disk_bytes(memory_path) <= arena.used_bytes + 65536
    check_places(arena)
    arena.close(remove=True)


def test_what_a_snapshot_took_goes_back_by_itself_while_updates_go_on(memory_path):
    shapes = [BlockShape("float32", 4000, 1, 1)] * 64
    arena = create_published(memory_path, shapes)
    pinned = [arena.pin(block) for block in range(64)]
    for block in range(64):
        update(arena, block, 2)
    for page in pinned:
        arena.unpin(page)
    grown = arena.used_bytes

    for version, block in itertools.product((3, 4, 5, 6), range(64)):
        update(arena, block, version)

    assert arena.spare_bytes <= (SPARE_PAGES_KEPT + 1) * max(arena._front.page_sizes)
    assert arena.used_bytes < grown - 45 * max(arena._front.page_sizes)
    check_places(arena)
    arena.close(remove=True)


def test_a_version_with_the_values_of_the_one_before_takes_no_more_room_than_its_head(memory_path):
    """However many of them follow each other, and whoever still reads one."""
    arena = create_published(memory_path, [BlockShape("float32", 100_000, 2, 3)])
    update(arena, 0, 2, body=1)
    pinned, used = arena.pin(0), arena.used_bytes
    parameter = arena.current(0).parameter

    for version in range(3, 40):
        update(arena, 0, version, body=1)

    assert arena.current(0).parameter is parameter
    assert is_whole(arena.current(0), 0, 39, body=1)
    assert is_whole(pinned, 0, 2, body=1)
    assert arena.used_bytes - used <= 65536 < 1_200_000 < arena.used_bytes
    arena.unpin(pinned)
    check_places(arena)
    update(arena, 0, 40)
    assert is_whole(arena.current(0), 0, 40)
    check_places(arena)
    arena.close(remove=True)


def test_a_body_stays_as_long_as_somebody_reads_a_version_that_has_it(memory_path):
    arena = create_published(memory_path)
    update(arena, 0, 2, body=1)
    pinned = arena.pin(0)

    for version in range(3, 30):
        update(arena, 0, version)

    assert is_whole(pinned, 0, 2, body=1)
    arena.unpin(pinned)
    check_places(arena)
    arena.close(remove=True)


def test_a_spare_with_the_present_body_that_is_discarded_leaves_nothing(memory_path):
    arena = create_published(memory_path)
    for block in BLOCKS:
        arena.discard(arena.spare_alike(block))
        update(arena, block, 2)

    assert versions(arena) == [2] * len(SHAPES)
    check_places(arena)
    arena.close(remove=True)


def test_an_arena_that_is_opened_again_goes_on_from_versions_without_a_body(memory_path):
    arena = create_published(memory_path)
    for version, block in itertools.product((2, 3), BLOCKS):
        update(arena, block, version, body=1)
    arena.close(remove=False)

    arena = Arena.open(memory_path)

    assert all(is_whole(arena.current(block), block, 3, body=1) for block in BLOCKS)
    check_places(arena)
    for block in BLOCKS:
        update(arena, block, 4, body=1)
        update(arena, block, 5)
    assert all(is_whole(arena.current(block), block, 5) for block in BLOCKS)
    check_places(arena)
    arena.close(remove=True)


def test_steady_updates_make_no_system_calls_however_many_are_in_hand(memory_path, monkeypatch):
    shapes = [BlockShape("float32", 100, 0, 1)] * 40
    arena = create_published(memory_path, shapes)

    def burst(version):
        spares = [arena.spare(block) for block in range(40)]
        for block, page in enumerate(spares):
            fill(page, version)
            arena.publish(block, page, version)

    for version in range(2, 6):
        burst(version)
    calls = []
    for owner, name in (
        *((files.File, name) for name in ("reserve", "release", "extend", "map_shared")),
        (files, "populate"),
    ):
        monkeypatch.setattr(owner, name, lambda *_, name=name: calls.append(name))
    for version in range(6, 30):
        burst(version)

    assert calls == []
    arena.close(remove=True)


def test_holes_are_reserved_again_before_they_are_lent(memory_path):
    arena = create_published(memory_path)
    arena.close(remove=False)
    arena = Arena.open(memory_path)
    assert arena.spare_bytes == 0
    used = arena.used_bytes

    page = arena.spare(2)

    assert arena.used_bytes == used + page.place.kind.size
    arena.discard(page)
    assert arena.spare_bytes == page.place.kind.size
    check_places(arena)
    arena.close(remove=True)


def test_a_file_system_without_holes_keeps_its_surplus(memory_path, monkeypatch):
    monkeypatch.setattr(files.File, "release", lambda *_: False)
    arena = create_published(memory_path)
    for page in [arena.spare(2) for _ in range(20)]:
        arena.discard(page)
    spare_bytes = arena.spare_bytes

    arena.trim()
    arena.trim()

    assert arena.spare_bytes == spare_bytes
    check_places(arena)
    arena.close(remove=True)


def test_an_update_costs_no_copy(memory_path):
    """A spare's arrays are the mapping itself, and the same objects whenever its place is lent to a block of that shape."""
    arena = create_published(memory_path)
    page = arena.spare(0)
    arena.discard(page)
    again = arena.spare(3)  # of the same shape

    assert again.parameter is page.parameter
    assert again is not page
    assert isinstance(again.parameter, np.ndarray)
    assert not again.parameter.flags.owndata
    arena.close(remove=True)
