"""Rounds of several workers' rows that steps make: who applies them, and what is in one besides steps. No psd_client."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from raw_client import SGD
from raw_row_steps import RowsDone, RowStepWorker
from raw_steps import CASE, Again, pause
from test_rim_row_steps_killed import job_of

IDS = np.arange(4, dtype=np.uint64)
PULLED: Any = dict.fromkeys(range(2), IDS)


def ones(*more: int) -> Any:
    """Gradients of the rows that all have, and of more."""
    ids = np.concatenate([IDS, np.array(more, np.uint64)])
    return dict.fromkeys(range(2), (ids, np.ones((len(ids), 2), np.float32)))


class Pair:
    """Two workers that are armed, after a round of ones."""

    def __init__(self, server: Any, dial: Callable[..., grpc.Channel], pool: ThreadPoolExecutor) -> None:
        self.shard, self.pool = server.shard, pool
        self.workers = [RowStepWorker(dial(server.address), rank, 2, job=job_of("sync", 2), lane="tcp") for rank in range(2)]
        self.clock = 0
        for worker in self.workers:
            worker.scalars = [SGD, SGD]
        while any(worker.offer is None for worker in self.workers):
            self.round(ones(), ones())

    def begin(self, rank: int, pushed: Any) -> Any:
        """A step, or a push, that waits for the other worker's."""
        worker, tables = self.workers[rank], self.shard.job.tables
        found = self.pool.submit(worker.train_rows, (1,), self.clock, pushed, PULLED)
        while not tables.has(rank, worker.session, self.clock):
            assert not found.done() or found.result()
            pause()
        return found

    def round(self, first: Any, second: Any) -> list[tuple[RowsDone, bool]]:
        """The answers, and whether they are a step's."""
        waiting = self.begin(0, first)
        found = self.workers[1].train_rows((1,), self.clock, second, PULLED)
        self.clock += 1
        return [waiting.result(100), found]


@pytest.fixture
def pair(cluster: Callable[..., Any], dial: Callable[..., grpc.Channel]) -> Iterator[Pair]:
    with ThreadPoolExecutor(2) as pool:
        made = Pair(cluster(1).shards[0], dial, pool)
        yield made
        for worker in made.workers:
            worker.close()


def test_the_last_step_applies_the_round(pair: Pair) -> None:
    """In C: Python hears of it when it asks."""
    before = pair.shard.job.tables.core.updates
    for _ in range(5):
        found = pair.round(ones(), ones())
        assert found[1][1], "a step"
        assert found[0][0].rows == found[1][0].rows == dict.fromkeys(range(2), [[-2.0 * pair.clock] * 2] * 4)
    assert pair.shard.job.tables.core.updates == before + 5


def test_a_round_that_brings_new_rows_is_applied_by_python(pair: Pair) -> None:
    """The step that completes it is one all the same."""
    before = pair.shard.job.tables.core.updates
    found = pair.round(ones(100), ones(101))
    assert found[1][1], "a step"
    assert pair.shard.job.tables.core.updates == before
    again = pair.round(ones(100, 101), ones(100))
    assert again[1][1]
    assert pair.shard.job.tables.core.updates == before + 1
    rows = pair.shard.job.tables.partitions[0].store.read(np.array([0, 100, 101]))[:, 0].tolist()
    assert rows == [-2.0 * pair.clock, -3.0, -2.0]


def test_a_round_with_lent_rows_takes_no_steps(pair: Pair) -> None:
    """They are not in the sums: Python goes on with it."""
    pair.shard.job.tables.core.has_steps = False
    pair.workers[0].offer = None
    waiting = pair.begin(0, ones())
    second = pair.workers[1]
    assert pair.shard.job.tables.core.is_lent
    sent = second.send_rows((1,), pair.clock, ones(), PULLED)
    assert second.receive_rows(sent) == Again(CASE)
    found = second.push_rows((1,), pair.clock, ones(), PULLED)
    pair.clock += 1
    assert waiting.result(100)[0].rows == found.rows == dict.fromkeys(range(2), [[-2.0 * pair.clock] * 2] * 4)
    assert found.counted == 2


def test_rounds_are_exact_while_steps_are_revoked_again_and_again(pair: Pair) -> None:
    """Whoever holds the rows of the open round, the other way goes on with them."""
    steps, ended, taken = pair.clock + 300, threading.Event(), [0, 0]

    def work(rank: int) -> RowsDone:
        for clock in range(pair.clock, steps):
            found, is_step = pair.workers[rank].train_rows(
                (1,), clock, ones(*([200 + clock] if clock % 50 == 9 else [])), PULLED
            )
            taken[rank] += is_step
        return found

    def revoke() -> None:
        while not ended.wait(0.005):
            pair.shard._core.revoke()

    with ThreadPoolExecutor(1) as others:
        revoking = others.submit(revoke)
        try:
            found = list(pair.pool.map(work, range(2)))
        finally:
            ended.set()
        revoking.result()
    assert [each.rows for each in found] == [dict.fromkeys(range(2), [[-2.0 * steps] * 2] * 4)] * 2
    assert min(taken) > 0
    counters = pair.shard.status().counters
    assert (counters.pushes_accepted, counters.pushes_duplicate) == (2 * steps, 0)
