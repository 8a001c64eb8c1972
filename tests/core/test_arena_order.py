"""The arena under threads, and under any order of calls."""

import os
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from arena_workload import SHAPES, WORKERS, check_places, create_published, fill, is_whole, update, versions
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from psd_core.arena import Arena, ArenaBusy, BlockShape, StoreClosed

BLOCKS = range(len(SHAPES))


def test_readers_see_whole_versions_that_never_go_back_while_threads_update(memory_path):
    updates, writers = 150, 3
    shapes = [BlockShape("float32", 2000, 1, 1)] * 6
    arena = create_published(memory_path, shapes)
    running = threading.Barrier(writers + 2)
    done = threading.Event()
    faults = []

    def write(blocks):
        running.wait()
        for version in range(2, updates + 2):
            for block in blocks:
                update(arena, block, version)

    def read():
        last = [0] * len(shapes)
        running.wait()
        while not done.is_set():
            for block in range(len(shapes)):
                page = arena.pin(block)
                if not is_whole(page, block, page.version) or page.version < last[block]:
                    faults.append((block, page.version, last[block]))
                last[block] = page.version
                arena.unpin(page)

    threads = [threading.Thread(target=write, args=([i, i + 3],)) for i in range(writers)]
    readers = [threading.Thread(target=read) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads + readers:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        done.set()
        sys.setswitchinterval(interval)
    for thread in readers:
        thread.join()

    assert faults == []
    assert [arena.current(block).version for block in range(6)] == [updates + 1] * 6
    check_places(arena)
    arena.close(remove=True)


class AnyOrder(RuleBasedStateMachine):
    """Whatever is called in whatever order: pages hold what was written, and every place is accounted for."""

    @initialize()
    def begin(self):
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.path = Path(tempfile.mkdtemp(prefix="psd-test-", dir=memory))
        self.arena = Arena.create(self.path, meta=b"", shapes=SHAPES, workers=WORKERS)
        self.published = [0] * len(SHAPES)
        self.pinned = []
        self.spares = []
        self.left_behind = []  # pages of arenas that were closed, and whether each was to be written

    @rule(block=st.sampled_from(BLOCKS), step=st.integers(1, 3))
    def update(self, block, step):
        self.published[block] += step
        update(self.arena, block, self.published[block])

    @rule(block=st.sampled_from(BLOCKS))
    def spare(self, block):
        page = self.arena.spare(block)
        fill(page, 12345)
        self.spares.append(page)

    @precondition(lambda self: self.spares)
    @rule(data=st.data())
    def discard(self, data):
        self.arena.discard(self.spares.pop(data.draw(st.integers(0, len(self.spares) - 1))))

    @rule(block=st.sampled_from(BLOCKS), count=st.integers(1, 4))
    def pin(self, block, count):
        if self.published[block]:
            self.pinned += [(self.arena.pin(block), block, self.published[block]) for _ in range(count)]

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data):
        self.arena.unpin(self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))[0])

    @rule()
    def trim(self):
        self.arena.trim()

    def close(self, *, remove):
        self.arena.close(remove=remove)
        self.left_behind += [(self.arena, page, False) for page, _, _ in self.pinned]
        self.left_behind += [(self.arena, page, True) for page in self.spares]
        self.pinned, self.spares = [], []

    @rule()
    def restart(self):
        """Only when the last page is back."""
        self.close(remove=False)
        while any(arena is self.arena for arena, _, _ in self.left_behind):
            with pytest.raises(ArenaBusy):
                Arena.open(self.path)
            self.give_back(next(i for i, held in enumerate(self.left_behind) if held[0] is self.arena))
        self.arena = Arena.open(self.path)

    @rule()
    def replace(self):
        """Whoever holds pages keeps them, and gives them back one day."""
        self.close(remove=True)
        self.arena = Arena.create(self.path, meta=b"", shapes=SHAPES, workers=WORKERS)
        self.published = [0] * len(SHAPES)

    @precondition(lambda self: self.left_behind)
    @rule(data=st.data())
    def give_back_late(self, data):
        self.give_back(data.draw(st.integers(0, len(self.left_behind) - 1)))

    def give_back(self, index):
        arena, page, is_spare = self.left_behind.pop(index)
        if not is_spare:
            arena.unpin(page)
        elif index % 2:
            arena.discard(page)
        else:
            fill(page, 54321)
            with pytest.raises(StoreClosed):
                arena.publish(page.block, page, 54321)
        arena.trim()

    @invariant()
    def every_page_is_whole(self):
        assert versions(self.arena) == self.published
        for block, version in enumerate(self.published):
            assert version == 0 or is_whole(self.arena.current(block), block, version)
        assert all(is_whole(*pinned) for pinned in self.pinned)
        addresses = [page.parameter.ctypes.data for page in (*self.spares, *{id(p): p for p, _, _ in self.pinned}.values())]
        assert len(set(addresses)) == len(addresses)

    def teardown(self):
        if not hasattr(self, "arena"):
            return
        for page, _, _ in self.pinned:
            self.arena.unpin(page)
        for page in self.spares:
            self.arena.discard(page)
        while self.left_behind:
            self.give_back(0)
        check_places(self.arena)
        self.arena.close(remove=True)
        self.path.rmdir()


AnyOrder.TestCase.settings = settings(stateful_step_count=15, deadline=None)
TestAnyOrderOfCalls = AnyOrder.TestCase
