"""Sums of a few numbers over workers: the same to all, counted once, whoever leaves, dies or is cut off."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_faults import Restartable, Thread, connect_faulty, expire, in_threads, until

from psd.checkpoint import CheckpointDirectory
from psd.contract.errors import BarrierTimeout, InvalidRequest, RolledBack, ShardUnavailable
from psd_client import SGD, Reduced, connect

SIZE = 20_000
"""So many that each of two shards has some."""


def declare(ps: Any, **options: Any) -> None:
    ps.declare({"w": np.zeros(SIZE, np.float32)}, SGD(lr=1.0), reduce="sum", **options)


def ones() -> dict[str, Any]:
    return {"w": np.ones(SIZE, np.float32)}


def test_every_worker_gets_the_same_numbers_of_all_and_over_how_many_they_are(run_workers: Callable[..., list[Any]]) -> None:
    """Ints stay ints; the names come back in the order in which they were given."""

    def worker(ps: Any) -> list[Reduced]:
        values = {"loss": 0.1 * (ps.rank + 1), "count": 2**53 + ps.rank, "array": np.float32(1.5), "whole": np.int64(ps.rank)}
        found = [ps.all_reduce(values)]
        declare(ps)  # before and after the declaration
        found += [ps.all_reduce(dict(reversed(values.items())), op) for op in ("mean", "min", "max")]
        return found

    results = run_workers(3, 2, worker)

    assert results[0] == results[1] == results[2]
    total, mean, least, most = results[0]
    assert total == {"loss": math.fsum(0.1 * (rank + 1) for rank in range(3)), "count": 3 * 2**53 + 3, "array": 4.5, "whole": 3}
    assert [list(total), list(mean)] == [["loss", "count", "array", "whole"], ["whole", "array", "count", "loss"]]
    assert {name: type(value) for name, value in total.items()} == {"loss": float, "count": int, "array": float, "whole": int}
    assert (mean["whole"], least["whole"], most["loss"], least["count"]) == (1.0, 0, 0.1 * 3, 2**53)
    assert [each.workers for each in results[0]] == [3] * 4


def test_one_worker_alone_gets_its_own_numbers(run_workers: Callable[..., list[Any]]) -> None:
    def worker(ps: Any) -> Any:
        return ps.all_reduce({"a": math.nan, "b": -math.inf, "c": -3}), ps.all_reduce({"c": 3}, op="mean")

    ((found, mean),) = run_workers(1, 1, worker)

    assert math.isnan(found.pop("a"))
    assert (found, found.workers) == ({"b": -math.inf, "c": -3}, 1)
    assert mean == {"c": 3.0}


@pytest.mark.parametrize(
    ("values", "op", "text"),
    [
        ({}, "sum", "values: expected numbers by name"),
        ([1.0], "sum", "values: expected numbers by name"),
        ({3: 1.0}, "sum", "values: expected numbers by name"),
        ({"x": "1"}, "sum", "x: expected a number"),
        ({"x": True}, "sum", "x: expected a number"),
        ({"x": np.ones(2)}, "sum", "x: expected a number"),
        ({"x": 2**63}, "sum", "x: .* is beyond 64 bits; pass a float"),
        ({"x": 1.0}, "product", "op: expected one of sum, mean, min, max"),
        ({"x\n": 1.0}, "sum", "control characters"),
        ({"\ud800": 1.0}, "sum", "name: "),
        ({"n" * 257: 1.0}, "sum", "name: expected 1 to 256 bytes"),
        ({f"n{i}": i for i in range(257)}, "sum", "--max-reduced-numbers"),
    ],
)
def test_what_cannot_be_reduced_is_refused(values: Any, op: str, text: str, module_cluster: Callable[..., Any]) -> None:
    """The worker may go on, and has not come."""
    with connect(module_cluster(1).servers, 0, 1) as ps:
        with pytest.raises(InvalidRequest, match=text):
            ps.all_reduce(values, op)
        assert ps.all_reduce({"x": 1}) == {"x": 1}


def test_a_worker_that_brings_other_names_is_told_and_may_come_again(cluster: Callable[..., Any]) -> None:
    started = cluster(1)
    with connect(started.servers, 0, 2) as ps, connect(started.servers, 1, 2) as peer:
        waiting = Thread(lambda: ps.all_reduce({"loss": 1.0}))
        until(lambda: bool(started.shards[0].shard._core.waiting.open(0)))
        with pytest.raises(InvalidRequest, match="worker 1 brings 'accuracy', and worker 0 does not"):
            peer.all_reduce({"accuracy": 1.0})
        assert peer.all_reduce({"loss": 2.0}) == waiting.result() == {"loss": 3.0}


@pytest.mark.parametrize("is_fenced", [False, True])
def test_a_call_whose_answer_is_lost_is_answered_again_and_counts_once(cluster: Callable[..., Any], is_fenced: bool) -> None:
    """Sent again by the client; or, if that gives up, by the program, as the same call, whatever it brings then."""
    started = cluster(1)
    ps, faults = connect_faulty(started.servers, 0, 2, retry_timeout_s=0)
    with ps, connect(started.servers, 1, 2) as peer:
        faults.lose_reply("barrier", shard=0)
        other = Thread(lambda: peer.all_reduce({"x": 10}))
        with pytest.raises(ShardUnavailable):
            ps.all_reduce({"x": 1})
        assert other.result() == {"x": 11}
        if is_fenced:
            expire(started.shards[0], 0)
        assert ps.all_reduce({"x": 5}) == {"x": 11}
        other = Thread(lambda: peer.all_reduce({"x": 10}))
        assert ps.all_reduce({"x": 5}) == other.result() == {"x": 15}


@pytest.mark.parametrize("aggregation", ["fast", "exact"])
@pytest.mark.parametrize("index", [0, 1])
def test_when_a_shard_is_restarted_while_workers_wait_then_the_sum_is_exact_and_pushes_count(
    cluster: Callable[..., Any], tmp_path: Path, aggregation: str, index: int
) -> None:
    """The last push, of which a restarted shard has lost the gradient, goes there again, so that the other's round closes."""
    job = Restartable(cluster, tmp_path)
    with connect(job.servers, 0, 2) as ps, connect(job.servers, 1, 2) as peer:
        in_threads(lambda: declare(ps, aggregation=aggregation), lambda: declare(peer, aggregation=aggregation))
        ps.push(ones())
        waiting = Thread(lambda: ps.all_reduce({"x": 0.1}))
        until(lambda: bool(job.shards[0].shard._core.waiting.open(0)))
        job.restart(index)

        assert set(peer.push_pull(ones())["w"].tolist()) == {-2.0}
        assert peer.all_reduce({"x": 0.2}) == waiting.result() == {"x": 0.30000000000000004}


