"""Gradients of 16 bits from torch to the shards and over each transport: half of the bytes, and the numbers of 32 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import psd_client
import psd_client.torch as psd

STEPS = 4
KINDS = (torch.float32, torch.bfloat16, torch.float16)


def mixed() -> nn.ParameterDict:
    """Three dtypes, several blocks of each."""
    generator = torch.Generator().manual_seed(5)
    return nn.ParameterDict(
        {f"of_{number}": torch.randn(700, 900, generator=generator).to(kind) for number, kind in enumerate(KINDS)}
    )


def gradient(parameter: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def trained_alone(world_size: int) -> list[torch.Tensor]:
    """Train with torch, in float32, on the mean of the workers' gradients."""
    model = mixed()
    masters = [nn.Parameter(parameter.detach().float()) for parameter in model.values()]
    optimizer = torch.optim.SGD(masters, lr=0.25, momentum=0.5)
    for step in range(STEPS):
        for master, parameter in zip(masters, model.values(), strict=True):
            master.grad = sum(gradient(parameter, rank, step).float() for rank in range(world_size)) / world_size
        optimizer.step()
    return [master.detach().to(parameter.dtype) for master, parameter in zip(masters, model.values(), strict=True)]


def train(ps: psd_client.ParameterServer, *, overlap: bool = False, **options: Any) -> tuple[list[torch.Tensor], int, int]:
    """The model, and how many bytes a step has sent and received."""
    model = mixed()
    sgd = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    optimizer = psd.distribute(model, sgd, ps=ps, overlap=overlap, **options)
    before = ps.stats()
    for step in range(STEPS):
        optimizer.zero_grad()
        sum((p * gradient(p, ps.rank, step)).float().sum() for p in model.values()).backward()
        optimizer.step()
    after = ps.stats()
    sent, received = ((after[name] - before[name]) // STEPS for name in ("sent_bytes", "received_bytes"))
    return [p.detach().clone() for p in model.values()], sent, received


@pytest.mark.parametrize(
    ("transport", "options"),
    [("shm", {}), ("tcp", {}), ("grpc", {}), ("grpc", {"overlap": True}), ("tcp", {"aggregation": "exact"})],
    ids=str,
)
def test_step_when_dtypes_are_mixed_then_gradients_travel_in_their_own(run_workers, transport, options):
    """And the sums are those of float32."""
    found = run_workers(2, 2, lambda ps: train(ps, **options), transport=transport)

    expected = trained_alone(2)
    elements = 700 * 900
    for values, sent, received in found:
        assert (sent, received) == (elements * (4 + 2 + 2), elements * 12)
        for mine, theirs in zip(values, expected, strict=True):
            assert mine.dtype == theirs.dtype
            torch.testing.assert_close(mine, theirs, rtol=2**-7 if mine.dtype != torch.float32 else 1e-5, atol=1e-5)
    assert all(map(torch.equal, found[0][0], found[1][0]))


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("overlap", [False, True])
def test_backward_when_a_parameter_is_half_then_its_gradient_lies_where_it_is_sent_from(run_workers, transport, overlap):
    def body(ps):
        layer = nn.Linear(4, 3).bfloat16()
        optimizer = psd.distribute(layer, torch.optim.SGD(layer.parameters(), lr=1.0), ps=ps, overlap=overlap)
        layer(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum().backward()
        places = [view.ctypes.data for view in ps._worker.gradients.views]
        is_there = [p.grad.data_ptr() for p in layer.parameters()] == places
        optimizer.step()
        return is_there, layer.weight.grad.dtype

    assert run_workers(1, 1, body, transport=transport) == [(True, torch.bfloat16)]


@pytest.mark.parametrize("options", [{"clip_norm": 0.5}, {"staleness": "lr"}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_step_when_async_then_what_is_done_to_gradients_is_done_in_float32(run_workers, options, dtype):
    """The same gradients, declared in 32 bits, end in the same masters."""

    def body_of(kind):
        def body(ps):
            layer = nn.Linear(40, 30, bias=False).to(kind)
            nn.init.constant_(layer.weight, 0.5)
            rule = torch.optim.SGD(layer.parameters(), lr=0.25)
            optimizer = psd.distribute(layer, rule, ps=ps, consistency="async", **options)
            for step in range(STEPS):
                layer.weight.grad = gradient(layer.weight.to(dtype), 0, step).to(kind)
                optimizer.step()
            return ps._worker.parameters.views[0].copy()

        return body

    half, wide = (run_workers(1, 1, body_of(kind))[0] for kind in (dtype, torch.float32))

    np.testing.assert_array_equal(half, wide)


def test_push_pull_when_a_float16_parameter_gets_a_wider_gradient_then_refuses(run_workers):
    """It would lose digits, and what is beyond 65504."""

    def body(ps):
        ps.declare({"h": np.zeros(3, np.float16)}, psd_client.SGD(lr=1.0))
        with pytest.raises(psd_client.InvalidTensor, match=r"grads\['h'\]: dtype must be float16, got float32; convert it"):
            ps.push_pull({"h": np.ones(3, np.float32)})
        return ps.push_pull({"h": np.array([1, 2, 65504], np.float16)})["h"].tolist()

    assert run_workers(1, 1, body) == [[-1, -2, -65504]]


@pytest.mark.parametrize("overlap", [False, True])
def test_step_when_grad_dtype_is_wider_than_the_parameter_then_refuses(run_workers, overlap):
    """Torch's way to have float32 gradients of bfloat16 parameters; a narrower one is widened."""

    def body(ps):
        model = nn.ParameterList([torch.ones(3), torch.ones(3).bfloat16()])
        model[0].grad_dtype, model[1].grad_dtype = torch.bfloat16, torch.float32
        optimizer = psd.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), ps=ps, overlap=overlap)
        with pytest.raises(psd_client.InvalidTensor, match=r"'1': its gradient is torch.float32, but .* torch.bfloat16"):
            sum((1 + p.float()).square().sum() for p in model).backward()
            optimizer.step()
        if overlap:
            return [-3.0] * 3
        model[1].grad = None
        optimizer.step()
        return model[0].tolist()

    assert run_workers(1, 1, body) == [[-3.0] * 3]


@pytest.mark.parametrize("number", [1e5, -65520, 10**400])
def test_push_when_a_number_is_beyond_the_dtype_then_says_so(run_workers, number):
    def body(ps):
        ps.declare({"h": np.zeros((), np.float16)}, psd_client.SGD(lr=1.0))
        with pytest.raises(psd_client.InvalidTensor, match=rf"grads\['h'\]: {number} is beyond the range of float16"):
            ps.push({"h": number})
        return float(ps.push_pull({"h": 2})["h"])

    assert run_workers(1, 1, body) == [-2.0]
