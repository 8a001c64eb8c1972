"""The common part of the optimizers of one job: its model's parameters, gradients, buffers and tables, over one connection.

A job has one optimizer, or several that step its parts at different times. Must not know param_groups' options or steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from psd_client.client import ParameterServer, worker_of
from psd_client.lanes.flat import FlatBuffers
from psd_client.optimizers import scalar_values
from psd_client.torch.buffers import Buffers, kept_buffers
from psd_client.torch.declaration import TorchDeclaration, state_values
from psd_client.torch.gradients import Gradients, Overlap
from psd_client.torch.groups import Groups, SharedGroups
from psd_client.torch.parameters import Parameters, as_tensors, copy_all
from psd_client.torch.slots import LoadedSlots
from psd_client.torch.tables import Tables


def write_all(declaration: TorchDeclaration, flat: FlatBuffers) -> None:
    """Write the model's values into the client's buffers."""
    copy_all(as_tensors(flat)[: len(declaration.parameters)], declaration.parameters)
    Buffers(declaration, flat).write()


class TorchJob:
    """One job of a model.

    Args:
        leaving: options for sending gradients before the step; None: nothing is sent before.

    Attributes:
        ps, worker: the connection. declaration: what was declared.
        groups: the param_groups of each optimizer, in the order of declaration.parts.
        parameters, gradients, buffers, tables: of the model. slots: decides which states of optimizers fit the shards'.
    """

    def __init__(self, ps: ParameterServer, declaration: TorchDeclaration, leaving: Overlap | None) -> None:
        worker = worker_of(ps)
        self.ps, self.worker, self.declaration = ps, worker, declaration
        self.slots = LoadedSlots(declaration, lambda: ps.clock, lambda: worker.times_gone_back)
        self.groups = [SharedGroups(part, declaration, self.slots) for part in declaration.parts]
        self.parameters = Parameters(declaration, worker)
        self.buffers = kept_buffers(declaration, worker)
        self.tables = Tables(worker, declaration.tables.members, has_feeds=leaving is not None)
        self.gradients = Gradients(declaration, worker.gradients, leaving)

    def scalars(self, stepped: SharedGroups, own: Groups, *, moves_schedules: bool = True) -> list[list[float]]:
        """The scalars of a push, by group of the job.

        Args:
            stepped: the groups of the optimizer that is stepped. own: its param_groups.
            moves_schedules: move the schedules of all optimizers to the worker's clock before.
        """
        found: list[list[float]] = []
        for shared in self.groups:
            scalars = shared.scalars_now if moves_schedules else shared.scalars
            found += scalars(own if shared is stepped else None)
        options = self.declaration.tables.options
        specs = self.declaration.groups[len(found) :]
        groups: Groups = [*({} for _ in specs[len(options) :]), *options]  # static groups and buffers have no options
        rest = enumerate(zip(specs, groups, strict=True), len(found))
        return found + [scalar_values(spec, group, index) for index, (spec, group) in rest]

    def pull(self) -> None:
        """Fetch the current parameters into the model."""
        self.gradients.settle()
        self.worker.pull_flat()
        self.parameters.copy()
        self.buffers.follow(self.worker.times_gone_back)

    def load_parameters(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Set the job's parameters and buffers; see DistributedOptimizer.load_parameters."""
        values = state_values(self.declaration, state_dict)
        self.gradients.settle()
        count = len(self.declaration.parameters)

        def write(flat: FlatBuffers) -> None:
            copy_all(as_tensors(flat)[:count], values[:count])

        self.worker.set_parameters(write)
        self.parameters.copy()
        with torch.no_grad():
            for tensor, value in zip(self.declaration.parameters + self.declaration.buffers, values, strict=True):
                tensor.copy_(value)
        self.parameters.note()

    def reset_slots(self) -> None:
        """Let the slots of all tensors and rows begin anew."""
        self.gradients.settle()
        self.worker.set_slots({})
        self.slots.begin()
        self.parameters.copy()