@pytest.mark.parametrize("end", ["leaves", "expires"])
def test_a_worker_that_is_gone_is_not_waited_for(cluster: Callable[..., Any], end: str) -> None:
    started = cluster(1)
    with connect(started.servers, 0, 3) as ps, connect(started.servers, 1, 3) as peer, connect(started.servers, 2, 3) as third:
        calls = [Thread(lambda each=each: each.all_reduce({"n": 1})) for each in (ps, peer)]
        until(lambda: len(started.shards[0].shard._core.waiting.open()) == 2)
        third.close() if end == "leaves" else expire(started.shards[0], 2)
        if end == "expires":
            started.shards[0].shard._core.settle()
        results = [call.result() for call in calls]
        assert [(found["n"], found.workers) for found in results] == [(2, 2)] * 2


def test_a_worker_that_stays_away_is_named(cluster: Callable[..., Any], impatient: Any) -> None:
    servers = cluster(1).servers
    told = pytest.raises(BarrierTimeout, match="barrier 'all_reduce': waiting for worker 1")
    with connect(servers, 0, 2) as ps, connect(servers, 1, 2), impatient(), told:
        ps.all_reduce({"x": 1})


def test_a_job_that_goes_back_ends_the_call_and_it_can_be_made_again(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """Numbers of the time that is undone do not count."""
    place = str(tmp_path / "checkpoints")
    settings: dict[str, Any] = {"checkpoint_dir": place, "checkpoint_steps": 4}
    started = cluster(2, **settings)
    with connect(started.servers, 0, 2) as ps, connect(started.servers, 1, 2) as peer:
        in_threads(lambda: declare(ps), lambda: declare(peer))
        for _ in range(9):
            in_threads(lambda: ps.push_pull(ones()), lambda: peer.push_pull(ones()))
        until(lambda: CheckpointDirectory(place).newest() is not None)
        waiting = Thread(lambda: ps.all_reduce({"x": 100}))
        until(lambda: bool(started.shards[0].shard._core.waiting.open(0)))
        started.shards[1].stop()
        started.shards[1] = cluster(2, only=1, listen=started.shards[1].address, **settings).shards[0]
        for call in (peer.pull, waiting.result):
            with pytest.raises(RolledBack):
                call()
        found = in_threads(lambda: ps.all_reduce({"x": 1}), lambda: peer.all_reduce({"x": 2}))
        assert found == [{"x": 3}, {"x": 3}]


def test_calls_one_after_the_other_never_mix(run_workers: Callable[..., list[Any]]) -> None:
    """Workers of different speeds, without a barrier between; what one call brings is in no other."""
    begins = threading.Barrier(4)

    def worker(ps: Any) -> list[Any]:
        begins.wait(100)
        return [ps.all_reduce({"x": 10**ps.rank * (number + 1)})["x"] for number in range(20)]

    assert run_workers(4, 1, worker) == [[1111 * (number + 1) for number in range(20)]] * 4
