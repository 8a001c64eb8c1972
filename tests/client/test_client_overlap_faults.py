"""overlap=True when something fails in its middle: the worker's program, or a shard. Nobody hangs, nothing counts twice."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from client_faults import Restartable, Thread, until  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import SGD  # noqa: E402

import psd_client  # noqa: E402
import psd_client.torch as psd  # noqa: E402

TRANSPORTS = ("shm", "tcp", "grpc")

PROGRAM = """
import sys
import torch
import psd_client.torch as psd

class Failure(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("in the middle of back-propagation")

model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 2000))
optimizer = psd.distribute(
    model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), overlap=True,
    servers=sys.argv[1], transport=sys.argv[2], rank=1, world_size=2,
)
model[1](Failure.apply(model[0](torch.ones(2, 300)))).sum().backward()
"""


def wide_model() -> nn.Sequential:
    """The second layer's gradients are blocks of their own, and complete before the first one's."""
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 2000))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.1, 0.1, generator)
    return model


def distributed(ps: Any, **options: Any) -> tuple[Any, Any]:
    model = wide_model()
    return model, psd.distribute(model, SGD(model.parameters(), lr=0.1, momentum=0.9), ps=ps, overlap=True, **options)


def backward(model: Any, step: int, rank: int, between: Any = lambda: None) -> None:
    """`between`: called when the second layer has its gradients and the first one has not."""
    hidden = model[0](torch.randn((4, 300), generator=torch.Generator().manual_seed(100 * step + rank)))
    hidden.register_hook(lambda _: between())
    model.zero_grad()
    model[1](hidden).square().mean().backward()


def values(model: Any) -> list[Any]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def fail() -> None:
    raise ArithmeticError("in the middle of back-propagation")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_close_when_back_propagation_has_failed_then_returns_and_the_others_go_on(cluster, transport):
    servers = cluster(2).servers

    def worker(rank: int) -> int:
        with psd_client.connect(servers, rank, 2, transport=transport, wait_timeout=60) as ps:
            model, optimizer = distributed(ps, aggregation="exact")
            if rank == 1:
                with pytest.raises(ArithmeticError):
                    backward(model, 0, rank, fail)
                ps.close()  # not the optimizer's, which knows of the push
                return ps.clock
            for step in range(3):
                backward(model, step, rank)
                optimizer.step()
            return ps.clock

    workers = [Thread(lambda rank=rank: worker(rank)) for rank in range(2)]
    assert [worker.result() for worker in workers] == [3, 0]


@pytest.mark.usefixtures("later_compiler")
def test_program_when_back_propagation_has_failed_then_ends_with_its_error_and_the_others_go_on(cluster):
    """Its threads, which wait for the rest of the gradients, do not keep it; its lease does not have to run out."""
    transport = "tcp"  # close(), which the end calls, has a test for each
    running = cluster(2, lease_s=600)
    child = subprocess.Popen([sys.executable, "-c", PROGRAM, running.servers, transport], stderr=subprocess.PIPE, text=True)
    try:
        with psd_client.connect(running.servers, 0, 2, transport=transport, wait_timeout=200) as ps:
            model, optimizer = distributed(ps)
            backward(model, 0, 0)
            optimizer.step()
        _, errors = child.communicate(timeout=200)
    finally:
        child.kill()
    assert child.returncode == 1
    assert errors.rstrip().endswith("ArithmeticError: in the middle of back-propagation")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_step_when_a_shard_was_restarted_in_the_middle_then_every_gradient_counts_once(cluster, tmp_path, transport):
    """The shard has counted the first blocks when it ends, and comes back on its arena while others are still computed."""
    job = Restartable(cluster, tmp_path)

    def restart() -> None:
        until(lambda: max(job.version(0), job.version(1)) == 2)
        job.restart(0)
        job.restart(1)

    with psd_client.connect(job.servers, 0, 1, transport=transport, wait_timeout=60) as ps:
        model, optimizer = distributed(ps)
        for step in range(3):
            backward(model, step, 0, restart if step == 1 else lambda: None)
            optimizer.step()
        actual = values(model)

    expected = wide_model()
    given = SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        backward(expected, step, 0)
        given.step()
    assert [job.version(0), job.version(1)] == [3, 3]
    for mine, right in zip(actual, values(expected), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_step_when_a_shard_has_lost_an_open_round_then_the_bits_are_those_of_an_undisturbed_run(cluster, tmp_path, transport):
    def run(name: str, *, is_disturbed: bool) -> list[Any]:
        (tmp_path / name).mkdir()
        job = Restartable(cluster, tmp_path / name)

        def worker(rank: int) -> Any:
            with psd_client.connect(job.servers, rank, 2, transport=transport, wait_timeout=60) as ps:
                model, optimizer = distributed(ps, aggregation="exact")
                for step in range(3):
                    is_struck = is_disturbed and (rank, step) == (0, 1)
                    backward(model, step, rank, (lambda: job.restart(1)) if is_struck else lambda: None)
                    optimizer.step()
                return values(model)

        workers = [Thread(lambda rank=rank: worker(rank)) for rank in range(2)]
        return [worker.result() for worker in workers]

    disturbed, undisturbed = run("disturbed", is_disturbed=True), run("undisturbed", is_disturbed=False)
    for mine, right in zip([*disturbed[0], *disturbed[1]], [*undisturbed[0], *undisturbed[1]], strict=True):
        assert torch.equal(mine, right)
