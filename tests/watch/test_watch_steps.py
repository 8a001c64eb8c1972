"""Overhead of armed steps is visible nowhere: all that operators see of a job is what they see of one that is never armed.

What clocks decide is compared by its kind: whether it is known, and more than nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from short_ways import Watch
from test_watch_agreement import VOLATILE, scraped

import psd_client
from psd.cli.psdctl import main

PARAMS = {"a": np.zeros(300, np.float32), "b": np.zeros(200, np.float64)}
TABLE = psd_client.Table("items", dim=4, optimizer=psd_client.RowwiseAdagrad(lr=0.1))
STEPS = 12
NAMES = {"run_id", "session", "state_dir", "address", "incarnation"}
"""What is another one in each job."""
TIMES = {*VOLATILE, "awaited_s", "waited_s", "text", "headline"}
OF_PROCESS = ("process_", "psd_shard_info", "psd_call_seconds_bucket", "psd_round_seconds_bucket", "psd_barrier_seconds_bucket")


def by_kind(value: Any, name: str = "") -> Any:
    """A JSON without the names of its job, and of its times the kinds."""
    if isinstance(value, dict):
        return {key: by_kind(item, key) for key, item in value.items() if key not in NAMES}
    if isinstance(value, list):
        return [by_kind(item, name) for item in value]
    return (bool(value) if name in TIMES else value) if value is not None else None


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All values in a JSON, with their places."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(item, f"{path} {key}")
    else:
        yield path, value


class Job:
    """Two workers, or one, in an order that is the same each time."""

    def __init__(self, started: Any, consistency: str, transport: str, *, has_rows: bool, world: int) -> None:
        self.started, self.has_rounds, self.has_rows = started, consistency == "sync", has_rows
        self.pool = ThreadPoolExecutor(1)
        self.workers = [psd_client.connect(started.servers, rank, world, transport=transport) for rank in range(world)]
        tables = [TABLE] if has_rows else []
        for ps in self.workers:
            ps.declare(PARAMS, psd_client.Adam(lr=0.1), consistency=consistency, tables=tables)

    def push(self, rank: int) -> None:
        ps = self.workers[rank]
        ids = np.arange(10) + 2 * rank
        rows = {"items": (ids, np.ones((10, 4), np.float32))} if self.has_rows else {}
        if rows:
            ps.tables["items"].prefetch(ids)
        grads = PARAMS if ps.clock % 5 else {"b": PARAMS["b"]}
        ps.push_pull(grads, tables=rows, weight=1.0 + ps.clock % 2)
        if rows:
            ps.tables["items"].pull(ids)
        ps.log(ps.clock, loss=1 / ps.clock)

    def begin(self, rank: int) -> Future[None]:
        """Push in another thread; returns when all shards have the gradient, or hold its worker back."""
        clock = self.workers[rank].clock
        pushing = self.pool.submit(self.push, rank)
        for shard in self.started.shards:
            while (now := shard.shard.status()).workers[rank].clock <= clock and not (now.waits or pushing.done()):
                pass
        return pushing

    def train(self) -> None:
        for _ in range(STEPS):
            pushing = [self.begin(rank) for rank in range(len(self.workers) - 1)]
            for each in () if self.has_rounds else pushing:
                each.result()
            self.push(len(self.workers) - 1)
            for each in pushing:
                each.result()

    def close(self) -> None:
        for ps in self.workers:
            ps.close()
        self.pool.shutdown()


def metrics_of(job: Job) -> list[Any]:
    """The shards' metrics likewise. Once for each job: a shard makes them anew five times a second at most."""
    return [
        {
            key: value > 0 if "seconds" in key[0] and not key[0].endswith(("_count", "_bucket")) else value
            for key, value in scraped(shard.metrics_port).items()
            if not key[0].startswith(OF_PROCESS)
        }
        for shard in job.started.shards
    ]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """told("status", job) -> what psdctl prints as JSON, by kind."""
    monkeypatch.setattr("psd.watch.sampler.MEASURED_S", 0.0)

    def tell(command: str, job: Job) -> Any:
        assert main([command, "--json", "--servers", job.started.servers]) == 0
        return by_kind(json.loads(capsys.readouterr().out))

    return tell


def seen(job: Job, told: Callable[..., Any], waits_for: list[Any]) -> list[Any]:
    """All that is seen of a job; while one worker waits, too, if it does: as `waits_for` says."""
    job.train()
    found = [told("status", job)]
    if waits_for:
        for _ in range(1 if job.has_rounds else 2):  # with a bound of 1 the second one waits
            pushing = job.begin(0)
        now = told("status", job)
        while [wait["shards"] for wait in now["waits"]] != [[0, 1]]:  # a step has waited for 50 ms first
            now = told("status", job)
        found += [now, metrics_of(job)]
        assert [(wait["rank"], wait["missing"]) for wait in now["waits"]] == waits_for
        job.push(1)
        pushing.result()
    else:
        found.append(metrics_of(job))
    found.append(told("status", job))
    found.append([ps.stats() for ps in job.workers])
    job.close()
    found.append(told("top", job))
    return found


@pytest.mark.parametrize(
    ("consistency", "transport", "has_rows", "world", "waits"),
    [
        ("sync", "shm", False, 2, [(0, [1])]),
        ("sync", "tcp", True, 1, []),
        ("async", "tcp", True, 2, []),
        ("ssp:1", "shm", True, 2, [(0, [1])]),
    ],
)
def test_an_armed_job_looks_like_one_that_is_never_armed(
    cluster: Callable[..., Any],
    watch: Watch,
    told: Callable[..., Any],
    consistency: str,
    transport: str,
    has_rows: bool,
    world: int,
    waits: list[Any],
) -> None:
    """Counts, ages, who waits for whom and for how long, curves; and what the workers have counted."""
    found = []
    for never_armed in (False, True):
        del watch.took[:]
        started = cluster(2, metrics_port=0, never_armed=never_armed)
        found.append(seen(Job(started, consistency, transport, has_rows=has_rows, world=world), told, waits))
        assert (watch.took.count(True) > STEPS / 2) != never_armed

    assert [each for each in zip(*map(flat, found), strict=False) if each[0] != each[1]] == []
