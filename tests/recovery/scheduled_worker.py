"""A worker whose learning rate follows a schedule that is kept. python scheduled_worker.py FILE, if one is to die.

The gradient is 1, so the weight is the sum of the rates of all rounds. If FILE exists, it removes that and dies in
the fifth step.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

import psd_client.torch as psd

STEPS = 8


def main(*files: str) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = psd.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0))
    scheduler = psd.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5))
    say("begins at", optimizer.ps.clock, "with", optimizer.param_groups[0]["lr"])
    while optimizer.ps.clock < STEPS:
        if optimizer.ps.clock == 4 and any(map(os.path.exists, files)):
            Path(*files).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model.weight.sum().backward()
        optimizer.step()
        scheduler.step()
    say("trained to", model.weight.item(), "overruled", optimizer.ps.stats()["pushes_overruled"])


def say(*words: object) -> None:
    print(*words, flush=True)  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main(*sys.argv[1:])
