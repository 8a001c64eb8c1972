"""A learner's parameters as wholes: read for a difference, and moved to what has come back.

Must not know exchanges, or who else has these parameters; learner_group.py has the same for a learner of several processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch


class OwnParameters:
    """Parameters that this process has, each whole.

    Args:
        parameters: the declared ones. Those that are moved are named by their indices.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = parameters

    def whole(self, indices: Iterable[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """The present values of some parameters, with their indices."""
        for index in indices:
            yield index, self.parameters[index].detach()

    def mix(self, index: int, value: torch.Tensor, share: float) -> None:
        """Set a parameter to a value, but for its own share."""
        mixed_in(self.parameters[index], value, share)

    def move(self, index: int, by: torch.Tensor) -> None:
        """Add to a parameter."""
        moved(self.parameters[index], by)


@torch.no_grad()
def mixed_in(parameter: torch.Tensor, value: torch.Tensor, share: float) -> None:
    """Set a parameter to a value of its shape, but for its own share."""
    parameter.copy_(value if share == 0 else torch.lerp(value, parameter.to(value.device, value.dtype), share))


@torch.no_grad()
def moved(parameter: torch.Tensor, by: torch.Tensor) -> None:
    """Add to a parameter, in its own dtype."""
    parameter.add_(by.to(parameter.device, parameter.dtype))
