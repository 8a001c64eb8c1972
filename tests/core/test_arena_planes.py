"""Planes: where pages' parameters lie that other processes read, and who may do what there."""

import mmap
import os

import numpy as np
import pytest
from arena_workload import WORKERS, check_places, create_published, fill, is_whole, update

import psd_core
from psd_core import _arena_blocks
from psd_core._arena import Content
from psd_core.arena import PLANES, Arena, ArenaCorrupt, BlockShape, plane_paths

SHAPES = [
    BlockShape("float32", 4096, 1, 2),
    BlockShape("float32", 4096, 1, 1),
    BlockShape("float32", 1000, 1, 1),
    BlockShape("float64", 700, 0, 1),
]
ALL = range(len(SHAPES))

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="memory is reserved and given back as on Linux")


@pytest.fixture
def planes(memory_path):
    """An arena whose blocks have version 1 in whole pages, and then the file of planes for the next ones."""
    arena = create_published(memory_path / "state", SHAPES)
    return arena, arena.begin_planes(ALL)


def reader_of(file):
    """What another process sees of the file."""
    descriptor = file.open_read_only()
    try:
        return mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(descriptor)


def seen(mapping, file, page):
    """The parameter of a page as another process sees it."""
    region = page.region
    start, nbytes = file.place(region.plane, region.block)
    return np.frombuffer(mapping[start : start + nbytes], page.parameter.dtype)


def test_blocks_that_are_updated_alike_lie_in_one_plane_one_behind_the_other(planes):
    arena, file = planes
    mapping = reader_of(file)
    for version in range(2, 7):
        for block in ALL:
            update(arena, block, version)
        pages = [arena.current(block) for block in ALL]

        assert {page.region.plane for page in pages} == {version % 2}
        for page in pages:
            assert np.array_equal(seen(mapping, file, page), page.parameter)
        start = file.place(version % 2, 0)[0]
        whole = np.frombuffer(mapping, np.float32, 9192, start)
        assert np.array_equal(whole, np.concatenate([page.parameter for page in pages[:3]]))
    check_places(arena)
    arena.close(remove=True)


def test_the_file_has_parameters_alone_and_can_only_be_read(planes):
    arena, file = planes
    for block in ALL:
        page = arena.spare(block)
        fill(page, 2)
        for array in (*page.slots, page.steps, page.sessions, page.clocks):
            array.fill(77)
        page.parameter.fill(1)
        arena.publish(block, page, 2)
    descriptor = file.open_read_only()

    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(descriptor, b"x", 0)
    held = os.pread(descriptor, 1 << 30, 0)
    assert set(held) == {0, *np.float32(1).tobytes(), *np.float64(1).tobytes()}
    assert file.path.stat().st_mode & 0o777 == 0o400

    os.close(descriptor)
    arena.close(remove=True)


def test_a_pinned_version_stays_where_it_is_and_others_go_round_it(planes):
    arena, file = planes
    mapping = reader_of(file)
    update(arena, 0, 2)
    pinned = [arena.pin(0)]
    for version in range(3, 20):
        update(arena, 0, version)
        assert is_whole(pinned[0], 0, 2)
        assert np.array_equal(seen(mapping, file, pinned[0]), pinned[0].parameter)
    assert arena.current(0).region is not None
    for version in range(20, 20 + PLANES):  # each plane has a version that somebody reads
        pinned.append(arena.pin(0))
        update(arena, 0, version)
    assert arena.current(0).region is None
    assert is_whole(arena.current(0), 0, 19 + PLANES)

    for page in pinned:
        arena.unpin(page)
    update(arena, 0, 24)
    assert arena.current(0).region.plane == 0
    check_places(arena)
    arena.close(remove=True)


def test_a_version_alike_needs_no_room_of_its_own(planes):
    arena, _ = planes
    for block in ALL:
        update(arena, block, 2)
    before = arena.used_bytes
    for block in ALL:
        update(arena, block, 3, body=2)
        update(arena, block, 4, body=2)
        page = arena.current(block)
        assert is_whole(page, block, 4, body=2)
        assert page.base.region.plane == 0
    assert arena.used_bytes < before + 200_000
    arena.close(remove=False)

    again = Arena.open(arena.path.parent)
    assert all(is_whole(again.current(block), block, 4, body=2) for block in ALL)
    check_places(again)
    again.close(remove=True)


