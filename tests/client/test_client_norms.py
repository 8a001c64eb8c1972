"""Clipping, LAMB and skipped rounds while calls fail and shards are restarted: the bits of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_faults import Restartable, connect_faulty, expire, in_threads

from psd.contract.errors import InvalidRequest, ShardUnavailable
from psd_client import LAMB, SGD, ParameterServer, connect

Start = Callable[..., Any]

SIZE = 20_000  # two blocks on two shards
STEPS = 4
JOBS: dict[str, tuple[Any, dict[str, Any]]] = {
    "clipped": (SGD(lr=1.0, momentum=0.9), {"clip_norm": 2.0}),
    "lamb": (LAMB(lr=0.1), {}),
    "both": (LAMB(lr=0.1), {"clip_norm": 2.0, "nan_policy": "skip"}),
}
every_job = pytest.mark.parametrize("job", JOBS)


def declare(ps: ParameterServer, job: str) -> dict[str, Any]:
    optimizer, options = JOBS[job]
    return ps.declare({"w": np.linspace(-1, 1, SIZE, dtype=np.float32)}, optimizer, **options)


def gradient(step: int, rank: int) -> dict[str, Any]:
    return {"w": np.cos(np.arange(SIZE, dtype=np.float32) * (1 + step) + rank)}


def undisturbed(cluster: Start, job: str, world_size: int = 1) -> Any:
    """The parameters after STEPS steps."""
    servers = cluster(2).servers

    def worker(rank: int) -> Any:
        with connect(servers, rank, world_size) as ps:
            params = declare(ps, job)
            for step in range(STEPS):
                params = ps.push_pull(gradient(step, rank))
            return params["w"]

    return in_threads(*(lambda rank=rank: worker(rank) for rank in range(world_size)))[0]


@pytest.mark.parametrize(
    ("job", "method"),
    [
        *(("both", method) for method in ("push", "commit", "measure", "pull")),
        ("clipped", "measure"),
        ("clipped", "commit"),
        ("lamb", "measure"),
        ("lamb", "commit"),
    ],
)
def test_calls_whose_replies_are_lost_change_no_bit(cluster: Start, job: str, method: str) -> None:
    """Measures are answered again, the verdict stands, and a round that has closed is not applied twice."""
    expected = undisturbed(cluster, job)
    ps, faults = connect_faulty(cluster(2).servers)
    with ps:
        declare(ps, job)
        for step in range(STEPS):
            for shard in (0, 1) if method != "commit" else (0, 0):
                faults.lose_reply(method, shard=shard)
            if step % 2:
                faults.fail(method, shard=0, error=ShardUnavailable("gone"))
            params = ps.push_pull(gradient(step, 0))

    faults.assert_all_fired()
    np.testing.assert_array_equal(params["w"], expected)


@pytest.mark.parametrize(
    ("job", "method", "index"),
    [
        *(("both", *place) for place in (("commit", 0), ("commit", 1), ("measure", 0), ("pull", 1))),
        ("clipped", "commit", 1),
        ("clipped", "measure", 0),
        ("lamb", "commit", 0),
        ("lamb", "pull", 1),
    ],
)
def test_a_shard_that_is_restarted_between_the_phases_changes_no_bit(
    cluster: Start, tmp_path: Path, job: str, index: int, method: str
) -> None:
    """Open rounds die with the shard; the workers send their gradients again, and the verdict is the same."""
    expected = undisturbed(cluster, job, world_size=2)
    shards = Restartable(cluster, tmp_path)
    ps, faults = connect_faulty(shards.servers, 0, 2)

    def first() -> Any:
        with ps:
            declare(ps, job)
            for step in range(STEPS):
                if step in (1, 2):
                    faults.run_before(method, shard=0, action=lambda: shards.restart(index))
                params = ps.push_pull(gradient(step, 0))
            return params["w"]

    def second() -> Any:
        with connect(shards.servers, 1, 2) as peer:
            declare(peer, job)
            for step in range(STEPS):
                peer.push(gradient(step, 1))
                params = peer.pull()
            return params["w"]

    results = in_threads(first, second)

    faults.assert_all_fired()
    for params in results:
        np.testing.assert_array_equal(params, expected)


@every_job
def test_a_worker_that_pushes_and_never_pulls_settles_its_rounds_all_the_same(cluster: Start, job: str) -> None:
    """Before the next push, which may reuse the memory."""
    expected = undisturbed(cluster, job)
    with connect(cluster(2).servers, 0, 1) as ps:
        declare(ps, job)
        for step in range(STEPS):
            ps.push(gradient(step, 0))
        params = ps.pull()

    np.testing.assert_array_equal(params["w"], expected)


def test_the_next_worker_settles_a_round_whose_worker_has_died(cluster: Start) -> None:
    """It had committed, and measured nothing: its successor, which has no part in that round, brings the verdict about."""
    shards = cluster(2)
    dying = connect(shards.servers, 0, 1)
    declare(dying, "clipped")
    dying.push({"w": np.ones(SIZE, np.float32)})
    for shard in shards.shards:
        expire(shard, 0)

    with connect(shards.servers, 0, 1) as ps:
        params = declare(ps, "clipped")
        start = np.linspace(-1, 1, SIZE, dtype=np.float32)
        np.testing.assert_allclose(params["w"], start - 2 / np.sqrt(SIZE), rtol=0, atol=1e-6)
        assert ps.clock == 1
    dying._worker.close(RuntimeError("it has died"))


def test_a_worker_that_lost_its_push_settles_the_round_before_the_next(cluster: Start) -> None:
    """Fenced while it committed; the round is the other worker's alone, which has died: nobody else would settle it, and
    the next push would wait for ever."""
    shards = cluster(2)
    ps, faults = connect_faulty(shards.servers, 0, 2, wait_timeout_s=20)
    dying = connect(shards.servers, 1, 2)
    in_threads(lambda: declare(dying, "clipped"), lambda: declare(ps, "clipped"))
    dying.push({"w": np.ones(SIZE, np.float32)})

    def expire_all() -> None:
        for shard in shards.shards:
            for rank in (0, 1):
                expire(shard, rank)

    with ps:
        faults.run_before("commit", shard=0, action=expire_all)
        ps.push({"w": np.ones(SIZE, np.float32)})
        assert (ps.clock, ps.stats()["blocks_late"]) == (1, 2)
        assert [shard.shard._core.declared().version_max for shard in shards.shards] == [0, 0]
        ps.push({"w": np.zeros(SIZE, np.float32)})
        params = ps.pull()

    faults.assert_all_fired()
    start, step = np.linspace(-1, 1, SIZE, dtype=np.float32), 2 / np.sqrt(SIZE)
    np.testing.assert_allclose(params["w"], start - step - 0.9 * step, rtol=0, atol=1e-6)
    dying._worker.close(RuntimeError("it has died"))


def test_a_skipped_round_is_told_to_all_and_counted(cluster: Start, caplog: Any) -> None:
    """The worker whose gradient was not finite, and the one whose was; the gradient of the next round counts."""
    servers = cluster(2).servers

    def worker(rank: int) -> tuple[Any, list[bool], int]:
        with connect(servers, rank, 2) as ps:
            ps.declare({"w": np.zeros(SIZE, np.float32)}, SGD(lr=1.0), nan_policy="skip")
            told = []
            for step in range(3):
                values = np.ones(SIZE, np.float32)
                if (step, rank) == (1, 1):
                    values[-1] = np.inf
                if step == 2:
                    ps.push({"w": values})
                    params = ps.pull()
                else:
                    params = ps.push_pull({"w": values})
                told.append(ps.is_skipped)
            return params["w"], told, ps.stats()["rounds_skipped"]

    for params, told, count in in_threads(lambda: worker(0), lambda: worker(1)):
        assert set(params.tolist()) == {-2.0}
        assert (told, count) == ([False, True, False], 1)
    assert "worker 1: the gradient of 'w' at step 1 holds NaN or infinity; the round is skipped" in caplog.text


@pytest.mark.parametrize("method", ["commit", "pull"])
def test_a_skipped_round_is_told_to_a_worker_whose_lease_has_run_out_meanwhile(cluster: Start, method: str) -> None:
    """Before or after it has committed: GradScaler's scale must follow the others' all the same."""
    shards = cluster(2)
    ps, faults = connect_faulty(shards.servers, 0, 2, wait_timeout_s=20)
    peer = connect(shards.servers, 1, 2)
    values, policy = np.ones(SIZE, np.float32), {"nan_policy": "skip"}
    in_threads(*(lambda each=each: each.declare({"w": values}, SGD(lr=1.0), **policy) for each in (ps, peer)))
    peer.push({"w": np.full(SIZE, np.inf, np.float32)})

    with ps, peer:
        faults.run_before(method, shard=0, action=lambda: [expire(shard, 0) for shard in shards.shards])
        params = ps.push_pull({"w": values})
        stats = ps.stats()
        assert set(params["w"].tolist()) == {1.0}
        assert (ps.is_skipped, ps.clock, stats["rejoins"], stats["rounds_skipped"]) == (True, 1, 1, 1)
    faults.assert_all_fired()


def test_arguments_that_make_no_sense_are_refused_before_anything_is_declared(cluster: Start) -> None:
    """Each is named; also a worker that skips in a job that has no such policy."""
    with connect(cluster(1).servers, 0, 1) as ps:
        for options, words in (
            ({"clip_norm": 0.0}, "clip_norm: must be > 0, or None"),
            ({"clip_norm": float("nan")}, "clip_norm: must be > 0, or None"),
            ({"clip_norm": 1.0, "aggregation": "fast"}, "clip_norm needs aggregation exact"),
            ({"nan_policy": "zero"}, "nan_policy: expected one of"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                ps.declare({"w": np.zeros(3)}, SGD(lr=1.0), **options)
        with pytest.raises(InvalidRequest, match="lamb needs the norms of whole tensors"):
            ps.declare({"w": np.zeros(3)}, LAMB(), consistency="async")
        ps.declare({"w": np.zeros(3)}, SGD(lr=1.0))
        with pytest.raises(InvalidRequest, match='skip: the job was declared with nan_policy="refuse"'):
            ps._worker.push_pull_flat([[1.0, 0.0, 0.0, 0.0]], skip=True)
