"""What an operator orders by psdctl set-lr, drain and kick, as workers see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from client_faults import in_threads

from psd.contract.errors import InvalidRequest, SessionFenced, WrongShard
from psd_client import SGD, Drained, connect

PARAMS = {"a": np.zeros(3, np.float32), "b": np.zeros(3, np.float32)}
ONES = {"a": np.ones(3, np.float32), "b": np.ones(3, np.float32)}


@pytest.mark.parametrize("aggregation", ["fast", "exact"])
def test_a_scaled_learning_rate_begins_at_one_step_for_all_workers_and_shards(
    aggregation: str, cluster: Callable[..., Any]
) -> None:
    """Ordered in the middle of the job, twice, by a worker that goes on at once. No push is refused, or overruled."""
    started = cluster(2, lease_s=60.0)
    shard = started.shards[0].shard
    ordered: list[Any] = []

    def train(rank: int) -> Any:
        with connect(started.servers, rank, 2) as ps:
            ps.declare(PARAMS, SGD(lr=1.0), aggregation=aggregation)
            while ps.clock < 20:
                if rank == 0 and ps.clock in (3, 4, 5, 11):
                    ordered.append(shard.scale_learning_rate(0.5 if ps.clock < 10 else 2.0))
                after = ps.push_pull(ONES)
            return after, ps.stats()["pushes_overruled"]

    results = in_threads(lambda: train(0), lambda: train(1))

    assert [order.scale for order in ordered] == [0.5, 0.5, 0.5, 2.0]
    first, second = ordered[0].clock, ordered[-1].clock
    assert ordered[1].clock == first, "said again, it changes nothing"
    assert 3 < first <= 7
    assert 11 < second <= 15
    expected = -(first + 0.5 * (second - first) + 2.0 * (20 - second))
    for after, overruled in results:
        assert {float(value) for name in PARAMS for value in after[name]} == {expected}
        assert overruled == 0


def test_a_worker_that_joins_or_meets_a_restarted_shard_follows_what_was_ordered_before(
    restartable: Callable[..., Any],
) -> None:
    started = restartable()
    with connect(started.servers, 0, 1) as ps:
        ps.declare(PARAMS, SGD(lr=1.0))
        ps.push_pull(ONES)
        begins = started.shards[0].shard.scale_learning_rate(0.25).clock
        while ps.clock < begins:
            ps.push_pull(ONES)
        started.restart(0)
        assert ps.push_pull(ONES)["a"][0] == -begins - 0.25
    with connect(started.servers, 0, 1) as ps:
        ps.declare(PARAMS, SGD(lr=1.0))
        assert ps.push_pull(ONES)["a"][0] == -begins - 0.5


def test_drain_ends_all_workers_before_the_same_step(cluster: Callable[..., Any]) -> None:
    """As if their programs had come to their ends; and when all have left, who comes then is not sent away."""
    started = cluster(2, lease_s=60.0)
    shard = started.shards[0].shard

    def train(rank: int) -> Any:
        with pytest.raises(Drained) as ended, connect(started.servers, rank, 2) as ps:
            ps.declare(PARAMS, SGD(lr=1.0))
            while True:
                if rank == 1 and ps.clock == 4:
                    assert shard.end_job() == shard.end_job()
                after = ps.push_pull(ONES)
        return ended.value.code, ended.value.clock, ps.clock, float(after["b"][0])

    first, second = in_threads(lambda: train(0), lambda: train(1))

    assert first == second == (0, first[1], first[1], -float(first[1]))
    assert 4 < first[1] <= 8
    assert [shard.schedule.is_left_in_order for shard in (each.shard for each in started.shards)] == [True, True]
    shard.tick()
    with connect(started.servers, 0, 2) as ps, connect(started.servers, 1, 2) as other:
        in_threads(lambda: ps.declare(PARAMS, SGD(lr=1.0)), lambda: other.declare(PARAMS, SGD(lr=1.0)))
        in_threads(lambda: ps.push_pull(ONES), lambda: other.push_pull(ONES))


def test_a_kicked_worker_is_not_waited_for_and_only_another_process_has_its_rank_again(cluster: Callable[..., Any]) -> None:
    started = cluster(2, lease_s=60.0)
    with connect(started.servers, 0, 2) as ps, connect(started.servers, 1, 2, retry_timeout=1) as other:
        in_threads(lambda: ps.declare(PARAMS, SGD(lr=1.0)), lambda: other.declare(PARAMS, SGD(lr=1.0)))
        session = started.shards[0].shard.status().workers[1].session
        for each in started.shards:
            assert each.shard.admission.kick(1, session)
            assert not each.shard.admission.kick(1, session), "said again, it changes nothing"

        assert ps.push_pull(ONES)["a"][0] == -1.0
        for _ in range(2):
            with pytest.raises(SessionFenced, match="worker 1 was ended by an operator"):
                other.push_pull(ONES)
        with connect(started.servers, 1, 2) as fresh:
            fresh.declare(PARAMS, SGD(lr=1.0))
            assert not started.shards[0].shard.admission.kick(1, session), "that session has ended long ago"
            in_threads(lambda: ps.push_pull(ONES), lambda: fresh.push_pull(ONES))


def test_orders_that_cannot_be_followed_are_refused(cluster: Callable[..., Any]) -> None:
    started = cluster(2)
    with connect(started.servers, 0, 1) as ps:
        ps.declare(PARAMS, SGD(lr=1.0))
        for scale in (0.0, -1.0, float("nan"), 1e7):
            with pytest.raises(InvalidRequest, match="scale: expected more than 0 and at most 1e"):
                started.shards[0].shard.scale_learning_rate(scale)
        with pytest.raises(WrongShard, match="orders are given to shard 0"):
            started.shards[1].shard.end_job()
        with pytest.raises(InvalidRequest, match="rank: 1 is not below world_size 1"):
            started.shards[0].shard.admission.kick(1, 5)
