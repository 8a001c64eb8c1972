"""Shards that are killed at random instants and started again, under workers that push, and then pull.

test_recovery_convnet.py does the same to push_pull, test_recovery_async.py to jobs without rounds.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos import assert_same_bits, final_state, run_disturbed, steps_for
from numpy.typing import NDArray
from shard_processes import ShardProcess

import psd_client
from psd_client.worker.session.session import Session

pytestmark = pytest.mark.process

SHAPES = {"weight": (120, 700), "bias": (700,), "scale": ()}
WORLD_SIZE = 3
KILLS = 3


COMPRESSED = {"aggregation": "exact", "compress": "int4", "rounding": "stochastic", "pull": "int4"}
"""Residuals are of all pushes before, parameters of all differences: one that was taken twice, or lost, shows in every later
number."""

JOBS: dict[str, tuple[Any, dict[str, Any]]] = {
    "exact": (psd_client.SGD(lr=0.1, momentum=0.9), {"aggregation": "exact"}),
    "norms": (psd_client.LAMB(lr=0.1), {"clip_norm": 20.0}),
    "compressed": (psd_client.SGD(lr=0.1, momentum=0.9), COMPRESSED),
}
TRANSPORTS = {"exact": "shm", "norms": "grpc", "compressed": "tcp"}
"""test_recovery_convnet.py has tcp."""


def train(
    servers: str, rank: int, on_step: Callable[[], object], *, steps: int, job: str, transport: str
) -> dict[str, NDArray[Any]]:
    """Gradients depend on the parameters, so that one lost, doubled or late update shows in every later number."""
    rng = np.random.default_rng(1)
    initial = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    with psd_client.connect(servers, rank, WORLD_SIZE, transport=transport, retry_timeout=60, wait_timeout=100) as ps:
        optimizer, declaration = JOBS[job]
        params = ps.declare(initial, optimizer, consistency="sync", **declaration)
        for step in range(steps):
            grads = {name: (np.sin(value + rank + step) + value) / 7 for name, value in params.items()}
            ps.push(grads, weight=1 + (rank + step) % 3)
            params = ps.pull()
            on_step()
    return params


@pytest.mark.parametrize("job", JOBS)
def test_exact_when_shards_are_killed_between_push_and_pull_then_training_ends_in_the_same_bits(
    shard_processes: Callable[..., list[ShardProcess]], tmp_path: Path, job: str
) -> None:
    """A push that was acknowledged, but whose round was open, is sent again to the shard that lost it; what was measured before
    is measured again, or is known."""
    ends = []
    for name, kills in {"undisturbed": 0, "disturbed": KILLS}.items():
        url = str(tmp_path / name)
        shards = shard_processes(2, "--checkpoint-dir", url, "--lease", "60")
        work = functools.partial(train, steps=steps_for(KILLS, 0), job=job)
        pulled = run_disturbed(shards, WORLD_SIZE, work, transport=TRANSPORTS[job], seed=10, kills=kills, faults=0)
        ends.append((pulled, final_state(shards, url)))

    (undisturbed_pulls, undisturbed), (disturbed_pulls, disturbed) = ends
    assert_same_bits(undisturbed, disturbed)
    for one, other in zip(undisturbed_pulls, disturbed_pulls, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize(("transport", "deaths"), [("shm", 1), ("tcp", 2), ("grpc", 1)])
def test_a_shard_that_is_killed_between_join_and_declaration_is_joined_anew(
    shard_processes: Callable[..., list[ShardProcess]], transport: str, deaths: int
) -> None:
    """It knows nothing, and has another run: so has the job, which has not begun."""
    (shard,) = shard_processes(1)
    with (
        psd_client.connect(shard.address, 0, 2, transport=transport, retry_timeout=60) as ps,
        psd_client.connect(shard.address, 1, 2, transport=transport, retry_timeout=60) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        for _ in range(deaths):
            shard.kill()
            shard.start()

        workers = (ps, other)
        for job in [pool.submit(w.declare, {"w": np.zeros(3, np.float32)}, psd_client.SGD(lr=1.0)) for w in workers]:
            job.result(100)
        found = [pool.submit(w.push_pull, {"w": np.ones(3, np.float32)}) for w in workers]

        assert [f.result(100)["w"].tolist() for f in found] == [[-1.0] * 3] * 2


def test_a_worker_whose_shard_was_killed_before_it_declares_finds_the_run_that_others_have_begun(
    shard_processes: Callable[..., list[ShardProcess]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker has given the restarted shard its values, and reads them between the refusal and the new join."""
    (shard,) = shard_processes(1)
    initial, sgd = {"w": np.zeros(3, np.float32)}, psd_client.SGD(lr=1.0)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:

        def connect(rank: int) -> psd_client.ParameterServer:
            return stack.enter_context(psd_client.connect(shard.address, rank, 2, transport="grpc", retry_timeout=60))

        ps = connect(0)
        shard.kill()
        shard.start()
        other = connect(1)
        other.declare(initial, sgd)
        join_anew, joined = Session.join_anew, []

        def join_late(session: Session) -> None:
            joined.append(other.pull())
            join_anew(session)

        monkeypatch.setattr(Session, "join_anew", join_late)
        ps.declare(initial, sgd)
        found = [pool.submit(w.push_pull, {"w": np.ones(3, np.float32)}) for w in (ps, other)]

        assert [f.result(100)["w"].tolist() for f in found] == [[-1.0] * 3] * 2
        assert len(joined) == 1
