"""Values that several workers have offered for one block of buffers, and their mean.

Kept only in memory: after a restart of the shard, the mean covers only workers that have offered since. Guarded by the block's
lock. Must not know pages, sessions or messages.
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
        """Store this rank's new offer, and return the mean of the offers of this rank and those present.

        Adds in the order of the ranks, so that the result does not depend on who came first. Integers have no mean: for them,
        returns the offer of the lowest rank.
        """
        self._by_rank[rank] = np.array(values)
        offers = [self._by_rank[key] for key in sorted(self._by_rank) if key == rank or key in present]
        if values.dtype.kind != "f":
            return offers[0]
        total = np.zeros(values.shape, np.float64)
        for offer in offers:
            total += offer
        return (total / len(offers)).astype(values.dtype)
