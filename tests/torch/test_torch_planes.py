"""Models that are trained beside their shard: parameters are copied into them once, straight from the shard's pages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from helpers_torch import Unlike  # noqa: E402
from short_ways import reads_planes  # noqa: E402

import psd_client.torch as psd  # noqa: E402

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="shards share memory with workers on Linux")

STEPS = 5


def train(ps: Any, *, is_here: bool, overlap: Any, **options: Any) -> list[Any]:
    """Train for some steps; the parameters after each."""
    model, generator = Unlike(), torch.Generator().manual_seed(0)  # threads share torch's own
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    given = torch.optim.Adam(model.parameters(), lr=2.0**-5)
    optimizer = psd.distribute(model, given, ps=ps, overlap=overlap, **options)
    found = []
    for number in range(STEPS):
        optimizer.zero_grad()
        sum(((number + 1 + ps.rank) * parameter.float() ** 2).sum() for parameter in model.parameters()).backward()
        optimizer.step()
        if overlap != "forward":
            assert reads_planes(ps) == is_here
            found.append([parameter.detach().clone() for parameter in model.parameters()])
    optimizer.pull()
    assert reads_planes(ps) == is_here
    return [*found, [parameter.detach().clone() for parameter in model.parameters()]]


@pytest.mark.parametrize(
    ("overlap", "world_size", "consistency"),
    [(False, 1, "async"), (True, 1, "async"), ("forward", 1, "async"), (False, 2, "sync"), (True, 2, "sync")],
)
def test_train_when_pages_are_read_then_the_bits_are_those_that_come_over_a_socket(
    run_workers: Callable[..., Any], overlap: Any, world_size: int, consistency: str
) -> None:
    def trained(transport: str) -> list[Any]:
        return run_workers(
            world_size,
            1,
            lambda ps: train(ps, is_here=transport == "shm", overlap=overlap, consistency=consistency),
            transport=transport,
        )

    here, there = trained("shm"), trained("tcp")
    if overlap == "forward":  # which gradients a step has seen depends on what has come in time
        return
    for own, other in zip(here, there, strict=True):
        for step, expected in zip(own, other, strict=True):
            assert all(torch.equal(found, value) for found, value in zip(step, expected, strict=True))


def test_a_view_of_what_cannot_be_written_to_warns_nobody(recwarn: pytest.WarningsRecorder) -> None:
    from psd_client.torch.parameters import as_tensor

    array = np.arange(3, dtype=np.float32)
    array.flags.writeable = False
    assert as_tensor(array).tolist() == [0, 1, 2]
    assert len(recwarn) == 0
