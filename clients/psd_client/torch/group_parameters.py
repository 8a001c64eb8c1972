"""The parameters of a learner of several processes: rank 0 says what is read and written, and all do it.

A parameter is on each rank as a whole, or a DTensor, of which each has a part (FSDP2, tensor parallelism). Must not know
exchanges or connections.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from typing_extensions import override

from psd.contract.errors import InvalidTensor
from psd_client.torch.declaration import TorchDeclaration, has_parts
from psd_client.torch.group_channel import GroupChannel
from psd_client.torch.whole import OwnParameters, mixed_in, moved


class LeadParameters(OwnParameters):
    """The parameters on rank 0, which all ranks move alike. What is to be written is sent by `flush`, or before a read."""

    def __init__(self, parameters: Sequence[torch.Tensor], channel: GroupChannel) -> None:
        super().__init__(parameters)
        self._channel = channel
        self._pending: list[tuple[int, float | None, torch.Tensor]] = []

    @override
    def whole(self, indices: Iterable[int]) -> Iterator[tuple[int, torch.Tensor]]:
        wanted = list(indices)
        self.flush()
        in_parts = [index for index in wanted if has_parts(self.parameters[index])]
        if in_parts:
            self._channel.say({"do": "gather", "indices": in_parts})
        for index in wanted:
            yield index, _whole(self.parameters[index])

    @override
    def mix(self, index: int, value: torch.Tensor, share: float) -> None:
        self._pending.append((index, share, value))

    @override
    def move(self, index: int, by: torch.Tensor) -> None:
        self._pending.append((index, None, by))

    def flush(self) -> None:
        """Write what is to be written, on all ranks."""
        pending, self._pending = self._pending, []
        if pending:
            writes = [(index, share, str(value.dtype).removeprefix("torch.")) for index, share, value in pending]
            self._channel.say({"do": "write", "writes": writes})
            for index, share, value in pending:
                _write(self.parameters[index], self._channel.share(value), share)


def gather_parts(parameters: Sequence[torch.Tensor], indices: Iterable[int]) -> None:
    """Give rank 0 this rank's parts of parameters."""
    for index in indices:
        _whole(parameters[index])


def write_shared(parameters: Sequence[torch.Tensor], channel: GroupChannel, writes: Iterable[Any]) -> None:
    """Write what rank 0 sends."""
    for index, share, dtype in writes:
        parameter = parameters[index]
        value = torch.empty(parameter.shape, dtype=getattr(torch, dtype), device=parameter.device)
        _write(parameter, channel.share(value), share)


def check_places(declaration: TorchDeclaration, members: Sequence[int]) -> None:
    """Raise InvalidTensor if a DTensor has parts on other processes than the group's."""
    for spec, parameter in zip(declaration.tensors, declaration.parameters, strict=False):
        mesh = getattr(parameter, "device_mesh", None)
        others = set() if mesh is None else set(mesh.mesh.flatten().tolist()) - set(members)
        if others:
            raise InvalidTensor(
                f"parameter {spec.name!r} has parts on process {min(others)} of torch.distributed, which is not in the "
                f"learner's group {list(members)}; give fully_shard a mesh of the group: mesh=DeviceMesh.from_group(group, ...)"
            )


def reshard(model: torch.nn.Module) -> None:
    """Have FSDP2 forget gathered parameters, which a forward pass without a backward pass leaves: the next one gathers anew."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for module in model.modules():
        if isinstance(module, kind):
            module.reshard()


@torch.no_grad()
def _whole(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's values; of a DTensor by a collective call."""
    found: torch.Tensor = parameter.full_tensor() if has_parts(parameter) else parameter  # type: ignore[attr-defined]
    return found.detach()


@torch.no_grad()
def _write(parameter: torch.Tensor, value: torch.Tensor, share: float | None) -> None:
    """Move a parameter, or this rank's part of it. share: None: by the value; else to it, but for the parameter's share."""
    if has_parts(parameter):
        from torch.distributed.tensor import DTensor, Replicate  # slow, and for few programs

        assert isinstance(parameter, DTensor)
        mesh = parameter.device_mesh
        everywhere = DTensor.from_local(value.to(parameter.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
        value = everywhere.redistribute(placements=parameter.placements).to_local()
        parameter = parameter.detach().to_local()  # type: ignore[attr-defined]
    if share is None:
        moved(parameter, value)
    else:
        mixed_in(parameter, value, share)
