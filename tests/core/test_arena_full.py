"""No space for a page: an error that changes nothing, and never a signal."""

import errno
import itertools
import os
import subprocess
import sys

import pytest
from arena_workload import SHAPES, check_places, create_published, is_whole, snapshot_bytes, update, versions

from psd_core import _store_file as files
from psd_core.arena import Arena, ArenaError, StoreFull

BLOCKS = range(len(SHAPES))


def take_until_full(arena, taken):
    while True:
        taken.append(arena.spare(2))


def update_pinning_everything(arena, pinned):
    for version in itertools.count(2):
        for block in BLOCKS:
            pinned.append(arena.pin(block))
            update(arena, block, version)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the space is taken otherwise")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_for_a_page_is_an_error_that_changes_nothing(code, memory_path, monkeypatch):
    arena = create_published(memory_path)
    pinned = [arena.pin(block) for block in BLOCKS]
    before = [snapshot_bytes(page) for page in pinned]

    def full(*_):
        raise OSError(code, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "posix_fallocate", full)
        taken = []
        with pytest.raises(StoreFull, match=r"no space for .* bytes") as caught:
            take_until_full(arena, taken)
        assert isinstance(caught.value, OSError)
        assert isinstance(caught.value, ArenaError)
        assert caught.value.errno == errno.ENOSPC
        for page in taken:
            arena.discard(page)
        check_places(arena)
        assert [snapshot_bytes(page) for page in pinned] == before
    for page in pinned:
        arena.unpin(page)
    for block in BLOCKS:
        update(arena, block, 2)

    assert versions(arena) == [2] * len(SHAPES)
    arena.close(remove=True)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the space is taken otherwise")
def test_no_space_for_an_arena_leaves_nothing(memory_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(files.os, "posix_fallocate", full)

    with pytest.raises(StoreFull):
        create_published(memory_path / "state")
    assert not (memory_path / "state").exists()


def test_no_room_for_another_extent_is_an_error(memory_path):
    arena = create_published(memory_path)
    arena._blocks.pool._record_count = arena._front.extents_max

    with pytest.raises(StoreFull, match="no room for more"):
        take_until_full(arena, [])
    arena.close(remove=True)


@pytest.fixture
def small_file_system(tmp_path):
    """A tmpfs of two megabytes, where this process may mount one."""
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or sys.platform != "linux" or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no permission to mount a tmpfs")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@pytest.mark.process
def test_a_full_memory_file_system_gives_an_error_and_no_signal(small_file_system):
    arena = create_published(small_file_system / "state")
    pinned = []
    with pytest.raises(StoreFull):
        update_pinning_everything(arena, pinned)
    assert len(pinned) > 50
    seen = versions(arena)
    assert all(is_whole(arena.current(block), block, seen[block]) for block in BLOCKS)

    for page in pinned:
        arena.unpin(page)
    for block in BLOCKS:
        update(arena, block, seen[0] + 2)
    arena.close(remove=False)
    arena = Arena.open(small_file_system / "state")

    assert versions(arena) == [seen[0] + 2] * len(SHAPES)
    arena.close(remove=True)
