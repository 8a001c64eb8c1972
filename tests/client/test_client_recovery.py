"""A client and shards that are restarted under it: on what they held, without it, or with another job's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from client_faults import Restartable, Thread, connect_faulty, expire, until

from psd.contract.errors import RolledBack, SessionFenced, StateLost
from psd_client import SGD, ParameterServer, connect

Start = Callable[..., Any]

SIZE = 20_000  # two blocks on two shards


def declare(ps: ParameterServer, **options: Any) -> dict[str, Any]:
    return ps.declare({"w": np.zeros(SIZE, np.float32)}, SGD(lr=1.0), **options)


def gradient(value: float) -> dict[str, Any]:
    return {"w": np.full(SIZE, value, np.float32)}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("aggregation", ["fast", "exact"])
def test_pull_when_a_shard_was_restarted_after_the_push_then_the_gradient_counts_once(
    restartable: Callable[..., Restartable], aggregation: str, index: int
) -> None:
    """The open round died with the shard; the client sends its gradient again, before it waits for the round."""
    job = restartable()
    with connect(job.servers, 0, 2) as ps, connect(job.servers, 1, 2) as peer:
        other = Thread(lambda: declare(peer, aggregation=aggregation))
        declare(ps, aggregation=aggregation)
        other.result()
        ps.push(gradient(2.0))

        job.restart(index)
        pulled = Thread(ps.pull)
        peer.push(gradient(4.0))
        other = Thread(peer.pull)

        assert set(pulled.result()["w"].tolist()) == set(other.result()["w"].tolist()) == {-3.0}
        assert [job.version(0), job.version(1)] == [1, 1]


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("aggregation", ["fast", "exact"])
def test_push_when_the_round_before_is_open_then_keeps_its_gradient_until_it_has_closed(
    restartable: Callable[..., Restartable], aggregation: str, index: int
) -> None:
    """The buffers are the only copy that survives the shard: the next push must not overwrite them before."""
    job = restartable()
    with connect(job.servers, 0, 2) as ps, connect(job.servers, 1, 2) as peer:
        other = Thread(lambda: declare(peer, aggregation=aggregation))
        declare(ps, aggregation=aggregation)
        other.result()
        ps.push(gradient(2.0))
        second = Thread(lambda: ps.push(gradient(100.0)))
        until(lambda: all(shard.shard.core.waiting.open(0) for shard in job.shards[:1]))
        assert set(ps.gradients.views[0].tolist()) == {2.0}

        job.restart(index)
        peer.push(gradient(4.0))

        assert set(peer.pull()["w"].tolist()) == {-3.0}
        second.result()
        peer.push(gradient(0.0))
        assert set(ps.pull()["w"].tolist()) == {-53.0}


@pytest.mark.parametrize("consistency", ["async", "ssp:2"])
def test_push_when_a_shard_is_restarted_again_and_again_then_sums_are_exact(
    restartable: Callable[..., Restartable], consistency: str
) -> None:
    """Integers and lr 1: what was acknowledged is in, once."""
    job = restartable()
    with connect(job.servers, 0, 1) as ps:
        declare(ps, consistency=consistency)
        for step in range(6):
            ps.push(gradient(step))
            job.restart(step % 2)
        total = ps.pull()["w"]

    assert set(total.tolist()) == {-15.0}


def test_barrier_when_shard_zero_is_restarted_while_it_waits_then_goes_on(restartable: Callable[..., Restartable]) -> None:
    """The arrival is sent again to the next incarnation."""
    job = restartable()
    with connect(job.servers, 0, 2) as ps, connect(job.servers, 1, 2) as peer:
        other = Thread(lambda: declare(peer))
        declare(ps)
        other.result()
        waiting = Thread(lambda: ps.barrier("b"))
        until(lambda: bool(job.shards[0].shard.core.waiting.open(0)))
        job.restart(0)
        peer.barrier("b")
        waiting.result()


def test_pull_when_a_shard_came_back_without_its_memory_then_is_told(cluster: Start) -> None:
    """No state directory, no checkpoint: a typed error that names the shard; a blank shard is never taken for the old one."""
    job = cluster(2)
    with connect(job.servers, 0, 1) as ps:
        declare(ps)
        ps.push_pull(gradient(1.0))
        job.shards[1].stop()
        cluster(2, only=1, listen=job.shards[1].address)

        with pytest.raises(StateLost, match="shard 1 has come back without the parameters") as caught:
            ps.pull()

    assert caught.value.detail["shard"] == 1


def test_declare_when_shard_zero_has_lost_its_part_then_is_told_and_nothing_is_mixed(cluster: Start) -> None:
    """All workers are new, so none resumes: shard 0 wants initial values, shard 1 has those of the job, with updates."""
    job = cluster(2, run_id="r", lease_s=1.0)
    first = connect(job.servers, 0, 1)
    declare(first)
    first.push_pull(gradient(1.0))
    job.shards[0].stop()
    (blank,) = cluster(2, only=0, listen=job.shards[0].address, run_id="r", lease_s=1.0).shards

    with connect(job.servers, 0, 1) as ps, pytest.raises(StateLost, match=r"shard 1 at .* shard 0 has lost its part"):
        declare(ps)

    assert not blank.shard.is_initialized
    first.close()


def test_declare_when_the_initializer_was_superseded_on_the_way_then_the_values_are_its_successors(cluster: Start) -> None:
    """Its lease had run out at shard 0 and not at shard 1, where its late values would replace those of its successor."""
    c = cluster(2)
    late, faults = connect_faulty(c.servers, 0, 2)
    with late, connect(c.servers, 1, 2) as successor:

        def be_late() -> None:
            expire(c.shards[0], 0)
            successor.declare({"w": np.full(SIZE, 2, np.float32)}, SGD(lr=1.0))

        faults.run_before("initialize", shard=1, action=be_late)

        params = late.declare({"w": np.full(SIZE, 1, np.float32)}, SGD(lr=1.0))

        assert set(params["w"].tolist()) == {2.0}
        assert set(successor.pull()["w"].tolist()) == {2.0}


def test_declare_when_a_shard_dies_before_it_has_values_then_begins_anew(restartable: Callable[..., Restartable]) -> None:
    """Nothing was lost that anybody had built on, so the job need not end."""
    job = restartable()
    ps, faults = connect_faulty(job.servers, 0, 1)
    with ps:
        faults.run_before("initialize", shard=1, action=lambda: job.restart(1))

        assert set(declare(ps)["w"].tolist()) == {0.0}

        assert set(ps.push_pull(gradient(1.0))["w"].tolist()) == {-1.0}


def test_rejoin_when_the_job_has_gone_back_meanwhile_then_is_told(
    restartable: Callable[..., Restartable], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose lease ran out over a rollback finds other parameters than it left: not a mere rejoin."""
    job = restartable()
    with connect(job.servers, 0, 1) as ps:
        declare(ps)
        for server in job.shards:
            server.shard.core.timeline = 3
        told = []
        monkeypatch.setattr(ps, "_go_back", lambda error: told.append(error.detail) or error)

        expire(job.shards[0], 0)
        with pytest.raises(RolledBack, match="went back to a checkpoint while worker 0 was out of it"):
            ps.pull()

    assert told == [{"timeline": 3}]


def test_leave_when_a_shard_was_restarted_meanwhile_then_is_heard(restartable: Callable[..., Restartable]) -> None:
    """The job is done, on the incarnation too that this worker had not met yet."""
    job = restartable()
    ps = connect(job.servers, 0, 1)
    declare(ps)
    ps._session._membership, known = None, ps._session._membership  # no heartbeat resumes
    job.restart(1)
    ps._session._membership = known

    ps.close()

    assert job.shards[1].done.wait(10)


def test_rejoin_when_somebody_has_the_rank_then_raises(cluster: Start) -> None:
    """Only an expired session comes back by itself."""
    with connect(cluster(1).servers, 0, 1) as ps:
        error = SessionFenced("x", cause="superseded")

        with pytest.raises(SessionFenced) as caught:
            ps._session.rejoin(error)

    assert caught.value is error
