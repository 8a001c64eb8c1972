"""Steps of a worker whose job has tables: taken in C, and with the results of pushes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
from client_faults import Thread, in_threads, until
from short_ways import Watch

from psd.contract.errors import NonFiniteGradient
from psd.rim.steps import OfferedSteps
from psd_client import SGD, Adagrad, Adam, Table, connect
from psd_client.worker.exchange.row_traffic import RowTraffic

TABLE = Table("t", 2, SGD(lr=1.0))
TABLES = [Table("a", 5, SGD(lr=0.5, momentum=0.9)), Table("b", 4, Adagrad(lr=0.1)), Table("c", 3, Adam(lr=0.01))]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps each stay in C has answered."""
    found: list[int] = []
    take = OfferedSteps.take

    def taken(steps: OfferedSteps) -> None:
        loop = steps.loop
        try:
            take(steps)
        finally:
            if loop is not None:
                found.append(loop.done)

    monkeypatch.setattr(OfferedSteps, "take", taken)
    return found


def train(server: Any, transport: str, consistency: str, values: dict[str, Any]) -> tuple[list[Any], Any]:
    """What a job of 40 steps has pulled, and what the worker has counted."""
    choice, found = np.random.default_rng(5), []
    with connect(server, 0, 1, transport=transport) as ps:
        ps.declare(values, SGD(lr=0.5), consistency=consistency, tables=TABLES)
        ids = {table.name: np.arange(40) for table in TABLES}
        for step in range(40):
            following = {table.name: choice.integers(0, 40 if step != 30 else 45, 50) for table in TABLES}
            rows = {name: ps.tables[name].pull(each) for name, each in ids.items()}
            found += list(rows.values())
            pushed = [name for name in rows if step % 7 or name != "b"]
            for name, each in following.items():
                ps.tables[name].prefetch(each)
            grads = {name: (ids[name], choice.normal(size=rows[name].shape).astype(np.float32)) for name in pushed}
            dense = {name: np.full_like(value, step) for name, value in values.items()}
            found.append(ps.push_pull(dense, tables=grads))
            ids = following
        found += [ps.tables[table.name].pull(np.arange(50)) for table in TABLES]
        return found, {name: count for name, count in ps.stats().items() if "wait" not in name}


