"""Torch's compiler, which takes as long to load as torch: psd does not load it, and programs that tests start need not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import backward, batch, small_model, values  # noqa: E402
from torch.optim import SGD, AdamW  # noqa: E402

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("later_compiler")]

OPTIMIZERS = {"sgd": lambda p: SGD(p, lr=0.1, momentum=0.9), "adamw": lambda p: AdamW(p, lr=0.01)}
PROGRAM = """
import json, sys
import psd_client.torch, psd_client.torchrec
def loaded():
    return [name for name in ("torch._dynamo", "torch._decomp", "torch._refs") if name in sys.modules]
is_loaded = [loaded()]
sys.path[:0] = sys.argv[1:]
from test_torch_later_compiler import trained
found = trained()
is_loaded.append(loaded())
import torch
compiled = torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
found["later"] = trained()
print(json.dumps([is_loaded, compiled.tolist(), found]))
"""


def trained():
    found = {}
    for name, make in OPTIMIZERS.items():
        model = small_model()
        optimizer = make(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for step in range(5):
            backward(model, *batch(step))
            optimizer.step()
            schedule.step()
            optimizer.load_state_dict(optimizer.state_dict())
        found[name] = [value.tolist() for value in values(model)]
    return found


def test_a_program_without_it_computes_the_same_and_compiles_what_it_wants():
    run = subprocess.run([sys.executable, "-c", PROGRAM, *sys.path], capture_output=True, text=True, timeout=280, check=False)

    assert run.returncode == 0, run.stderr
    is_loaded, compiled, found = json.loads(run.stdout)
    assert is_loaded == [[], []]
    assert compiled == [2.0, 2.0]
    assert found.pop("later") == found == trained()
