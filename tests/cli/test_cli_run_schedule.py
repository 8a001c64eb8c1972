"""psd-run: a worker that is killed and started again has a learning-rate schedule that begins anew, and the job has its own."""

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
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
if "kept" in sys.argv:
    scheduler = psd.scheduler(scheduler)
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
def test_job_when_a_worker_returns_with_a_schedule_that_begins_anew_then_all_train_to_the_same(job, tmp_path):
    """It pushes the rates of step 0, which stood for whole rounds once and ended all others; now it gives way, and is told."""
    (tmp_path / "die").touch()
    run = job(
        TRAINING,
        *("--shards", "2", "--workers", "2", "--max-restarts", "1", "--lease", "60"),
        args=(str(tmp_path / "die"),),
    )

    assert run.end() == 0, run.output
    for rank in range(2):
        assert f"[worker {rank}] trained to {UNDISTURBED}" in run.output
    assert "ScalarsDisagree" not in run.output
    assert "psd: worker 1: in step 4 its lr of group 0, 1.0, gives way to worker 0's, 0.25" in run.output


@pytest.mark.process
def test_job_when_the_schedule_is_kept_then_the_worker_returns_at_the_rate_of_its_step(job, tmp_path):
    """There is nothing to give way."""
    (tmp_path / "die").touch()
    run = job(
        TRAINING,
        *("--shards", "2", "--workers", "2", "--max-restarts", "1", "--lease", "60"),
        args=(str(tmp_path / "die"), "kept"),
    )

    assert run.end() == 0, run.output
    assert "[worker 1] begins at 4 with 0.25" in run.output
    for rank in range(2):
        assert f"[worker {rank}] trained to {UNDISTURBED} overruled 0" in run.output
    assert "gives way" not in run.output
