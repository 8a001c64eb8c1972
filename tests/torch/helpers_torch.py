"""Helpers of the torch tests: a small model, its data, and ordinary training in one process to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import psd_client.torch as psd
from psd.contract.layout import BLOCK_BYTES_MAX
from psd_client import ParameterServer

STEPS = 20


def small_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """The same values at each call, also from several threads at once (torch's global seed is one for all threads)."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4, generator)
    return model.to(dtype)


class Unlike(nn.Module):
    """A parameter of several blocks, one that is no plain memory, one of another dtype than its master's, a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(3, BLOCK_BYTES_MAX // 4))
        self.turned = nn.Parameter(torch.zeros(5, 7).t())
        self.low = nn.Parameter(torch.zeros(9, dtype=torch.bfloat16))
        self.last = nn.Parameter(torch.zeros(3))


def batch(step: int, dtype: torch.dtype = torch.float32, size: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = (size, 6), (size, 3)
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shape)  # type: ignore[return-value]


def part(step: int, rank: int, world_size: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """A worker's share of the batch. Shares are uneven: of 12 samples, two workers get 3 and 9."""
    x, y = batch(step, dtype)
    bounds = [0, *(3 * r for r in range(1, world_size)), len(x)]
    return x[bounds[rank] : bounds[rank + 1]], y[bounds[rank] : bounds[rank + 1]]


def backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    model.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()


def scaled_backward(
    scaler: torch.amp.GradScaler, model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, is_bad: bool = False
) -> None:
    """Back-propagate as under automatic mixed precision; with `is_bad`, an element of a gradient is infinite."""
    model.zero_grad()
    scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
    if is_bad:
        gradient = next(model.parameters()).grad
        assert gradient is not None
        gradient.view(-1)[1] = float("inf")


def train_alone(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float32,
    after_step: Callable[[], Any] = lambda: None,
) -> list[torch.Tensor]:
    for step in range(steps):
        backward(model, *batch(step, dtype))
        optimizer.step()
        after_step()
    return values(model)


def train_part(
    ps: ParameterServer, optimizer_of: Callable[[nn.Module], torch.optim.Optimizer], **options: Any
) -> list[torch.Tensor]:
    """Train the small model as one worker, on its share of each batch."""
    model = small_model()
    optimizer = psd.distribute(model, optimizer_of(model), ps=ps, **options)
    for step in range(STEPS):
        x, y = part(step, ps.rank, ps.world_size)
        backward(model, x, y)
        optimizer.step(batch_size=len(x))
    return values(model)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_close(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], relative: float = 1e-6) -> None:
    """Each tensor is equal to `relative` of its norm."""
    assert len(actual) == len(expected)
    for mine, right in zip(actual, expected, strict=True):
        assert mine.dtype == right.dtype
        assert mine.shape == right.shape
        difference = torch.linalg.vector_norm((mine - right).double())
        assert difference <= relative * torch.linalg.vector_norm(right.double()), (mine, right)
