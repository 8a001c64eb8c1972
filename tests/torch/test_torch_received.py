"""Parameters on their way into a model, while others are still being received."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import Unlike  # noqa: E402
from torch.optim import SGD  # noqa: E402

import psd_client.torch as psd  # noqa: E402
from psd.contract.jobspec import JobSpec  # noqa: E402
from psd.contract.layout import Layout  # noqa: E402
from psd_client.lanes.flat import FlatBuffers  # noqa: E402
from psd_client.torch.declaration import read_declaration  # noqa: E402
from psd_client.torch.given import given_optimizers  # noqa: E402
from psd_client.torch.parameters import Parameters  # noqa: E402

TRANSPORTS = ("shm", "tcp", "grpc")


@pytest.fixture
def received() -> tuple[Unlike, FlatBuffers, Parameters]:
    """A model, buffers that hold 1, 2, 3, ... for its tensors, and what copies them."""
    model = Unlike()
    declaration = read_declaration(model, given_optimizers(model, model, SGD(model.parameters(), lr=0.1), None), "first")
    buffers = FlatBuffers(Layout(JobSpec(1, tuple(declaration.tensors), tuple(declaration.groups)), 1))
    for number, view in enumerate(buffers.views):
        view[...] = number + 1
    worker: Any = SimpleNamespace(parameters=buffers, receiving=buffers)
    return model, buffers, Parameters(declaration, worker)


def asked(blocks: Iterator[int]) -> Callable[[bool], int | None]:
    """As a push answers, which knows of no other block."""
    return lambda is_waiting: next(blocks, None)


def assert_whole(model: Unlike) -> None:
    for number, parameter in enumerate(model.parameters()):
        assert parameter.eq(number + 1).all()


def test_copy_as_received_when_a_block_is_there_then_its_elements_are_in_the_model(received: Any) -> None:
    """Before the next one has come."""
    model, buffers, parameters = received
    first, _, third, *_ = (b.index for b in buffers.layout.blocks if 0 in b.segment_tensors)
    length = buffers.layout.blocks[first].length

    def blocks() -> Iterator[int]:
        assert not model.large.any()
        yield first
        assert int(model.large.count_nonzero()) == length
        yield third
        assert int(model.large.count_nonzero()) == 2 * length

    parameters.copy_as_received(asked(blocks()), is_all=True)

    assert_whole(model)
    assert parameters.versions == list(buffers.versions)


def test_copy_as_received_when_a_block_is_received_anew_then_the_model_has_the_new_one(received: Any) -> None:
    """As when another shard was late, and what had been received was not the latest."""
    model, buffers, parameters = received
    buffers.block(1)[...] = 99

    def blocks() -> Iterator[int]:
        yield 1
        buffers.block(1)[...] = 1
        buffers.versions[1] = 2

    parameters.copy_as_received(asked(blocks()), is_all=True)

    assert_whole(model)


def test_copy_as_received_when_not_all_are_waited_for_then_each_is_at_most_one_step_old(received: Any) -> None:
    """What is left out once is waited for the next time."""
    model, buffers, parameters = received
    count = len(buffers.layout.blocks)
    waits: list[bool] = []

    def step(version: int, here: list[int], coming: list[int]) -> None:
        buffers.versions[:] = array("Q", [version] * count)
        blocks = iter(here)
        later = iter(coming)

        def next_block(is_waiting: bool) -> int | None:
            waits.append(is_waiting)
            block = next(blocks, None)
            return block if block is not None or not is_waiting else next(later, None)

        parameters.copy_as_received(next_block, is_all=False)

    step(1, [0, 1], [])
    assert not any(waits)
    assert parameters.versions == [1, 1] + [0] * (count - 2)

    step(2, [0], [3, 2, *range(4, count), 1])
    assert parameters.versions == [2, 1] + [2] * (count - 2)
    assert_whole(model)

    step(3, [], list(range(1, count)))
    assert parameters.versions[:2] == [2, 3]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_pull_when_somebody_asks_then_is_told_of_each_block(run_workers: Any, transport: str) -> None:
    """Whichever way they come; then nothing is told any more."""

    def body(ps: Any) -> None:
        model = Unlike()
        psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps)
        told: list[int] = []
        ps._worker.parameters.on_received = told.append
        ps._worker.pull_flat()
        ps._worker.parameters.on_received = None
        ps._worker.pull_flat()

        assert sorted(told) == [block.index for block in ps._worker.parameters.layout.blocks]

    run_workers(1, 2, body, transport=transport)
