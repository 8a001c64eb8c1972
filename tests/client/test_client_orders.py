"""What an operator orders by psdctl set-lr, drain and kick, as workers see it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_faults import Restartable, in_threads, until

from psd.checkpoint import CheckpointDirectory
from psd.cli.psdctl import main
from psd.contract.errors import InvalidRequest, RolledBack, SessionFenced, WrongShard
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


def test_a_worker_that_joins_or_meets_a_restarted_shard_follows_what_was_ordered_before(job: Restartable) -> None:
    with connect(job.servers, 0, 1) as ps:
        ps.declare(PARAMS, SGD(lr=1.0))
        ps.push_pull(ONES)
        begins = job.shards[0].shard.scale_learning_rate(0.25).clock
        while ps.clock < begins:
            ps.push_pull(ONES)
        job.restart(0)
        assert ps.push_pull(ONES)["a"][0] == -begins - 0.25
    with connect(job.servers, 0, 1) as ps:
        ps.declare(PARAMS, SGD(lr=1.0))
        assert ps.push_pull(ONES)["a"][0] == -begins - 0.5


@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_a_job_that_goes_on_from_a_checkpoint_has_the_scale_that_it_had_there(
    consistency: str, cluster: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On another number of shards; psdctl says which scale that is."""
    place = str(tmp_path / "checkpoints")
    settings = {"checkpoint_dir": place, "checkpoint_steps": 1000, "lease_s": 60.0}
    first = cluster(2, **settings)
    with connect(first.servers, 0, 1) as ps:
        ps.declare(PARAMS, SGD(lr=1.0), consistency=consistency)
        ps.push_pull(ONES)
        begins = first.shards[0].shard.scale_learning_rate(0.25).clock
        while ps.clock < 6:
            before = ps.push_pull(ONES)
    for each in first.shards:
        each.stop()
    assert main(["checkpoints", place]) == 0
    heads, values = capsys.readouterr().out.splitlines()
    assert (heads.split()[-2:], values.split()[-1]) == (["LR", "SCALE"], "0.25")

    again = cluster(3, **settings)
    with connect(again.servers, 0, 1) as ps:
        after = ps.declare(PARAMS, SGD(lr=1.0), consistency=consistency)
        assert (ps.clock, after["a"][0], after["b"][0]) == (6, before["a"][0], before["b"][0])
        assert 0 <= begins <= 4
        assert ps.push_pull(ONES)["a"][0] == before["a"][0] - 0.25
        rates = again.shards[0].shard.status().orders.learning_rates
        assert [(rate.clock, rate.scale) for rate in rates] == [(begins, 0.25)]


@pytest.mark.parametrize(("lost", "later"), [(1, 0.5), (0, 2.0)])
def test_a_job_that_goes_back_has_the_same_scales_at_the_same_steps_again(
    lost: int, later: float, cluster: Callable[..., Any], tmp_path: Path
) -> None:
    """Also that of an order since the checkpoint, which shard 0 knows, unless it was shard 0 that has lost all."""
    place = str(tmp_path / "checkpoints")
    settings: dict[str, Any] = {"checkpoint_dir": place, "checkpoint_steps": 8, "lease_s": 60.0}
    started = cluster(2, **settings)
    ones = {"a": np.ones(20_000, np.float32)}  # so many that each shard has some
    with connect(started.servers, 0, 1) as ps:
        ps.declare({"a": np.zeros(20_000, np.float32)}, SGD(lr=1.0))
        values = {}
        orders = {1: 2.0, 9: 0.5}
        while ps.clock < 15:
            if ps.clock in orders:
                begins = started.shards[0].shard.scale_learning_rate(orders[ps.clock]).clock
            after = ps.push_pull(ones)
            values[ps.clock] = float(after["a"][0])
        assert (begins, values[11] - values[12]) == (11, 0.5)
        until(lambda: CheckpointDirectory(place).newest() is not None)
        started.shards[lost].stop()
        started.shards[lost] = cluster(2, only=lost, listen=started.shards[lost].address, **settings).shards[0]

        with pytest.raises(RolledBack):
            while ps.clock < 30:
                ps.push_pull(ones)
        again = {ps.clock: float(ps.pull()["a"][0])}
        while ps.clock < 13:
            after = ps.push_pull(ones)
            again[ps.clock] = float(after["a"][0])

        assert min(again) == 8
        assert {clock: again[clock] for clock in range(8, 12)} == {clock: values[clock] for clock in range(8, 12)}
        assert again[11] - again[12] == later
        ordered = started.shards[0].shard.scale_learning_rate(0.125)
        assert ordered.clock == 15, "from the steps that come next"


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


