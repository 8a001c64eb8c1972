"""Messages and tensors from rank 0 of a learner's process group to the others, by collective calls of torch.distributed.

All ranks call in the same order: that is the callers' part, who begin each talk with what they are about to do. Messages are
JSON. Must not know learners, connections or parameters.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import distributed

from psd.contract.arguments import refuse
from psd.contract.errors import InvalidRequest


class GroupChannel:
    """One rank's end.

    Args:
        group: the learner's process group. device: where its backend takes tensors, which is where the parameters are.

    Attributes:
        rank, size: this process's number in the group, from 0, and how many there are.

    Raises:
        TypeError, InvalidRequest: this is no process group, or this process is not in it.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        if not distributed.is_available() or not isinstance(group, distributed.ProcessGroup):
            refuse(TypeError, "group", "a process group such as torch.distributed.new_group() returns in its members", group)
        self._group, self._device = group, device
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        if self.rank < 0:
            raise InvalidRequest("group: this process is not in it")
        self._first = distributed.get_global_rank(group, 0)

    @property
    def members(self) -> list[int]:
        """The ranks, counted over all processes of torch.distributed, of the group's members."""
        return list(distributed.get_process_group_ranks(self._group))

    @torch.no_grad()
    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send a tensor of rank 0 to the others, whose own values do not count. Returns its values, on the group's device."""
        if self.size == 1 or not tensor.numel():
            return tensor
        whole = tensor.detach().to(self._device).contiguous()
        distributed.broadcast(whole.reshape(-1).view(torch.uint8), self._first, self._group)  # no backend has all dtypes
        return whole

    def say(self, message: dict[str, Any]) -> None:
        """Send a message. On rank 0 alone."""
        text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        self.share(torch.tensor([len(text)]))
        self.share(text)

    def hear(self) -> dict[str, Any]:
        """Wait for a message. On all ranks but 0."""
        length = self.share(torch.zeros(1, dtype=torch.int64))
        text = self.share(torch.zeros(int(length), dtype=torch.uint8))
        heard: dict[str, Any] = json.loads(text.cpu().numpy().tobytes())
        return heard

    def total(self, number: float) -> float:
        """Add a number up over the ranks; on rank 0 the sum."""
        found = torch.tensor([number], dtype=torch.float64, device=self._device)
        distributed.reduce(found, self._first, group=self._group)
        return float(found)

    def everybodys(self, digest: bytes) -> list[bytes]:
        """Digests of the same length, from all ranks."""
        own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(self._device)
        found = [torch.empty_like(own) for _ in range(self.size)]
        distributed.all_gather(found, own, self._group)
        return [one.cpu().numpy().tobytes() for one in found]
