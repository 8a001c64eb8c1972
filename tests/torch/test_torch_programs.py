"""Programs as they are written for GPUs, with each kind of overlap: they do what they do in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import assert_close, batch, small_model, values  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import SGD  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import psd_client.torch as psd  # noqa: E402

STEPS = 3
OVERLAPS: dict[str, dict[str, Any]] = {
    "no overlap": {},
    "overlap": {"overlap": True},
    "forward": {"overlap": "forward", "consistency": "async"},
}


def loss_of(output: torch.Tensor, number: int) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), batch(number)[1])


def plain(model: nn.Module, number: int) -> torch.Tensor:
    return loss_of(model(batch(number, next(model.parameters()).dtype)[0]), number)


def in_autocast(model: nn.Module, number: int) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return plain(model, number)


def recomputed(model: nn.Module, number: int) -> torch.Tensor:
    """Back-propagation runs in back-propagation."""
    return loss_of(checkpoint(model, batch(number)[0].requires_grad_(), use_reentrant=True), number)


def normed() -> nn.Module:
    """Weights computed from other parameters."""
    model = small_model()
    nn.utils.parametrizations.weight_norm(model[0])
    return model


class Program(NamedTuple):
    """A program: of `backwards` to a step the gradients add up."""

    loss: Callable[[nn.Module, int], torch.Tensor] = plain
    model: Callable[[], nn.Module] = small_model
    backwards: int = 1
    set_to_none: bool = True
    relative: float = 1e-6


PROGRAMS = {
    "autocast": Program(in_autocast),
    "autocast, accumulated": Program(in_autocast, backwards=3),
    "16 bits": Program(model=lambda: small_model(torch.bfloat16), relative=1e-2),
    "16 bits, accumulated": Program(model=lambda: small_model(torch.bfloat16), backwards=3, relative=1e-2),
    "zeros": Program(backwards=2, set_to_none=False),
    "recomputed": Program(recomputed, backwards=2),
    "normed": Program(model=normed),
}


def run(program: Program, model: nn.Module, optimizer: Any, no_sync: Any, after_step: Any) -> list[torch.Tensor]:
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=program.set_to_none)
        for number in range(step * program.backwards, (step + 1) * program.backwards):
            is_last = number + 1 == (step + 1) * program.backwards
            with nullcontext() if is_last else no_sync():
                program.loss(model, number).backward()
        optimizer.step()
        after_step()
    return values(model)


@pytest.mark.parametrize("options", OVERLAPS.values(), ids=OVERLAPS)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_program_then_equals_one_process(run_workers, program, options):
    def worker(ps):
        model = program.model()
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1, momentum=0.9), ps=ps, **options)
        return run(program, model, optimizer, optimizer.no_sync, optimizer.pull)

    model = program.model()
    expected = run(program, model, SGD(model.parameters(), lr=0.1, momentum=0.9), nullcontext, lambda: None)
    assert_close(run_workers(1, 2, worker)[0], expected, program.relative)
