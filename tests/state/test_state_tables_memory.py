"""A push of rows for several tables that finds no memory in the middle, or whose rule fails there: it counts in all or none."""

from __future__ import annotations

import contextlib
import gc
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from shard_driver import Driver, tables_spec

from psd.contract.config import Limits
from psd.contract.errors import OutOfSpace
from psd_core.arena import StoreFull

WIDE, MANY = 4096, 3000


@contextlib.contextmanager
def little_memory(nbytes: int) -> Iterator[None]:
    """This process cannot have more memory than so many bytes beside what it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_rows_whose_sum_finds_no_memory_in_one_table_are_in_the_sum_of_none():
    """The worker sends them again, and a gradient that was in the first table's sum already would count twice there."""
    spec = tables_spec(3, reduction="sum")
    driver = Driver(replace(spec, tables=(spec.tables[0], replace(spec.tables[1], dim=WIDE))))
    a, b, c = driver.start()
    rows = np.ones((MANY, WIDE), np.float32)
    driver.push_rows(a, 0, {0: ([1], 1.0), 1: ([1], 1.0)})
    push = driver.begin_push(b, 0)
    gradients = {0: driver.table_rows(0, [1], [2.0]), 1: driver.table_rows(1, range(MANY), rows)}
    tables = driver.core.job.tables

    checks = tables.checks.gradients
    tables.checks.gradients = lambda *_: gradients
    gc.collect()
    with little_memory(8 << 20), pytest.raises(MemoryError):
        driver.push_tables(push, {0: ([1], [2.0])})
    assert driver.push_tables(push, {0: ([1], [2.0])}) is None
    driver.shard.exchange.end_push(push)
    tables.checks.gradients = checks
    driver.push_rows(c, 0, {0: ([1], 4.0)})

    assert driver.rows(0, [1]) == [-7.0]
    assert driver.rows(1, [1, 2]) == [-2.0, -1.0]


@pytest.mark.parametrize("error", [StoreFull("no space"), MemoryError("no memory")])
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("place", ["hold", "push"])
def test_an_update_that_finds_no_room_in_one_table_changes_none(mode, error, place, monkeypatch):
    """Room in the file is asked for in all tables first, so that no row has gone to make room for others."""
    driver = Driver(tables_spec(1, mode=mode, table={"max_rows": 4}), limits=Limits(push_ids_max=8))
    (seat,) = driver.start()
    driver.push_rows(seat, 0, {0: ([1, 2, 3, 4], 1.0), 1: ([1], 1.0)})
    stores = [partition.store for partition in driver.core.job.tables.partitions]
    before = [store.counters() for store in stores]

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as context:
        context.setattr(stores[1], place, fail)
        with pytest.raises(OutOfSpace):
            driver.push_rows(seat, 1, {0: ([1, 5], 2.0), 1: ([1], 2.0)})
    now = [store.counters() for store in stores]

    kept = ("step", "version", "rows", "evicted") if place == "hold" else ("step",)
    assert [[each[name] for name in kept] for each in now] == [[each[name] for name in kept] for each in before]
    assert driver.rows(0, [1]) == driver.rows(1, [1]) == [-1.0]
    driver.push_rows(seat, 1, {0: ([1, 5], 2.0), 1: ([1], 2.0)})
    assert driver.rows(0, [1, 5]) == [-3.0, -2.0]
    assert driver.rows(1, [1]) == [-3.0]
