"""Versions that are kept for readers: which ones, for how long, and that each is let go once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import psd_client
from psd.state import kept_versions
from psd.state.kept_versions import KeptVersions
from psd_core.arena import StoreFull

N = 10_000


def values_of(number: int) -> np.ndarray:
    values = np.arange(N, dtype=np.float32)
    values[7] = number
    return values


class Kept:
    """Kept versions of one block; version v has the content v."""

    def __init__(self, versions_max: int) -> None:
        self.versions = KeptVersions(versions_max)
        self.released: list[int] = []

    def keep(self, number: int) -> None:
        self.versions.keep(0, number, values_of(number), lambda: self.released.append(number))

    def is_kept(self, number: int) -> bool:
        return self.versions.told(0, number, 99, values_of(99), "") is not None


def test_the_version_that_was_asked_for_longest_ago_goes() -> None:
    """And a page that is kept already is given back."""
    kept = Kept(2)
    for number in (1, 2, 1, 3):
        kept.keep(number)
    assert kept.released == [1, 2]  # the second page of version 1, and version 2
    assert [kept.is_kept(number) for number in (1, 2, 3)] == [True, False, True]


def test_none_are_kept_if_none_are_wanted() -> None:
    """Every page is given back at once."""
    kept = Kept(0)
    kept.keep(1)
    assert (kept.released, kept.is_kept(1)) == ([1], False)


def test_all_are_let_go_and_none_are_kept_of_a_job_that_is_over() -> None:
    """So nothing keeps its arena from being closed."""
    kept = Kept(2)
    assert not kept.versions.forget()
    kept.keep(1)
    assert kept.versions.forget()
    kept.keep(2)
    assert kept.versions.forget(for_ever=True)
    kept.keep(3)
    assert kept.released == [1, 2, 3]


def test_a_version_that_is_read_is_let_go_when_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an update could write there meanwhile."""
    kept = Kept(1)
    kept.keep(1)
    encode = kept_versions.deltas.encode
    seen: list[list[int]] = []

    def encoded(*arguments: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(kept.keep, 2).result(100)
        seen.append(list(kept.released))
        return encode(*arguments)

    monkeypatch.setattr(kept_versions.deltas, "encode", encoded)
    assert kept.versions.told(0, 1, 99, values_of(99), "") is not None
    assert seen[0] == []
    assert kept.released.count(1) == 1


def test_an_update_that_finds_no_room_takes_that_of_kept_versions(
    cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The put succeeds, and the reader gets all of it."""
    running = cluster(1)
    values = np.zeros(300_000, np.float32)
    with (
        psd_client.publish(running.servers) as store,
        psd_client.connect(running.servers, role="reader", transport="tcp", wait_timeout=60) as reader,
    ):
        for step in range(3):
            store.put({"w": values + step})
            reader.pull(newer_than=step)
        job = running.shards[0].shard._core.declared()
        assert job.arena.held_bytes > 0
        spare = job.arena.spare

        def full(slot: int) -> Any:
            if job.arena.held_bytes > 0:
                raise StoreFull("the disk is full")
            return spare(slot)

        monkeypatch.setattr(job.arena, "spare", full)
        assert store.put({"w": values + 3}) == 4
        assert reader.pull()["w"][0] == 3
