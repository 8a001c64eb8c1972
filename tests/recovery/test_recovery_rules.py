"""Every rule: the same bits on any number of shards, and when it is stopped, stored, and restored on another number of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psd_client
from psd_core.optimizer import Optimizer

SHAPES = {
    "weight": ((90, 70), "float32"),
    "bias": ((170,), "float32"),
    "double": ((37, 11), "float64"),
    "scale": ((), "float32"),
    "half": ((60, 9), "float16"),
}
STEPS, STOP = 8, 4
CUSTOM = "sample_rules:Drifting"
EXACT = {"consistency": "sync", "aggregation": "exact"}

OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": psd_client.SGD(lr=0.1, momentum=0.9, dampening=0.1),
    "Adagrad": psd_client.Adagrad(lr_decay=0.1, initial_accumulator_value=0.25, weight_decay=0.1),
    "Adadelta": psd_client.Adadelta(weight_decay=0.1),
    "RMSprop": psd_client.RMSprop(centered=True, momentum=0.9, weight_decay=0.1),
    "Adam": psd_client.Adam(weight_decay=0.1, maximize=True),
    "AMSGrad": psd_client.Adam(amsgrad=True),
    "AdamW": psd_client.AdamW(),
    "Adamax": psd_client.Adamax(weight_decay=0.1),
    "NAdam": psd_client.NAdam(weight_decay=0.1),
    "FTRL": psd_client.FTRL(lr=0.1, l1=0.01, l2=0.1),
    "LAMB": psd_client.LAMB(lr=1e-2),
    "Lion": psd_client.Lion(lr=1e-2, weight_decay=0.1),
    "CustomRule": psd_client.CustomRule(CUSTOM, lr=0.05),
}
CLIPPED = ("SGD", "LAMB")  # by a norm that most gradients are above

# An optimizer, and clip_norm.
CASES = {name: (optimizer, None) for name, optimizer in OPTIMIZERS.items()} | {
    f"{name} clipped": (OPTIMIZERS[name], 5.0) for name in CLIPPED
}


MOVES = [(1, 3), (5, 2)]
"""Shards before and after: each rule has one of them, those with norms have both."""


def initial_values() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal(shape).astype(dtype) for name, (shape, dtype) in SHAPES.items()}


def gradients(params: dict[str, Any], rank: int, step: int) -> dict[str, Any]:
    """Some tensors have none in some steps, so that tensors are at different steps."""
    grads = {name: ((np.sin(value + rank + step) + value) / 7).astype(value.dtype) for name, value in params.items()}
    return {name: grads[name] for i, name in enumerate(grads) if (step + i) % 4}


def train(servers: str, rank: int, optimizer: Optimizer, until: int, clip_norm: float | None) -> list[dict[str, Any]]:
    after = []
    with psd_client.connect(servers, rank, 2, wait_timeout=60) as ps:
        params = ps.declare(initial_values(), optimizer, **EXACT, clip_norm=clip_norm)
        while ps.clock < until:
            params = ps.push_pull(gradients(params, rank, ps.clock), weight=1 + (rank + ps.clock) % 3)
            after.append({name: value.copy() for name, value in params.items()})
    return after


def run(servers: str, optimizer: Optimizer, clip_norm: float | None = None, until: int = STEPS) -> list[dict[str, Any]]:
    """The parameters after each step."""
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(train, servers, rank, optimizer, until, clip_norm) for rank in range(2)]
        return [job.result() for job in jobs].pop()


def assert_same_bits(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {name: array.tobytes() for name, array in actual.items()} == {n: array.tobytes() for n, array in expected.items()}
    assert all(np.isfinite(array).all() for array in actual.values())


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [(name, *move) for i, name in enumerate(CASES) for move in (MOVES if "clipped" in name else MOVES[i % 2 :][:1])],
)
def test_a_job_that_is_stopped_goes_on_elsewhere_with_the_same_bits(
    cluster: Callable[..., Any],
    tmp_path: Path,
    name: str,
    before: int,
    after: int,
) -> None:
    """Slots, the steps of each tensor, and the float32 masters of half-precision ones are in the checkpoint.

    Before it, too, any number of shards gives the bits of one, with norms over whole tensors and over all of them.
    """
    url, case = str(tmp_path / "checkpoints"), CASES[name]
    expected = run(cluster(1, rules=(CUSTOM,)).servers, *case)
    first = cluster(before, checkpoint_dir=url, rules=(CUSTOM,))
    stopped = run(first.servers, *case, until=STOP)
    first.finish()
    restored = run(cluster(after, checkpoint_dir=url, rules=(CUSTOM,)).servers, *case)

    assert_same_bits(stopped[-1], expected[STOP - 1])
    assert_same_bits(restored[-1], expected[-1])


def test_a_checkpoint_with_another_constant_is_another_job(cluster: Callable[..., Any], tmp_path: Path) -> None:
    url = str(tmp_path / "checkpoints")
    first = cluster(1, checkpoint_dir=url)
    run(first.servers, psd_client.Adagrad(initial_accumulator_value=0.25), until=STOP)
    first.finish()
    second = cluster(1, checkpoint_dir=url)

    with pytest.raises(
        psd_client.SpecMismatch, match=r"initial_accumulator_value of parameter group 0: 0\.25 in checkpoint .*, 0\.5 in"
    ):
        run(second.servers, psd_client.Adagrad(initial_accumulator_value=0.5))


def test_slots_begin_with_their_own_values(cluster: Callable[..., Any]) -> None:
    """PEERS: slots that begin as the parameters do. The first step of Adagrad, by hand: 8 - 1 * 3 / sqrt(16 + 9)."""
    optimizer = psd_client.Adagrad(lr=1, initial_accumulator_value=16, eps=0)
    with psd_client.connect(cluster(1).servers, 0, 1) as ps:
        ps.declare({"w": np.full(5, 8, np.float64), "other": np.zeros(3)}, optimizer)

        first = ps.push_pull({"w": np.full(5, 3.0)})
        second = ps.push_pull({"other": np.full(3, 3.0)})

    assert first["w"].tolist() == second["w"].tolist() == [7.4] * 5
    assert first["other"].tolist() == [0] * 3
    assert second["other"].tolist() == [-0.6] * 3


def test_steps_count_updates_and_not_pushes(cluster: Callable[..., Any]) -> None:
    """PEERS: a counter that every push moves on. Four workers, one round: Adam is at step 1, its step is lr exactly."""
    servers = cluster(2).servers

    def worker(rank: int) -> Any:
        with psd_client.connect(servers, rank, 4, wait_timeout=60) as ps:
            ps.declare({"w": np.zeros(5)}, psd_client.Adam(lr=0.5, betas=(0.5, 0.75), eps=0))
            return ps.push_pull({"w": np.full(5, 3.0)})["w"].tolist()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(worker, range(4))) == [[-0.5] * 5] * 4
