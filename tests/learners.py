"""Learners for tests of local steps: a small network with its data, and a model whose every step is known."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn, optim
from torch.nn import functional as F  # noqa: N812

import psd_client
import psd_client.torch as psd
from psd_client import ParameterServer
from psd_client.torch.flight import Exchanged

OUTER = psd_client.SGD(lr=0.7, momentum=0.9, nesterov=True)


SUM = psd_client.SGD(lr=1.0)


def zeros(shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """A model with zero tensors of these shapes, and an embedding, `rows`, of (31, 17)."""
    model = nn.Module()
    for name, shape in shapes.items():
        model.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    model.rows = nn.Embedding(31, 17)
    with torch.no_grad():
        model.rows.weight.zero_()
    return model


def network() -> nn.Sequential:
    """The same values at each call."""
    model = nn.Sequential(
        nn.Embedding(7, 5), nn.Flatten(), nn.Linear(15, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator)
    return model


def adam(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=0.02)


def backward(model: nn.Module, step: int, rank: int) -> None:
    """A learner's gradients of a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(7, (6, 3), generator=generator)
    model.zero_grad()
    F.cross_entropy(model(ids), ids.sum(1) % 3).backward()


def learned(ps: Any, local: psd.Local, steps: int, tokens: Any = lambda step, rank: 1, **options: Any) -> list[Any]:
    model = network()
    optimizer = psd.distribute(model, adam(model), local=local, ps=ps, **options)
    for step in range(optimizer.local_step + 1, steps + 1):
        backward(model, step, ps.rank)
        optimizer.step(tokens=tokens(step, ps.rank))
    found = [parameter.detach().clone() for parameter in model.parameters()]
    assert optimizer.local_step == steps
    optimizer.close()
    return found


def corrected(difference: Any, momentum: Any) -> Any:
    """HeLoCo (arXiv 2606.00271) of one difference of a tensor, in float64; momentum: as a mean of differences."""
    length, pace = difference.norm(), momentum.norm()
    if not length or not pace:
        return difference
    cosine, trust = (difference * momentum).sum() / (length * pace), length / (length + pace)
    if cosine >= 0.2:
        return difference
    if cosine < 0:
        return difference - min(-cosine * trust, 0.5) * cosine * length * momentum / pace
    turned = min((1 - cosine) * trust, 1.0)
    direction = (1 - turned) * difference / length + turned * momentum / pace
    return length * direction / direction.norm()


def momentum_of(outer: optim.Optimizer, parameter: Any) -> Any:
    """The momentum of torch's SGD, as a mean; zeros before its first step."""
    held = outer.state[parameter].get("momentum_buffer")
    return torch.zeros_like(parameter) if held is None else held * (1 - outer.param_groups[0]["momentum"])


def merged(merge: str, differences: list[Any], weights: list[float], momentum: Any = None) -> Any:
    """The learners' differences of a tensor, merged in float64."""
    differences = [each.double() for each in differences]
    if merge == "heloco":
        differences, merge = [corrected(each, momentum.double()) for each in differences], "mean"
    mean = sum(w * each for w, each in zip(weights, differences, strict=True)) / sum(weights)
    norms = [each.norm() for each in differences]
    direction = sum(w * each / n for w, each, n in zip(weights, differences, norms, strict=True) if n)
    if merge == "mean" or direction.norm() < 1e-6 * sum(weights):
        return mean.float()
    return (sum(w * n for w, n in zip(weights, norms, strict=True)) / sum(weights) * direction / direction.norm()).float()


def constant(value: float = 0.0) -> nn.Module:
    """Two tensors, of one fragment each, whose gradients the tests set."""
    return nn.ParameterDict({name: nn.Parameter(torch.full((4,), value)) for name in ("a", "b")})


class Walker:
    """A learner whose every local step moves all parameters by -stride.

    Attributes:
        records: its exchanges that have ended.
    """

    def __init__(self, ps: ParameterServer, local: psd.Local, *, stride: int = 1, **options: Any) -> None:
        self.model, self.stride = constant(), stride
        self.optimizer = psd.distribute(self.model, optim.SGD(self.model.parameters(), lr=1.0), local=local, ps=ps, **options)
        self.records: list[Exchanged] = []
        self.optimizer.on_exchange = self.records.append
        self._begun_at = self.optimizer.local_step

    def walk(self, steps: int = 1) -> list[float]:
        for _ in range(steps):
            for parameter in self.model.parameters():
                parameter.grad = torch.full_like(parameter, self.stride)
            self.optimizer.step()
        return self.place

    def counted(self, fragment: int) -> int:
        """How far it has moved the job, by its records. For alpha=0, which drops what was learned while an exchange was under
        way, if what has come back is mixed in."""
        total, left, since = 0, 0, self._begun_at
        for record in self.records:
            if record.fragment == fragment:
                difference = left + record.departed - since
                total, left = (total + difference, 0) if record.is_counted else (total, difference)
                since = record.landed if record.is_mixed else record.departed
        return self.stride * total

    @property
    def place(self) -> list[float]:
        """The value of each tensor, all of whose elements are equal."""
        return [parameter[0].item() for parameter in self.model.parameters()]


def side_by_side(*begins: Callable[[], Any]) -> list[Any]:
    """The results of calls that wait for each other."""
    found: list[Any] = [None] * len(begins)

    def run(index: int) -> None:
        found[index] = begins[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(begins))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