def test_the_next_process_writes_to_a_file_of_its_own_until_the_first_one_is_needed_no_more(planes):
    arena, file = planes
    mapping = reader_of(file)
    for version in (2, 3):
        for block in ALL:
            update(arena, block, version)
    arena.close(remove=False)
    shown = mapping[:]

    again = Arena.open(arena.path.parent)
    assert all(is_whole(again.current(block), block, 3) for block in ALL)
    own = again.begin_planes(ALL)
    assert own.path != file.path
    for version in (4, 5, 6):
        for block in list(ALL)[:-1]:
            update(again, block, version)
        assert mapping[:] == shown
    assert plane_paths(own.path.parent) == sorted([file.path, own.path])
    update(again, 3, 4)

    assert plane_paths(own.path.parent) == [own.path]
    assert mapping[:] == shown
    check_places(again)
    again.close(remove=True)
    assert not own.path.parent.exists()


def test_memory_goes_back_when_nobody_maps_the_planes_any_more(planes):
    arena, file = planes
    arena.begin_planes(ALL)
    for version in range(2, 5):
        for block in ALL:
            update(arena, block, version)
    assert arena.spare_bytes >= 30_000
    arena.end_planes()
    update(arena, 0, 5)
    assert arena.current(0).region is not None
    arena.end_planes()

    for block in ALL:
        update(arena, block, 6)
        assert arena.current(block).region is None
        assert is_whole(arena.current(block), block, 6)
    assert arena._blocks.planes.backed_bytes == arena._blocks.planes.idle_bytes == 0
    assert file.path.stat().st_blocks * 512 <= 4096 * 2 * len(SHAPES)  # the ends of what does not fill pages
    check_places(arena)
    arena.begin_planes(ALL)
    for version in (7, 8):
        for block in ALL:
            update(arena, block, version)
            assert is_whole(arena.current(block), block, version)
    check_places(arena)
    arena.close(remove=True)


def test_room_that_was_needed_once_goes_back_while_updates_go_on(planes):
    arena, _ = planes
    update(arena, 0, 2)
    pinned = arena.pin(0)
    for version in (3, 4, 5):
        update(arena, 0, version)
    arena.unpin(pinned)
    grown = arena._blocks.planes.backed_bytes
    for version in range(6, 200):
        update(arena, 0, version)

    assert arena._blocks.planes.backed_bytes == 2 * 4 * 4096 < grown
    check_places(arena)
    arena.close(remove=True)


def test_an_update_that_is_given_up_gives_its_room_back(planes):
    arena, _ = planes
    update(arena, 0, 2)
    for _ in range(3 * PLANES):
        page = arena.spare(0)
        assert page.region is not None
        arena.discard(page)
    check_places(arena)
    arena.close(remove=True)


