"""Values that several workers have offered for one block of buffers, and their mean.

Kept in memory alone: after a restart of the shard the mean is of those that have offered since. Guarded by the block's lock.
Must not know pages, sessions or messages.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Offered:
    """The last offer of each rank, for one block."""

    def __init__(self) -> None:
        self._by_rank: dict[int, NDArray[Any]] = {}

    def mean_with(self, rank: int, values: NDArray[Any], present: Collection[int]) -> NDArray[Any]:
        """The mean with this rank's new offer, over those of the ranks that are present; in their order, so that it does not
        depend on who came first. Integers have no mean: those of the lowest rank."""
        self._by_rank[rank] = np.array(values)
        offers = [self._by_rank[key] for key in sorted(self._by_rank) if key == rank or key in present]
        if values.dtype.kind != "f":
            return offers[0]
        total = np.zeros(values.shape, np.float64)
        for offer in offers:
            total += offer
        return (total / len(offers)).astype(values.dtype)
