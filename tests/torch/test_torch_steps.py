"""The steps of a small model are armed, and end in the bits that they end in without that."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import STEPS, backward, batch, small_model, values  # noqa: E402
from torch.optim import Adam  # noqa: E402

import psd_client.torch as psd  # noqa: E402
from psd_client import connect  # noqa: E402


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_small_model_ends_in_the_same_bits_whether_armed_or_not(cluster, watch, transport, dtype):
    ends = []
    for never_armed in (True, False):
        with connect(cluster(2, never_armed=never_armed).servers, 0, 1, transport=transport) as ps:
            model = small_model(dtype)
            optimizer = psd.distribute(model, Adam(model.parameters(), lr=0.1), ps=ps)
            for step in range(STEPS):
                backward(model, *batch(step, dtype))
                optimizer.step()
            ends.append([value.view(torch.uint8).numpy().tobytes() for value in values(model)])
        assert (True in watch.took) is not never_armed

    assert ends[0] == ends[1]
