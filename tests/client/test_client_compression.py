"""What becomes of a residual: a push that counts has taken it once, whatever happens to shards and replies meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_faults import Restartable, connect_faulty, until
from numpy.typing import NDArray

from psd.checkpoint import CheckpointDirectory
from psd.contract.errors import NonFiniteGradient, RolledBack, ShardUnavailable
from psd_client import SGD, ParameterServer, connect
from psd_core import codecs

SIZE = 40_000
STEPS = 6


def gradient(step: int, rank: int = 0) -> dict[str, NDArray[Any]]:
    return {"w": np.random.default_rng([step, rank]).standard_normal(SIZE, np.float32)}


def declare(ps: ParameterServer, codec: str = "int4", **job: Any) -> NDArray[np.float32]:
    found: NDArray[np.float32] = ps.declare({"w": np.zeros(SIZE, np.float32)}, SGD(lr=1.0), compress=codec, **job)["w"]
    return found


def encoder(ps: ParameterServer) -> Any:
    return ps._worker.declared.encoder


def residual(ps: ParameterServer) -> NDArray[np.float32]:
    found: NDArray[np.float32] = encoder(ps)._residuals.views[0].copy()
    return found


def trained_here(steps: int = STEPS, first: int = 0) -> NDArray[np.float32]:
    """Blocks are multiples of what shares a scale, so that they need not be known."""
    values, lost, out = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32), np.empty(SIZE, np.float32)
    for step in range(first, first + steps):
        codecs.decode("int4", codecs.encode("int4", gradient(step)["w"], lost), out)
        values -= out
    return values


@pytest.mark.parametrize("mode", [{"consistency": "sync"}, {"aggregation": "exact"}, {"consistency": "async"}])
@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_push_when_a_shard_is_restarted_after_each_then_residuals_are_taken_once(
    job: Restartable, mode: dict[str, Any], transport: str
) -> None:
    with connect(job.servers, 0, 1, transport=transport) as ps:
        declare(ps, **mode)
        for step in range(STEPS):
            ps.push(gradient(step))
            job.restart(step % 2)
        found = ps.pull()["w"]

    np.testing.assert_array_equal(found, trained_here())


@pytest.mark.parametrize("mode", [{"consistency": "sync"}, {"consistency": "async"}])
@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_push_pull_when_the_reply_is_lost_then_the_same_bytes_are_sent_again(
    job: Restartable, mode: dict[str, Any], transport: str
) -> None:
    ps, faults = connect_faulty(job.servers, transport=transport)
    with ps:
        declare(ps, **mode)
        for step in range(STEPS):
            faults.lose_reply("push_pull", shard=step % 2, after=lambda step=step: job.restart(step % 2))
            found = ps.push_pull(gradient(step))["w"]

    np.testing.assert_array_equal(found, trained_here())
    faults.assert_all_fired()


def test_push_when_the_call_has_failed_and_is_made_again_then_it_is_the_same_push(cluster: Callable[..., Any]) -> None:
    ps, faults = connect_faulty(cluster(2).servers, retry_timeout_s=0.2)
    with ps:
        declare(ps)
        ps.push_pull(gradient(0))
        for _ in range(100):
            faults.fail("push_pull", shard=1, error=ShardUnavailable("away"))
        with pytest.raises(ShardUnavailable):
            ps.push_pull(gradient(1))
        faults._before.clear()
        found = ps.push_pull(gradient(1))["w"]

    np.testing.assert_array_equal(found, trained_here(2))


def test_residual_when_the_job_goes_back_then_it_is_dropped(cluster: Callable[..., Any], tmp_path: Path) -> None:
    """What was lost of gradients that do not count any more would be added to those that are made again."""
    settings: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "checkpoint_steps": 5, "lease_s": 60}
    job = cluster(2, **settings)
    with connect(job.servers, 0, 1) as ps:
        declare(ps)
        for step in range(8):
            ps.push_pull(gradient(step))
        until(lambda: CheckpointDirectory(settings["checkpoint_dir"]).newest() is not None)
        job.shards[1].stop()
        job.shards[1] = cluster(2, only=1, listen=job.shards[1].address, **settings).shards[0]
        with pytest.raises(RolledBack):
            ps.push_pull(gradient(8))
        step = ps.clock
        assert not residual(ps).any()
        before = ps.pull()["w"].copy()
        after = ps.push_pull(gradient(step))["w"]

    np.testing.assert_array_equal(before, trained_here(step))
    np.testing.assert_array_equal(after, before + trained_here(1, step))


def test_restore_when_there_are_fewer_shards_then_the_job_goes_on_with_whole_numbers_and_new_residuals(
    cluster: Callable[..., Any], tmp_path: Path
) -> None:
    """Checkpoints hold the masters; the compression may be another one then."""
    settings: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "checkpoint_steps": 3}
    job = cluster(3, **settings)
    with connect(job.servers, 0, 1) as ps:
        declare(ps, pull="bf16")
        for step in range(3):
            ps.push_pull(gradient(step))
    job.finish()

    with connect(cluster(1, **settings).servers, 0, 1) as ps:
        found = declare(ps, "int8").copy()
        assert ps.clock == 3

    np.testing.assert_array_equal(found, trained_here(3))


def test_push_when_it_comes_late_then_it_is_dropped_with_what_it_carried_and_keeps_what_it_has_lost(
    cluster: Callable[..., Any],
) -> None:
    servers = cluster(1).servers
    with connect(servers, 0, 2) as first, connect(servers, 1, 2) as late:
        declare(first, quorum=1)
        declare(late, quorum=1)
        first.push_pull(gradient(0))
        late.push_pull(gradient(0, 1))
        stats, kept = late.stats(), residual(late)
        found = late.pull()["w"]

    expected = np.zeros(SIZE, np.float32)
    codecs.encode("int4", gradient(0, 1)["w"], expected)
    assert stats["blocks_late"] > 0
    np.testing.assert_array_equal(found, trained_here(1))
    np.testing.assert_array_equal(kept, expected)


def test_push_when_a_gradient_is_skipped_then_its_residual_stays(cluster: Callable[..., Any]) -> None:
    with connect(cluster(2).servers, 0, 1) as ps:
        declare(ps, nan_policy="skip")
        ps.push_pull(gradient(0))
        before = residual(ps)
        ps.push_pull({"w": np.full(SIZE, np.nan, np.float32)})
        assert ps.is_skipped
        np.testing.assert_array_equal(residual(ps), before)
        found = ps.push_pull(gradient(1))["w"]

    np.testing.assert_array_equal(found, trained_here(2))


def test_push_when_a_gradient_is_not_finite_then_nothing_is_sent_and_the_residual_stays(cluster: Callable[..., Any]) -> None:
    with connect(cluster(2).servers, 0, 1) as ps:
        declare(ps)
        ps.push_pull(gradient(0))
        before = residual(ps)
        with pytest.raises(NonFiniteGradient, match="'w' at step 1 holds NaN"):
            ps.push_pull({"w": np.full(SIZE, np.inf, np.float32)})
        np.testing.assert_array_equal(residual(ps), before)


def test_worker_when_it_begins_anew_then_its_residual_is_lost(cluster: Callable[..., Any]) -> None:
    """As with a gradient that its process had not sent."""
    servers = cluster(2).servers
    with connect(servers, 0, 2) as other:
        with connect(servers, 1, 2) as first:
            declare(other, consistency="async")
            declare(first, consistency="async")
            first.push(gradient(0))
        with connect(servers, 1, 2) as second:
            declare(second, consistency="async")
            assert not residual(second).any()
            second.push(gradient(1))
        found = other.pull()["w"]

    np.testing.assert_array_equal(found, trained_here(1) + trained_here(1, 1))
