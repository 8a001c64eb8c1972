"""`optimizer.stop()` on one worker: every worker makes the same steps, in every mode, with and without overlap."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import psd_client.torch as psd  # noqa: E402
from psd_client import Drained, connect  # noqa: E402

MODES = {
    "sync": {},
    "exact": {"aggregation": "exact"},
    "ssp": {"consistency": "ssp:1"},
    "async": {"consistency": "async"},
    "overlap": {"overlap": True},
    "overlap-exact": {"overlap": True, "aggregation": "exact"},
    "overlap-ssp": {"overlap": True, "consistency": "ssp:1"},
    "forward": {"overlap": "forward", "consistency": "async"},
}


@pytest.mark.parametrize("mode", MODES)
def test_all_workers_end_at_the_same_step(mode: str, cluster: Callable[..., Any]) -> None:
    """By Drained, before anything of that step is sent; with rounds, with the same model. They get the same sum over both."""
    started = cluster(2)

    def train(rank: int) -> Any:
        model = torch.nn.Linear(300, 20)
        losses = []
        with connect(started.servers, rank, 2) as ps:
            optimizer = psd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01), ps=ps, **MODES[mode])
            with pytest.raises(Drained) as ended:
                while True:
                    inputs = torch.randn(8, 300, generator=torch.Generator().manual_seed(2 * ps.clock + rank))
                    optimizer.zero_grad()
                    loss = model(inputs).square().mean()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.detach())
                    if rank == 1 and ps.clock >= 4 and not ps.is_over:  # with "forward" it may have gone from 3 to 5
                        assert optimizer.stop() >= 6
            assert ps.is_over
            total = ps.all_reduce({"loss": losses[-1], "steps": ps.clock, "float16": torch.tensor([0.5]).half()})
            assert ps.clock == ended.value.clock
        return ps.clock, dict(total), [parameter.detach().clone() for parameter in model.parameters()]

    with ThreadPoolExecutor(2) as pool:
        (steps, total, model), (others_steps, others_total, others) = pool.map(train, range(2))

    assert (steps, total) == (others_steps, others_total)
    assert (total["steps"], total["float16"]) == (2 * steps, 1.0)
    assert all(each.shard.schedule.is_left_in_order for each in started.shards)
    if "consistency" not in MODES[mode]:
        assert steps == 6
        assert all(torch.equal(value, other) for value, other in zip(model, others, strict=True))
