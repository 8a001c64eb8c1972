"""The common part of all optimizers that `distribute` returns: the given one's param_groups, and the connection.

Must not know steps.
"""

from __future__ import annotations

from typing import Any

import torch

from psd.contract.errors import InvalidRequest
from psd_client.client import ParameterServer


class JobOptimizer(torch.optim.Optimizer):
    """An optimizer of a job. Its param_groups are those of the one that was given: the same dicts, not copies.

    Attributes:
        ps: the connection, for barriers, the clock and the rank.
    """

    def __init__(self, given: torch.optim.Optimizer, ps: ParameterServer) -> None:
        super().__init__(given.param_groups, dict(given.defaults))
        self.ps = ps

    @property
    def rank(self) -> int:
        """This worker's number, from 0; it selects this worker's share of the data."""
        return self.ps.rank

    @property
    def world_size(self) -> int:
        """Number of workers, and so of shares of the data."""
        return self.ps.world_size

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise InvalidRequest: the groups of a job are fixed when it is declared."""
        if hasattr(self, "ps"):
            raise InvalidRequest("add_param_group: the job has been declared; add all groups before distribute()")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"a {type(self).__name__} holds a connection and cannot be copied or pickled; use its state_dict()")
