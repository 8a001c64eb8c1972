"""A job that goes back to a checkpoint under a torch optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.optim import SGD  # noqa: E402

import psd_client  # noqa: E402
import psd_client.torch as psd  # noqa: E402
from psd.checkpoint import CheckpointDirectory, CheckpointState  # noqa: E402

STEPS_BEFORE = 12
STEPS_AFTER = 6
IDS = torch.arange(60)


class Model(torch.nn.Module):
    """A parameter of several blocks on both shards, a buffer, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1500, 1000))
        self.register_buffer("steps", torch.tensor(0))
        self.rows = psd.Embedding("rows", 4, init=psd_client.Zeros())


@pytest.mark.parametrize("overlap", [False, True, "forward"])
def test_step_after_the_job_has_gone_back_then_goes_on(cluster: Any, tmp_path: Path, overlap: bool | str) -> None:
    """Also if nobody calls pull(): the model is then of versions that do not exist any more.

    The push that meets the return is lost with what had counted since the checkpoint; each later step counts once, rows too.
    """
    url = str(tmp_path / "checkpoints")
    options: dict[str, Any] = {"checkpoint_dir": url, "checkpoint_steps": 5, "lease_s": 60}
    running = cluster(2, **options)
    address = running.shards[1].address
    model = Model()
    with psd_client.connect(running.servers, 0, 1, wait_timeout=120) as ps:
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=1.0), ps=ps, consistency="async", overlap=overlap)

        def step() -> bool:
            """False if the job has gone back."""
            try:
                optimizer.zero_grad()
                model.steps += 1
                (model.weight.sum() + model.rows(IDS).sum()).backward()
                optimizer.step()
            except psd_client.RolledBack:
                return False
            return True

        for _ in range(STEPS_BEFORE):
            assert step()
        while not any(found.state is CheckpointState.VALID for found in CheckpointDirectory(url).checkpoints()):
            ps.barrier("a checkpoint")
        running.shards[1].stop()
        cluster(2, only=1, listen=address, **options)
        while step():
            pass
        clock = ps.clock
        assert clock < STEPS_BEFORE
        for _ in range(STEPS_AFTER):
            assert step()
        optimizer.pull()

        assert model.weight.eq(-clock - STEPS_AFTER).all()
        assert model.rows(IDS).eq(-clock - STEPS_AFTER).all()
        assert model.steps < STEPS_BEFORE + STEPS_AFTER  # the checkpoint's, and those since