@pytest.mark.parametrize("mode", [{}, {"aggregation": "exact"}, {"consistency": "ssp:1"}], ids=["sync", "exact", "ssp"])
def test_a_worker_that_is_kicked_while_it_waits_hears_of_it_at_once_and_the_last_one_may_be_kicked_too(
    mode: dict[str, str], cluster: Callable[..., Any]
) -> None:
    """Rank 0 is ahead and waits in a call for rank 1, which goes on alone. When nobody is left, another process may come."""
    started = cluster(2, lease_s=60.0)
    shard = started.shards[0].shard

    def kick(rank: int) -> None:
        session = shard.status().workers[rank].session
        assert all(each.shard.admission.kick(rank, session) for each in started.shards)

    with connect(started.servers, 0, 2) as ps, connect(started.servers, 1, 2) as other:
        in_threads(lambda: ps.declare(PARAMS, SGD(lr=1.0), **mode), lambda: other.declare(PARAMS, SGD(lr=1.0), **mode))

        def go_ahead() -> None:
            with pytest.raises(SessionFenced, match="worker 0 was ended by an operator"):
                while ps.clock < 9:
                    ps.push_pull(ONES)

        def wait_and_kick() -> None:
            until(lambda: any(wait.rank == 0 for wait in shard.status().waits))
            kick(0)

        in_threads(go_ahead, wait_and_kick)
        for _ in range(5):
            other.push_pull(ONES)
        kick(1)
        with pytest.raises(SessionFenced, match="worker 1 was ended by an operator"):
            other.push_pull(ONES)
        with connect(started.servers, 0, 2) as fresh:
            fresh.declare(PARAMS, SGD(lr=1.0), **mode)
            before = fresh.clock
            fresh.push_pull(ONES)
            assert fresh.clock == before + 1


@pytest.mark.parametrize("mode", [{"quorum": 2}, {"consistency": "async"}], ids=["quorum", "async"])
def test_who_is_left_when_others_are_kicked_goes_on_alone(mode: dict[str, Any], cluster: Callable[..., Any]) -> None:
    """Fewer than the quorum, too: a round closes with all who are waited for. What the kicked ones have pushed counts."""
    started = cluster(2, lease_s=60.0)
    shard = started.shards[0].shard

    def kick(rank: int) -> None:
        session = shard.status().workers[rank].session
        assert all(each.shard.admission.kick(rank, session) for each in started.shards)

    def wait_and_kick(rank: int) -> None:
        if "quorum" in mode:
            until(lambda: any(wait.rank == 0 for wait in shard.status().waits))
        kick(rank)

    with (
        connect(started.servers, 0, 3) as ps,
        connect(started.servers, 1, 3) as second,
        connect(started.servers, 2, 3) as third,
    ):
        in_threads(*(lambda each=each: each.declare(PARAMS, SGD(lr=1.0), **mode) for each in (ps, second, third)))
        in_threads(lambda: ps.push_pull(ONES), lambda: second.push_pull(ONES))
        kick(2)
        in_threads(lambda: ps.push_pull(ONES), lambda: second.push_pull(ONES))
        in_threads(lambda: ps.push_pull(ONES), lambda: wait_and_kick(1))
        after = ps.push_pull(ONES)

        assert float(after["a"][0]) == float(after["b"][0]) == (-4.0 if "quorum" in mode else -6.0)
        for kicked in (second, third):
            with pytest.raises(SessionFenced, match="was ended by an operator"):
                kicked.push_pull(ONES)
        with connect(started.servers, 2, 3) as fresh:
            fresh.declare(PARAMS, SGD(lr=1.0), **mode)
            in_threads(lambda: ps.push_pull(ONES), lambda: fresh.push_pull(ONES))


@pytest.mark.parametrize("consistency", ["async", "ssp:1"])
def test_without_rounds_each_worker_ends_before_its_next_push(
    consistency: str, cluster: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    started = cluster(2, lease_s=60.0)

    def train(ps: Any) -> None:
        """Until an order ends it, of which it hears with the reply to a push."""
        with pytest.raises(Drained) as ended:
            while ps.clock < 5:
                ps.push_pull(ONES)
        assert ended.value.clock == ps.clock

    with connect(started.servers, 0, 2) as ps, connect(started.servers, 1, 2) as other:
        for each in (ps, other):
            each.declare(PARAMS, SGD(lr=1.0), consistency=consistency)
        ps.push_pull(ONES)
        assert main(["set-lr", "0.5", "--servers", started.servers]) == 0
        assert main(["drain", "--servers", started.servers]) == 0
        scaled, ends = capsys.readouterr().out.splitlines()
        assert scaled == "the learning rate is scaled by 0.5 from each worker's next push on"
        assert ends.startswith("each worker ends before its next push; ")
        in_threads(lambda: train(ps), lambda: train(other))


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
