"""A program for test_trainers_accelerate.py: a loop as it is written for Accelerate, with gradients of two batches a step.

python train_accelerate.py DIRECTORY BATCH WAY...; BATCH: samples of a batch on one worker. Ways: "alone", without psd.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from psd_client.integrations import accelerate as psd_accelerate


def main() -> None:
    directory, batch, ways = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    torch.manual_seed(5)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(2))
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), batch_size=batch)
    if "alone" in ways:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    else:
        model, optimizer, loader = psd_accelerate.distribute(accelerator, model, optimizer, loader)
    steps = 0
    for _ in range(3):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            steps += accelerator.sync_gradients
    values = {name: tensor.numpy() for name, tensor in accelerator.unwrap_model(model).state_dict().items()}
    np.savez(directory / f"trained-{os.environ.get('PSD_RANK', '0')}.npz", steps=steps, **values)


if __name__ == "__main__":
    main()