@pytest.mark.parametrize("values", [{}, {"w": np.zeros(7, np.float32)}], ids=["tables alone", "with parameters"])
@pytest.mark.parametrize("consistency", ["sync", "async", "ssp:1"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_steps_with_rows_are_pushes(
    cluster: Callable[..., Any], taken: list[int], transport: str, consistency: str, values: dict[str, Any]
) -> None:
    found, counts = train(cluster(1).servers, transport, consistency, values)
    assert sum(taken) > 20
    del taken[:]

    expected, expected_counts = train(cluster(1, never_armed=True).servers, transport, consistency, values)
    assert not taken
    assert counts == expected_counts
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_equal(one, other)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("consistency", "shards"), [("async", 2), ("sync", 2), ("ssp:3", 1)])
def test_rows_of_two_workers_hold_the_sum_of_all(
    cluster: Callable[..., Any], taken: list[int], transport: str, consistency: str, shards: int
) -> None:
    """Each brings rows that are there, and now and then one that is not."""
    servers, steps = cluster(shards).servers, 60

    def train(rank: int) -> Any:
        with connect(servers, rank, 2, transport=transport) as ps:
            ps.declare({"w": np.zeros(3, np.float32)}, SGD(lr=1.0), consistency=consistency, reduce="sum", tables=[TABLE])
            ids = np.arange(30)
            for step in range(steps):
                more = [100 * (rank + 1) + step] if step % 20 == 10 else []
                now = np.concatenate([ids, more]).astype(np.int64)
                ps.push_pull({"w": np.ones(3, np.float32)}, tables={"t": (now, np.ones((len(now), 2), np.float32))})
            ps.barrier("end")
            return ps.pull()["w"].tolist(), ps.tables["t"].pull(np.arange(230)).tolist(), ps.stats()

    for params, rows, stats in in_threads(partial(train, 0), partial(train, 1)):
        assert params == [-2.0 * steps] * 3
        expected = [2.0 * steps if id_ < 30 else float(id_ in (110, 130, 150, 210)) for id_ in range(230)]
        assert rows == [[-each] * 2 for each in expected]
        assert (stats["pushes"], stats["blocks_duplicate"], stats["rows_pushed"]) == (steps, 0, 30 * steps + 3)
    assert sum(taken) > steps


def test_a_row_that_is_not_finite_is_refused_while_armed(cluster: Callable[..., Any], taken: list[int]) -> None:
    """With its name, as ever; and nothing has changed."""
    with connect(cluster(1).servers, 0, 1, transport="shm") as ps:
        ps.declare({}, tables=[TABLE])
        good, bad = np.ones((2, 2), np.float32), np.full((2, 2), np.nan, np.float32)
        for _ in range(5):
            ps.push_pull({}, tables={"t": (np.arange(2), good)})
        with pytest.raises(NonFiniteGradient, match=r"id 0 of table 't' at step 5"):
            ps.push_pull({}, tables={"t": (np.arange(2), bad)})
        ps.push_pull({}, tables={"t": (np.arange(2), good)})
        assert ps.tables["t"].pull(np.arange(2)).tolist() == [[-6.0] * 2] * 2
    assert sum(taken) > 3


def test_more_rows_than_a_step_carries_are_pushed(cluster: Callable[..., Any], taken: list[int]) -> None:
    ids = np.arange(300_000)
    with connect(cluster(1).servers, 0, 1, transport="tcp") as ps:
        ps.declare({}, tables=[TABLE])
        for count in (10, 10, 10, len(ids), 10, 10):
            ps.tables["t"].prefetch(ids[:count])
            ps.push_pull({}, tables={"t": (ids[:count], np.ones((count, 2), np.float32))})
            assert len(ps.tables["t"].pull(ids[:count])) == count
        assert ps.tables["t"].pull(np.array([0, 10])).tolist() == [[-6.0] * 2, [-1.0] * 2]
    assert sum(taken) > 0


def test_an_interrupt_when_a_step_has_come_leaves_it_to_the_same_call(
    cluster: Callable[..., Any], taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C strikes while the worker notes the rows that have come: the gradient counts once."""
    came = RowTraffic.came

    def interrupted(*args: Any) -> None:
        came(*args)
        monkeypatch.setattr(RowTraffic, "came", came)
        raise KeyboardInterrupt

    ids, ones = np.arange(3), np.ones((3, 2), np.float32)
    with connect(cluster(1).servers, 0, 1, transport="tcp") as ps:
        ps.declare({"w": np.zeros(3, np.float32)}, SGD(lr=1.0), tables=[TABLE])
        for step in range(4):
            if step == 3:
                assert ps._worker.declared._steps.are_armed
                monkeypatch.setattr(RowTraffic, "came", interrupted)
            ps.tables["t"].prefetch(ids)
            with pytest.raises(KeyboardInterrupt) if step == 3 else nullcontext():
                ps.push_pull({"w": np.ones(3, np.float32)}, tables={"t": (ids, ones)})
        params = ps.push_pull({"w": np.ones(3, np.float32)}, tables={"t": (ids, ones)})

        assert params["w"].tolist() == [-4.0] * 3
        assert ps.tables["t"].pull(ids).tolist() == [[-4.0] * 2] * 3
        assert (ps.clock, ps.stats()["pushes_dropped"]) == (4, 0)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_interrupt_leaves_a_step_with_rows_to_the_next_call(
    cluster: Callable[..., Any], watch: Watch, transport: str
) -> None:
    """The step is given up while it is under way, and the ones after it are steps again. They raised AssertionError."""
    running = cluster(1)
    main = threading.main_thread().ident
    assert main is not None
    with connect(running.servers, 0, 1, transport=transport) as ps:
        ps.declare({}, SGD(lr=1.0), consistency="async", tables=[TABLE])
        rows = {"t": (np.arange(2), np.ones((2, 2), np.float32))}
        ps.push_pull({}, tables=rows)
        tables = running.shards[0].shard.job.tables
        before = len(watch.took)

        def interrupt() -> None:
            with tables.lock:  # the shard cannot answer
                is_held.set()
                until(lambda: len(watch.took) > before)
                signal.pthread_kill(main, signal.SIGINT)
                assert watch.after.wait(100)

        is_held = threading.Event()
        interrupting = Thread(interrupt)
        assert is_held.wait(100)
        with pytest.raises(KeyboardInterrupt):
            ps.push_pull({}, tables=rows)
        interrupting.result()

        for _ in range(5):  # the first of these is the push that was interrupted
            ps.push_pull({}, tables=rows)

        assert ps.tables["t"].pull(np.arange(2)).tolist() == [[-6.0] * 2] * 2
    assert watch.took[before] is False
    assert True in watch.took[before + 1 :]
