"""A small convolutional network that workers train; each number that they compute depends on all updates before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

import psd_client
from psd_client.torch import distribute

WORLD_SIZE = 3


def _model() -> nn.Sequential:
    """About 0.6 million parameters: two blocks on each of two shards."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 10 * 10, 384), nn.ReLU(),
        nn.Linear(384, 10),
    )  # fmt: skip
    # Not torch's global seed, which is one for all threads.
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.04, 0.04, generator)
    return model


def train(servers: str, rank: int, on_step: Callable[[], object], steps: int, transport: str) -> dict[str, NDArray[Any]]:
    """Synchronous, exact; the learning rate changes, the batches differ in size. Returns the model's values."""
    torch.set_num_threads(1)
    model = _model()
    inputs = torch.Generator().manual_seed(100 + rank)
    with psd_client.connect(servers, rank, WORLD_SIZE, transport=transport, retry_timeout=60, wait_timeout=100) as ps:
        optimizer = distribute(
            model,
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3),
            ps=ps,
            consistency="sync",
            aggregation="exact",
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
        for step in range(steps):
            size = 3 + (rank + step) % 3
            images = torch.randn((size, 1, 14, 14), generator=inputs)
            labels = torch.randint(10, (size,), generator=inputs)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step(batch_size=size)
            schedule.step()
            on_step()
    return {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