@pytest.mark.parametrize("block", [0, 3])
def test_a_changed_byte_of_a_parameter_is_seen_when_the_arena_is_opened(planes, block):
    arena, file = planes
    for each in ALL:
        update(arena, each, 2)
    start, nbytes = file.place(0, block)
    arena.close(remove=False)
    file.path.chmod(0o600)
    for at in (start, start + nbytes // 2, start + nbytes - 1):
        with file.path.open("r+b") as opened:
            opened.seek(at)
            (before,) = opened.read(1)
            opened.seek(at)
            opened.write(bytes([before ^ 1]))
            opened.flush()
            with pytest.raises(ArenaCorrupt, match=f"page of block {block} .* parameters and slots do not have the checksum"):
                Arena.open(arena.path.parent)
            opened.seek(at)
            opened.write(bytes([before]))
    Arena.open(arena.path.parent).close(remove=True)


def test_small_jobs_are_written_by_way_of_the_caches(planes):
    arena, _ = planes
    page = arena.spare(0)

    assert page.sums is None
    arena.discard(page)
    arena.close(remove=True)


@pytest.mark.parametrize("lies_in_planes", [False, True])
def test_parameters_of_large_jobs_have_their_checksums_made_as_they_are_written(memory_path, monkeypatch, lies_in_planes):
    """By step_block; of a block that is written by others, they are made when it is published."""
    monkeypatch.setattr(_arena_blocks, "STREAMED_BYTES", 1)
    monkeypatch.setattr(_arena_blocks, "STREAMED_BLOCK_BYTES", 1)
    arena = create_published(memory_path / "state", SHAPES)
    if lies_in_planes:
        arena.begin_planes(ALL)
    for version in range(2, 5):
        for block in ALL:
            before, page = arena.current(block), arena.spare(block)
            fill(page, version)
            assert (page.sums is not None, page.region is not None) == (True, lies_in_planes)
            if block != 1:
                one, steps = np.ones(1, np.uint8), np.zeros(1, np.uint64)
                ends, scalars = np.array([len(page.parameter)], np.uint32), [0.5, 0, 0, 0]
                how = {"weight": 1, "scale": 1, "touched": one, "steps_in": steps, "steps_out": steps.copy(), "flags": ()}
                psd_core.step_block(
                    "sgd", before.parameter, page.parameter, [], [], None, before.parameter,
                    segment_ends=ends, scalars=scalars, sums=page.sums, **how,
                )  # fmt: skip
                assert Content(page.sums).nbytes == page.parameter.nbytes // 8192 * 8192
            arena.publish(block, page, version)
    expected = [arena.current(block).parameter.tobytes() for block in ALL]
    arena.close(remove=False)

    arena = Arena.open(arena.path.parent)  # reads and checks every byte

    assert [arena.current(block).parameter.tobytes() for block in ALL] == expected
    arena.close(remove=True)


def test_a_file_that_is_missing_or_cut_off_is_named(planes):
    arena, file = planes
    update(arena, 0, 2)
    arena.close(remove=False)
    file.path.chmod(0o600)
    whole = file.path.read_bytes()

    os.truncate(file.path, 4096)
    with pytest.raises(ArenaCorrupt, match=r"page of block 0 .*planes-1: has 4096 bytes, expected"):
        Arena.open(arena.path.parent)
    file.path.unlink()
    with pytest.raises(ArenaCorrupt, match=r"page of block 0 .*planes-1: is missing"):
        Arena.open(arena.path.parent)
    file.path.write_bytes(whole)
    Arena.open(arena.path.parent).close(remove=True)


def test_files_in_which_nothing_lies_are_removed(memory_path):
    arena = create_published(memory_path, SHAPES)
    arena.begin_planes(ALL)
    arena.close(remove=False)
    assert len(plane_paths(memory_path)) == 1

    again = Arena.open(memory_path)
    assert plane_paths(memory_path) == []
    again.begin_planes(ALL)
    again.close(remove=False)
    made = Arena.create(memory_path, meta=b"", shapes=SHAPES, workers=WORKERS, replace=True)
    assert plane_paths(memory_path) == []
    made.close(remove=True)


def test_a_closed_arena_keeps_what_is_held_and_takes_it_back(planes):
    arena, file = planes
    mapping = reader_of(file)
    update(arena, 0, 2)
    page = arena.pin(0)
    arena.close(remove=True)

    assert not file.path.exists()
    assert is_whole(page, 0, 2)
    assert np.array_equal(seen(mapping, file, page), page.parameter)
    arena.unpin(page)
    arena.end_planes()


def test_memory_of_one_block_goes_back_beside_others_in_the_same_large_pages(memory_path):
    """Whose numbers stay, whether they are current or pinned."""
    shapes = [BlockShape("float32", 700_000, 0, 1)] * 4
    arena = create_published(memory_path, shapes)
    file = arena.begin_planes(range(4))
    mapping = reader_of(file)
    for version in (2, 3):
        for block in range(4):
            update(arena, block, version)
    pinned = arena.pin(1)
    before = file.path.stat().st_blocks * 512
    arena.end_planes()
    for block in (0, 1, 3):
        update(arena, block, 4)

    assert is_whole(pinned, 1, 3)
    assert is_whole(arena.current(2), 2, 3)
    for page in (pinned, arena.current(2)):
        assert np.array_equal(seen(mapping, file, page), page.parameter)
    assert file.path.stat().st_blocks * 512 < before - 5 * 4 * 700_000
    arena.unpin(pinned)
    check_places(arena)
    arena.close(remove=True)
