"""A learner without any server: gloo's all-reduce at each step, or of parameters every so many, among those who are there.

The benchmark says who that is, by a file: it is written anew when a learner dies, and when one is back. Whoever finds another
membership there, or whose all-reduce breaks off, meets the others anew, as torchrun's elastic agents have it, but without
starting processes again: so this is a lower limit of what a death costs. Knows nothing of psd.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _paced_learner import PacedLearner

LOOK_S = 0.01
MEET_S = 120.0


def write_members(path: Path, number: int, ranks: list[int]) -> None:
    """Say who is there from now on; number: of the membership, each larger than the one before."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"number": number, "ranks": ranks}))
    fresh.rename(path)


class Group:
    """The learners that are there."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory, self._rank, self._number = directory, rank, -1
        self._pause = threading.Event()

    def meet(self, model: torch.nn.Module) -> None:
        """Meet the members, if the membership is another one, and take the parameters of the one of lowest rank."""
        while True:
            members = json.loads((self._directory / "members").read_text())
            if members["number"] == self._number or self._rank not in members["ranks"]:
                return
            self.leave()
            self._number = members["number"]
            try:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{self._directory}/meet-{self._number}",
                    rank=members["ranks"].index(self._rank),
                    world_size=len(members["ranks"]),
                    timeout=timedelta(seconds=MEET_S),
                )
                for parameter in model.parameters():
                    dist.broadcast(parameter.data, 0)
            except (RuntimeError, ValueError):  # somebody has died meanwhile
                self.wait_for_another()

    def wait_for_another(self) -> None:
        """Return when the benchmark has written a membership after this one."""
        while json.loads((self._directory / "members").read_text())["number"] == self._number:
            self._pause.wait(LOOK_S)

    @staticmethod
    def leave() -> None:
        """Let others know, by the end of the connections."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def average(self, tensors: list[torch.Tensor]) -> bool:
        """Average tensors of all members in place; False if one of them has gone: they are then of no use."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        try:
            dist.all_reduce(flat)
        except RuntimeError:
            self.wait_for_another()
            return False
        flat /= dist.get_world_size()
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))
        return True


@torch.no_grad()
def exchange(group: Group, model: torch.nn.Module, base: list[torch.Tensor], outer: torch.optim.Optimizer) -> None:
    """Step from the base by the mean of all differences."""
    differences = [before - parameter for before, parameter in zip(base, model.parameters(), strict=True)]
    if group.average(differences):
        for before, parameter, difference in zip(base, model.parameters(), differences, strict=True):
            parameter.copy_(before)
            parameter.grad = difference
        outer.step()
    else:
        group.meet(model)
    for before, parameter in zip(base, model.parameters(), strict=True):
        before.copy_(parameter)


def learn(task: Mapping[str, Any], rank: int, joined: Event) -> None:
    """Make steps until killed; each is a byte in a file."""
    learner = PacedLearner(task, joined)
    model, inner = learner.model, learner.inner
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.8, nesterov=True)
    group = Group(Path(task["steps"]).parent, rank)
    group.meet(model)
    base = [parameter.detach().clone() for parameter in model.parameters()]
    every, step = task["local_steps"], 0
    learner.begin()
    while True:
        learner.compute(inner)
        if every == 1:
            group.meet(model)
            if not group.average([parameter.grad for parameter in model.parameters() if parameter.grad is not None]):
                continue  # the step is made again
        inner.step()
        learner.count()
        step += 1
        if every > 1 and step % every == 0:
            group.meet(model)
            exchange(group, model, base, outer)
