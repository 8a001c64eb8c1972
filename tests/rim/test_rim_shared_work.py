"""Calls that wait for one round apply its updates together."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import psd_client
import psd_core

TENSORS = {"first": 40_000, "second": 50_000, "third": 60_000}  # each a block, which is lent
ROUNDS = 5


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is shared on Linux")
def test_a_call_passes_by_a_block_at_which_another_one_is_at_work(
    cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that updates the second block waits until the other one has updated the third. In one of some rounds: two calls
    may find a block free at the same time."""
    third_done = [threading.Event() for _ in range(ROUNDS)]
    thirds = iter(third_done)
    waited: list[bool] = []
    kernel = psd_core.step_block

    def step_block(*args: Any, **options: Any) -> None:
        if len(args[1]) == TENSORS["second"]:
            waited.append(any(waited) or third_done[len(waited)].wait(10))
        kernel(*args, **options)
        if len(args[1]) == TENSORS["third"]:
            next(thirds).set()

    monkeypatch.setattr(psd_core, "step_block", step_block)
    servers = cluster(1, lease_s=120).servers

    def train(rank: int) -> dict[str, Any]:
        with psd_client.connect(servers, rank, 2, transport="shm", wait_timeout=100) as ps:
            start = {name: np.zeros(size, np.float32) for name, size in TENSORS.items()}
            ps.declare(start, psd_client.SGD(lr=1.0), reduce="sum", groups=[{"params": [name]} for name in TENSORS])
            for _ in range(ROUNDS):
                found = ps.push_pull({name: np.full(size, 1 + rank, np.float32) for name, size in TENSORS.items()})
            return dict(found)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(train, range(2)))

    assert any(waited)
    for parameters in found:
        assert {name: set(values.tolist()) for name, values in parameters.items()} == {
            name: {-3.0 * ROUNDS} for name in TENSORS
        }
