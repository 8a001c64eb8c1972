"""A full --state-dir under real shards and workers: what a program is told, and that the same call succeeds later."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from full_disk import full_disk

import psd_client
from psd.checkpoint import CheckpointDirectory

VALUES = {"w": np.arange(6, dtype=np.float32), "b": np.ones(3, np.float32)}


@pytest.fixture(autouse=True)
def _no_defect(caplog: pytest.LogCaptureFixture) -> Any:
    """A full disk is none: no shard has written a traceback."""
    yield
    assert [record.message for record in caplog.records if record.exc_info] == []


def declare(ps: psd_client.ParameterServer, **declaration: Any) -> dict[str, Any]:
    """Two blocks, and so one for each of two shards."""
    groups = [{"params": [name]} for name in VALUES]
    return ps.declare(VALUES, psd_client.SGD(lr=0.5, momentum=0.9), groups=groups, **declaration)


def test_a_barrier_on_a_full_disk_is_refused_by_name_and_passed_when_it_is_called_again(
    cluster: Callable[..., Any], tmp_path: Path
) -> None:
    """The other worker waits meanwhile."""
    running = cluster(1, state_dir=str(tmp_path / "state"), lease_s=60)
    core = running.shards[0].shard._core

    def other() -> None:
        with psd_client.connect(running.servers, 1, 2, wait_timeout=60) as ps:
            declare(ps)
            ps.push_pull(VALUES)
            ps.barrier("b")

    with ThreadPoolExecutor(1) as pool, psd_client.connect(running.servers, 0, 2, wait_timeout=60) as ps:
        job = pool.submit(other)
        declare(ps)
        ps.push_pull(VALUES)
        while not any(ticket.name == "b" for ticket in core.waiting.open(1)):
            ps.pull()
        with full_disk():
            for _ in range(2):
                with pytest.raises(psd_client.OutOfSpace, match=f"{tmp_path / 'state'} has no room"):
                    ps.barrier("b")
        ps.barrier("b")
        job.result(100)


def test_a_worker_that_ends_on_a_full_disk_has_ended_and_the_others_are_told_what_they_cannot_have(
    cluster: Callable[..., Any], tmp_path: Path
) -> None:
    """Its leaving completes a barrier that cannot be noted."""
    running = cluster(1, state_dir=str(tmp_path / "state"), lease_s=60)
    core = running.shards[0].shard._core

    with ThreadPoolExecutor(1) as pool, psd_client.connect(running.servers, 0, 2, wait_timeout=60) as ps:
        with psd_client.connect(running.servers, 1, 2, wait_timeout=60) as leaving:
            declaring = pool.submit(declare, ps)
            declare(leaving)
            declaring.result(100)
            job = pool.submit(ps.barrier, "b")
            while not core.waiting.open(0):
                leaving.pull()
            with full_disk():
                leaving.close()
                with pytest.raises(psd_client.OutOfSpace, match=f"{tmp_path / 'state'} has no room"):
                    job.result(100)
        ps.barrier("b")


@pytest.mark.parametrize("shards", [1, 2])
def test_a_job_is_declared_again_when_there_is_room(cluster: Callable[..., Any], tmp_path: Path, shards: int) -> None:
    """Also when another shard has it already."""
    running = cluster(shards, lease_s=60)
    storage = running.shards[-1].shard._core.storage

    def full(step: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), step)

    with psd_client.connect(running.servers, 0, 1, wait_timeout=60) as ps:
        usual, storage._crash_point = storage._crash_point, full
        with pytest.raises(psd_client.OutOfSpace, match=f"{storage.directory} has no room for this job's parameters"):
            declare(ps)
        storage._crash_point = usual
        declare(ps)
        params = ps.push_pull(VALUES)

    for name, value in VALUES.items():
        np.testing.assert_array_equal(params[name], value - 0.5 * value)


def test_a_job_that_cannot_go_back_for_lack_of_room_goes_back_when_there_is_some(
    cluster: Callable[..., Any], tmp_path: Path
) -> None:
    """A shard has lost its state while the other one's disk is full: the program hears of both, and goes on."""
    url = str(tmp_path / "checkpoints")
    settings: dict[str, Any] = {"checkpoint_dir": url, "checkpoint_steps": 5, "lease_s": 60}
    running = cluster(2, **settings)
    storage = running.shards[0].shard._core.storage

    def full(step: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), step)

    with psd_client.connect(running.servers, 0, 1, wait_timeout=60) as ps:
        params = declare(ps)
        while ps.clock % 5 != 3 or CheckpointDirectory(url).newest() is None:
            params = ps.push_pull(params)
        running.shards[1].stop()
        cluster(2, only=1, listen=running.shards[1].address, **settings)
        usual, storage._crash_point = storage._crash_point, full
        with pytest.raises(psd_client.OutOfSpace, match=f"{storage.directory} has no room for this job's parameters"):
            ps.push_pull(params)
        storage._crash_point = usual
        with pytest.raises(psd_client.RolledBack):
            ps.push_pull(params)
        clock = ps.clock
        assert clock % 5 == 0
        params = ps.push_pull(ps.pull())

        assert ps.clock == clock + 1


def test_another_kind_of_job_goes_on_from_a_checkpoint_when_there_is_room(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """Declared otherwise than it was stored, which makes another arena: the same declaration is made again."""
    settings: dict[str, Any] = {"checkpoint_dir": str(tmp_path / "checkpoints"), "lease_s": 60}
    first = cluster(1, **settings).shards[0]
    with psd_client.connect(first.address, 0, 1, wait_timeout=60) as ps:
        stored = declare(ps, consistency="sync")
        for _ in range(3):
            stored = ps.push_pull(stored)
    assert first.done.wait(100)
    first.drain(5)
    running = cluster(1, **settings)
    storage = running.shards[0].shard._core.storage

    def full(step: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), step)

    with psd_client.connect(running.servers, 0, 1, wait_timeout=60) as ps:
        usual, storage._crash_point = storage._crash_point, full
        with pytest.raises(psd_client.OutOfSpace, match=f"{storage.directory} has no room for this job's parameters"):
            declare(ps, consistency="async")
        storage._crash_point = usual
        params = declare(ps, consistency="async")

        assert ps.clock == 3
    for name, values in stored.items():
        np.testing.assert_array_equal(params[name], values)
