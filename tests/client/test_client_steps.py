"""Armed steps at the worker: they do what push_pulls do, whatever becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from client_faults import Thread
from translated_steps import TranslatedStream

import psd.rim.bulk_server
import psd_client


@pytest.fixture(autouse=True)
def stepping(monkeypatch: pytest.MonkeyPatch) -> type[TranslatedStream]:
    class Ours(TranslatedStream):
        pass

    monkeypatch.setattr(psd.rim.bulk_server, "Stream", Ours)
    return Ours


VALUES = {"w": np.zeros((5, 7), np.float32), "b": np.zeros(3, np.float64), "h": np.zeros(11, np.float32)}


def exchange_of(ps: psd_client.ParameterServer) -> Any:
    return ps._worker.declared


def gradients(rank: int, step: int) -> dict[str, Any]:
    random = np.random.default_rng([rank, step])
    made = {"w": random.integers(-8, 8, (5, 7)).astype(np.float32), "b": random.integers(-8, 8, 3).astype(np.float64)}
    made["h"] = random.integers(-8, 8, 11).astype(np.float32)
    return made if step % 3 else {name: made[name] for name in ("w", "b")}


@pytest.mark.parametrize("again", [0.0, 0.3])
@pytest.mark.parametrize("consistency", ["async", "sync"])
@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_steps(cluster: Callable[..., Any], stepping: Any, transport: str, shards: int, consistency: str, again: float) -> None:
    servers = cluster(shards).servers
    stepping.again = stepping.late_again = again

    def train(rank: int) -> tuple[dict[str, Any], dict[str, int]]:
        with psd_client.connect(servers, rank, 2, transport=transport, wait_timeout=60) as ps:
            groups = [{"params": [name]} for name in VALUES]
            ps.declare(VALUES, psd_client.SGD(lr=1.0), groups=groups, consistency=consistency, reduce="sum")
            stepping.layout = exchange_of(ps)._layout
            for step in range(30):
                got = ps.push_pull(gradients(rank, step))
            ps.barrier("end")
            got = ps.pull()
            return got, ps.stats()

    results = [worker.result() for worker in [Thread(lambda rank=rank: train(rank)) for rank in range(2)]]
    expected = {name: np.zeros_like(value) for name, value in VALUES.items()}
    for rank in range(2):
        for step in range(30):
            for name, value in gradients(rank, step).items():
                expected[name] -= value
    for got, stats in results:
        for name in VALUES:
            assert got[name].tolist() == expected[name].tolist()
        assert stats["pushes"] == 30
        assert stats["blocks_counted"] + stats["blocks_duplicate"] == 30 * 3
    assert stepping.steps > 10
