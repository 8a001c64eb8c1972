"""The depth of calls from a shard's socket to its kernels: each frame is something that a reader must keep in mind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import psd_client
import psd_core
from psd.rim.bulk_connection import ServedConnection
from psd.state.aggregation import small_block

FRAMES_MAX = 10
KERNELS = ("accumulate", "scaled_copy", "step_block")
TENSORS = {f"w{i}": np.ones(50, np.float32) for i in range(3)}


def frames() -> tuple[str, ...]:
    """The calls under way in this thread, from the one that has read the socket to the one that calls the kernel."""
    found, frame = [], sys._getframe(2)
    while frame is not None:
        found.append(f"{frame.f_globals['__name__']}: {getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)}")
        if frame.f_code is ServedConnection.serve.__code__:
            return tuple(reversed(found))
        frame = frame.f_back
    return ()


@pytest.mark.parametrize("consistency", ["sync", "async"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_from_the_socket_to_the_kernel_the_calls_are_few(
    cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, transport: str, consistency: str
) -> None:
    """In a push_pull, for the kernels that add gradients and those that apply them; of small blocks no Python calls these."""
    chains: dict[str, set[tuple[str, ...]]] = {name: set() for name in KERNELS}

    def watch(name: str) -> None:
        kernel = getattr(psd_core, name)

        def watched(*args: Any, **options: Any) -> None:
            chains[name].add(frames())
            kernel(*args, **options)

        monkeypatch.setattr(psd_core, name, watched)

    for name in KERNELS:
        watch(name)
    monkeypatch.setattr(small_block, "BYTES_MAX", 0)
    servers = cluster(1, lease_s=60).servers

    def train(rank: int) -> None:
        with psd_client.connect(servers, rank, 3, transport=transport, wait_timeout=60) as ps:
            ps.declare(TENSORS, psd_client.SGD(lr=0.1), consistency=consistency, groups=[{"params": [n]} for n in TENSORS])
            for _ in range(5):
                ps.push_pull({name: np.ones(50, np.float32) for name in TENSORS})

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(train, range(3)))

    longest = max((chain for found in chains.values() for chain in found), key=len)
    assert [name for name in KERNELS if chains[name] - {()}] == (list(KERNELS) if consistency == "sync" else ["step_block"])
    assert len(longest) <= FRAMES_MAX, "\n".join(longest)
