"""Compression asked for by the keywords of distribute: with overlap, in learners, and with several models."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import psd_client
import psd_client.torch as psd
from psd.contract.errors import NonFiniteGradient
from psd_core import codecs

STEPS = 12
COMPRESSED: dict[str, Any] = {"compress": "int4", "pull": "bf16"}
PULLS = ["bf16", "int8"]


def model() -> nn.Sequential:
    """The same for all workers, which are threads and share torch's own generator."""
    net = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 10))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    return net


def backward(net: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(8, 40, generator=generator)
    net.zero_grad()
    (net(inputs) - inputs[:, :10].sin()).square().mean().backward()


def values(net: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


def train(ps: psd_client.ParameterServer, **options: Any) -> torch.Tensor:
    net = model()
    optimizer = psd.distribute(net, torch.optim.SGD(net.parameters(), lr=0.1), ps=ps, **options)
    for step in range(STEPS):
        backward(net, ps.rank, step)
        optimizer.step()
    return values(net)


@pytest.mark.parametrize("pull", PULLS)
@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_steps_when_they_overlap_with_back_propagation_then_the_bits_are_the_same(run_workers, transport, pull):
    compressed = {"compress": "int4", "pull": pull}
    whole = run_workers(2, 2, lambda ps: train(ps, **compressed), transport=transport)
    overlapped = run_workers(2, 2, lambda ps: train(ps, overlap=True, **compressed), transport=transport)

    assert torch.equal(whole[0], whole[1])
    assert all(torch.equal(whole[0], found) for found in overlapped)


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_steps_when_they_overlap_and_a_gradient_is_not_finite_then_the_program_is_told(run_workers, transport):
    def body(ps):
        net = model()
        optimizer = psd.distribute(net, torch.optim.SGD(net.parameters(), lr=0.1), ps=ps, overlap=True, compress="int8")
        backward(net, 0, 0)
        optimizer.step()
        with pytest.raises(NonFiniteGradient, match="cannot be compressed"):
            net.zero_grad()
            (net(torch.randn(8, 40)) * float("nan")).sum().backward()
            optimizer.step()

    run_workers(1, 2, body, transport=transport)


@pytest.mark.parametrize(
    ("fragments", "delay", "merge", "pull"),
    [  # each value of each beside each of every other
        (1, 0, "mean", "bf16"),
        (3, 1, "mean", "int8"),
        (1, 1, "rda", "bf16"),
        (3, 0, "rda", "int8"),
        (1, 0, "heloco", "int8"),
        (3, 1, "heloco", "bf16"),
    ],
)
def test_learners_when_their_differences_are_compressed_then_all_end_with_the_same_bits(
    run_workers, fragments, delay, merge, pull
):
    """A residual is of each block, and so of the fragment that it is in; norms are of the differences themselves."""
    local = psd.Local(steps=3, fragments=fragments, delay=delay, outer=psd_client.SGD(lr=0.7, momentum=0.9), merge=merge)
    compressed = {"compress": "int4", "pull": pull}

    def learn(ps, **options):
        net = model()
        optimizer = psd.distribute(net, torch.optim.SGD(net.parameters(), lr=0.1), ps=ps, local=local, **options)
        for step in range(STEPS):
            backward(net, ps.rank, step)
            optimizer.step()
        optimizer.pull()
        return values(net)

    def body(ps):
        net = model()
        before = (values(net) - torch.zeros(1)).clone()
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = psd.distribute(net, sgd, ps=ps, local=local, **compressed)
        before_bytes = ps.stats()
        for step in range(STEPS):
            backward(net, ps.rank, step)
            optimizer.step()
        travelled = {name: ps.stats()[name] - before_bytes[name] for name in ("sent_bytes", "received_bytes")}
        optimizer.pull()
        return values(net), before, travelled

    (mine, before, travelled), (other, _, _) = run_workers(2, 2, body, transport="tcp")

    assert torch.equal(mine, other)
    assert not torch.equal(mine, before)
    (plain, _) = run_workers(2, 2, learn)
    near = 0.6 if merge == "heloco" else 0.2  # a difference at the edge of a correction may fall on either side
    assert (mine - plain).norm() < near * (plain - before).norm()
    (cut, _) = run_workers(2, 3, lambda ps: learn(ps, **compressed))
    assert torch.equal(mine, cut)
    for name, codec in (("sent_bytes", "int4"), ("received_bytes", pull)):  # a few blocks, each of which is rounded up
        assert travelled[name] <= STEPS // 3 * (codecs.encoded_bytes(codec, len(mine)) + 100)


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_decoupled_learners_when_parameters_come_as_differences_then_all_have_the_same_bits_in_the_end(run_workers, transport):
    """Neither waits for the other: each misses rounds, of one fragment and not of another."""
    local = psd.Local(steps=3, fragments=3, delay=1, outer=psd_client.SGD(lr=0.7, momentum=0.9))

    def body(ps):
        net = model()
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = psd.distribute(net, sgd, ps=ps, local=local, quorum=1, compress="int8", pull="int4")
        for step in range(STEPS * (1 + ps.rank)):
            backward(net, ps.rank, step)
            optimizer.step()
        optimizer.pull()  # nothing is on its way then
        ps.barrier("all have pushed")
        optimizer.pull()
        return values(net)

    mine, other = run_workers(2, 2, body, transport=transport)

    assert torch.equal(mine, other)
    assert not torch.equal(mine, values(model()))


def test_models_when_each_is_stepped_alone_then_differences_are_of_those_that_were_stepped(run_workers):
    """The others' versions move on, and what workers have of them stays what it is."""
    order = "aabab"

    def body(ps):
        nets = {"a": model(), "b": model()}
        optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in nets.items()}
        found = psd.distribute(nets, optimizers, ps=ps, pull="int8")
        received = [ps.stats()["received_bytes"]]
        for step, name in enumerate(order):
            backward(nets[name], ps.rank, step)
            found[name].step()
            received.append(ps.stats()["received_bytes"])
        return (
            values(nets["a"]),
            values(nets["b"]),
            [after - before for before, after in itertools.pairwise(received)],
        )

    (a, b, received), (other_a, other_b, _) = run_workers(2, 2, body, transport="tcp")

    assert torch.equal(a, other_a)
    assert torch.equal(b, other_b)
    assert max(received) <= codecs.encoded_bytes("int8", len(a)) + 100


def test_models_when_each_is_stepped_alone_then_the_others_residuals_stay(run_workers):
    def body(ps):
        nets = {"a": model(), "b": model()}
        optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in nets.items()}
        found = psd.distribute(nets, optimizers, ps=ps, **COMPRESSED)
        kept = ps._worker.declared.encoder._residuals
        seen = []
        for step, name in enumerate(("a", "b", "a")):
            backward(nets[name], ps.rank, step)
            found[name].step()
            seen.append([kept.spaces[space].copy() for space in range(2)])
        return seen, values(nets["a"]), values(nets["b"])

    (seen, a, b), (_, other_a, other_b) = run_workers(2, 2, body)

    assert torch.equal(a, other_a)
    assert torch.equal(b, other_b)
    first, second, third = ([bool(space.any()) for space in spaces] for spaces in seen)
    assert (first, second, third) == ([True, False], [True, True], [True, True])
    assert (seen[1][0] == seen[0][0]).all()
    assert (seen[2][1] == seen[1][1]).all()
    assert (seen[2][0] != seen[1][0]).any()
