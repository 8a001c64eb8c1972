"""torch.compile: of the model, and of a whole step; psd's own code stays out of what is compiled."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import assert_close, batch, small_model, values  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import SGD  # noqa: E402

import psd_client  # noqa: E402
import psd_client.torch as psd  # noqa: E402

STEPS = 3
IDS = torch.tensor([[3, 5], [5, 7], [9, 3]])


class Rated(nn.Module):
    """Rows of a table, then layers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = psd.Embedding("rows", dim=6, init=psd_client.Constant(0.5))
        self.top = small_model()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.rows(ids))


@pytest.fixture
def graphs() -> Any:
    """What is compiled, by the backend that goes with it: (graphs, backend)."""
    torch.compiler.reset()
    compiled: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    yield compiled, backend
    torch.compiler.reset()


def train_rated(ps: Any, compiled: Any, overlap: bool) -> list[Any]:
    model = Rated()
    optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps, overlap=overlap)

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        model.rows.prefetch(ids + 1)
        model(ids).square().mean().backward()
        optimizer.step()

    run = compiled(step)
    for number in range(STEPS):
        run(IDS + number)
    return [*values(model), model.eval()(IDS).detach()]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
@pytest.mark.parametrize("overlap", [False, True])
def test_step_when_it_is_compiled_whole_then_nothing_of_psd_is_traced(run_workers, graphs, overlap):
    """Neither lookups and pushes, which the step calls, nor hooks, which torch calls."""
    compiled, backend = graphs

    def train(compile_step):
        return run_workers(1, 1, lambda ps: train_rated(ps, compile_step, overlap))[0]

    actual, expected = train(lambda step: torch.compile(step, backend=backend)), train(lambda step: step)

    assert_close(actual, expected)
    assert compiled
    traces = [node.stack_trace or "" for graph in compiled for node in graph.graph.nodes]
    assert [trace for trace in traces if "psd_client" in trace] == []


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"overlap": "forward", "consistency": "async"}], ids=str)
def test_train_when_the_model_is_compiled_then_does_as_without(run_workers, graphs, options):
    """Also where a step calls the model; the hooks that send gradients run all the same."""
    compiled, backend = graphs

    def train(ps, is_compiled):
        model = small_model()
        if is_compiled:
            model = torch.compile(model, backend=backend)
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1, momentum=0.9), ps=ps, **options)

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch(0)[0]), batch(0)[1])
            loss.backward()
            return loss

        for _ in range(STEPS):
            optimizer.step(closure)
            optimizer.pull()
        return values(model)

    (actual,), (expected,) = (run_workers(1, 2, lambda ps, c=c: train(ps, c)) for c in (True, False))
    assert_close(actual, expected)
    assert len(compiled) == 1
