"""psd-run: a worker that is killed and started again has the job's learning rate, by a schedule that is kept."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("later_compiler")

STEPS = 8

TRAINING = f"""
import os, signal, sys
import torch
import psd_client.torch as psd

model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = psd.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0))
scheduler = psd.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5))
print("begins at", optimizer.ps.clock, "with", optimizer.param_groups[0]["lr"], flush=True)
while optimizer.ps.clock < {STEPS}:
    if optimizer.ps.rank == 1 and optimizer.ps.clock == 4 and os.path.exists(sys.argv[1]):
        os.remove(sys.argv[1])
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model.weight.sum().backward()
    optimizer.step()
    scheduler.step()
print("trained to", model.weight.item(), "overruled", optimizer.ps.stats()["pushes_overruled"])
"""
"""The gradient is 1, so the weight is the sum of the rates of all rounds. If the file that it is given exists, worker 1 removes
it and dies in the fifth step."""

UNDISTURBED = -sum(0.5 ** (step // 2) for step in range(STEPS))


@pytest.mark.process
def test_job_when_the_schedule_is_kept_then_the_worker_returns_at_the_rate_of_its_step(job, tmp_path):
    """There is nothing to give way, as there is to one that begins anew: tests/client/test_client_attendance.py."""
    (tmp_path / "die").touch()
    run = job(
        TRAINING,
        *("--shards", "2", "--workers", "2", "--max-restarts", "1", "--lease", "60"),
        args=(str(tmp_path / "die"),),
    )

    assert run.end() == 0, run.output
    assert "[worker 1] begins at 4 with 0.25" in run.output
    for rank in range(2):
        assert f"[worker {rank}] trained to {UNDISTURBED} overruled 0" in run.output
    assert "gives way" not in run.output
