"""A teacher that is a moving average of the student, and no optimizer steps: stored as buffers, but not as parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import psd_client  # noqa: E402
import psd_client.torch as psd  # noqa: E402

STORED, STEPS = 5, 8


def average_of(model: nn.Module, *, is_of_buffers: bool) -> nn.Module:
    """A copy whose tensors are buffers, as docs/several.md has it, or parameters as the model's are."""
    average = copy.deepcopy(model).requires_grad_(False)
    for module in average.modules():
        for name, parameter in list(module.named_parameters(recurse=False)) if is_of_buffers else ():
            delattr(module, name)
            module.register_buffer(name, parameter.detach())
    return average


def train(ps: Any, steps: int, *, is_of_buffers: bool) -> tuple[Any, Any]:
    """The teacher's weights when the job was joined, and in the end."""
    student, seeded = nn.Linear(4, 3), torch.Generator().manual_seed(3)  # torch's own seed is one for all threads
    for parameter in student.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, seeded)
    teacher = average_of(student, is_of_buffers=is_of_buffers)
    optimizers = psd.distribute(
        {"student": student, "teacher": teacher}, {"student": torch.optim.SGD(student.parameters(), lr=0.3)}, ps=ps
    )
    begun = teacher.weight.detach().clone()
    while ps.clock < steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(ps.clock))[ps.rank :: ps.world_size]
        optimizers["student"].zero_grad()
        nn.functional.mse_loss(student(x), teacher(x).detach() + 1).backward()
        optimizers["student"].step()
        with torch.no_grad():
            teacher.weight.lerp_(student.weight, 0.25)
            teacher.bias.lerp_(student.bias, 0.25)
    return begun, teacher.weight.detach().clone()


def run(cluster: Callable[..., Any], url: str, steps: int, *, is_of_buffers: bool) -> list[tuple[Any, Any]]:
    """Two workers' teachers, in a job that goes on from what is stored there."""
    running = cluster(2, checkpoint_dir=url)

    def worker(rank: int) -> tuple[Any, Any]:
        with psd_client.connect(running.servers, rank, 2, wait_timeout=120) as ps:
            return train(ps, steps, is_of_buffers=is_of_buffers)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(worker, range(2)))
    running.finish()
    return found


def test_a_teacher_of_buffers_goes_on_from_a_checkpoint_as_if_nothing_had_happened(cluster: Any, tmp_path: Path) -> None:
    (_, undisturbed), _ = run(cluster, str(tmp_path / "one"), STEPS, is_of_buffers=True)

    stored = run(cluster, str(tmp_path / "two"), STORED, is_of_buffers=True)
    goes_on = run(cluster, str(tmp_path / "two"), STEPS, is_of_buffers=True)

    for (_, before), (begun, end) in zip(stored, goes_on, strict=True):
        torch.testing.assert_close(begun, before, rtol=0, atol=0)
        torch.testing.assert_close(end, undisturbed)


def test_a_teacher_of_parameters_is_stored_as_it_was_at_first(cluster: Any, tmp_path: Path) -> None:
    """Shards hear nothing of what workers do to parameters that no optimizer steps."""
    url = str(tmp_path / "checkpoints")
    ((first, end), _) = run(cluster, url, STORED, is_of_buffers=False)

    goes_on = run(cluster, url, STEPS, is_of_buffers=False)

    assert not torch.equal(first, end)
    for begun, _ in goes_on:
        torch.testing.assert_close(begun, first, rtol=0, atol=0)
