"""A convolutional network trains while shards are killed and connections break: the same bits as without all that."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chaos import assert_same_bits, final_state, run_disturbed, steps_for
from shard_processes import ShardProcess

pytest.importorskip("torch")
import convnet

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("transport", "kills", "faults", "seed"),
    [
        pytest.param("tcp", 3, 2, 20, id="short"),
        pytest.param("grpc", 50, 10, 21, id="long", marks=[pytest.mark.chaos, pytest.mark.timeout(1200)]),
    ],
)
def test_training_when_shards_are_killed_and_connections_break_then_ends_in_the_same_bits(
    shard_processes: Callable[..., list[ShardProcess]], tmp_path: Path, transport: str, kills: int, faults: int, seed: int
) -> None:
    """Synchronous, exact, 3 workers x 2 shards: the workers' models, and what the shards hold, momentum included."""
    steps = steps_for(kills, faults)
    ends: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []

    for name, (k, f) in {"undisturbed": (0, 0), "disturbed": (kills, faults)}.items():
        url = str(tmp_path / name)
        shards = shard_processes(2, "--checkpoint-dir", url, "--lease", "60")
        work = functools.partial(convnet.train, steps=steps)
        models = run_disturbed(shards, convnet.WORLD_SIZE, work, transport=transport, seed=seed, kills=k, faults=f)
        ends.append((models, final_state(shards, url)))

    (undisturbed_models, undisturbed), (disturbed_models, disturbed) = ends
    assert any("momentum" in name for name in undisturbed)
    assert_same_bits(undisturbed, disturbed)
    for one, other in zip(undisturbed_models, disturbed_models, strict=True):
        assert_same_bits(one, undisturbed_models[0])
        assert_same_bits(one, other)
