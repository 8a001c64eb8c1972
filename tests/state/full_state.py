"""What the tests of a full --state-dir share: what the disk holds, what is said, and a shard whose arena is full."""

from __future__ import annotations

import shutil

import pytest
from shard_driver import Driver

from psd_core.arena import StoreFull

NO_ROOM = "has no room for the shard's notes: File too large"


def durable(driver):
    """What outlives the process."""
    core = driver.core
    if core.job is None:
        return None
    coordinator = core.job.coordinator
    pages = [core.job.arena.current(slot) for slot in range(len(core.job.blocks))]
    return (
        [(p.version, p.parameter.tobytes(), p.steps.tobytes(), p.sessions.tobytes(), p.clocks.tobytes()) for p in pages if p],
        [(w.state, w.session, w.clock) for w in core.members.workers],
        (core.run_id, core.timeline, core.restored_from, core.life.has_values),
        core.barriers._opened,
        None if coordinator is None else (coordinator._verdict, coordinator.latest()),
    )


def assert_disk_agrees(driver, tmp_path):
    """What a process finds that is started with what is on the disk now is what this one holds."""
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    if (tmp_path / "state").exists():
        shutil.copytree(tmp_path / "state", copy)
    assert not list(copy.glob("*.new")), "nothing half-written takes the room that there is"
    twin = Driver(driver.spec, shard=driver.config.shard_index, shards=driver.config.shard_count, state_dir=str(copy))
    assert durable(twin) == durable(driver)


class Hoarder:
    """Holds all pages of a shard that could be written to."""

    def __init__(self, driver):
        self._arena = driver.core.job.arena
        self._pages = []
        with pytest.raises(StoreFull):
            while True:
                self._pages.append(self._arena.spare(0))

    def give_back(self):
        while self._pages:
            self._arena.discard(self._pages.pop())
