"""The open round of a block with tensors that are merged by norm and direction (RDA, Decoupled DiLoCo, arXiv 2604.21428).

With w the weights of the round's members, n the norms of their gradients of a tensor, d the gradients divided by these, and
D = sum(w d) / sum(w), the tensor's gradient is sum(w n) / sum(w) * D / |D|. A worker has the whole tensor, and says its n with
the push. D is cut over blocks and shards: each measures its part, and the verdict has |D|. Opposite directions, and the rest of
the block's tensors, are merged as their weighted mean; so is a single direction, which comes to the same. Used under the
block's lock; must not know versions, workers' leases or shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import psd_core
from psd.contract.verdicts import Squares, Verdict
from psd.state.aggregation.exact_rounds import WeighedRound, shares_of
from psd.state.aggregation.rounds import Contribution, Unmeasured, Update
from psd_core.arena import Page

NORM_MIN = 2.0**-100
"""A shorter gradient has no direction: its inverse might not be a float32."""

DIRECTION_MIN = 2.0**-20
"""|D| below this share of what equal directions would have is what rounding has left of opposite ones."""


class DirectedRound(WeighedRound):
    """Merges the members' gradients by norm and direction, tensor by tensor."""

    @override
    def update(self, last: Contribution | None) -> Update:
        places = self._setting.ratio_places
        if places is None or self._verdict is None or self._verdict.skip:
            return super().update(last)
        assert last is None
        if self._whole is None:
            counted = self._counted()
            shares, norms = shares_of(counted), self._norms(counted, places)
            factors = _factors(shares, norms, places, np.array(self._verdict.ratios)[places])
            self._whole = self._update_of(counted, self._weighed(counted, factors))
        return self._whole

    @override
    def measure(self, page: Page | None, under: Verdict | None) -> Squares | Unmeasured:
        """One sum of squares for each segment: of the sum of directions; 0 where there is none."""
        places, ends = self._setting.ratio_places, self._setting.segment_ends.tolist()
        assert places is not None
        if not self._has_all:
            return Unmeasured.OPEN
        if True not in self._squares:
            counted = self._counted()
            found = self._weighed(counted, _directions(shares_of(counted), self._norms(counted, places)))
            sums: list[int | None] = [0] * len(ends)
            if found.accumulator is not None:
                for segment, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
                    if places[segment] >= 0:
                        sums[segment] = psd_core.square_sum(found.accumulator[start:end], start % psd_core.RUN)
            self._squares[True] = None if None in sums else [each or 0 for each in sums]
        return self._squares[True]

    @staticmethod
    def _norms(counted: Sequence[Contribution], places: NDArray[np.intp]) -> NDArray[np.float64]:
        """(members, segments) the norm of each member's gradient of the segment's tensor; 0: it has no direction."""
        if not counted:
            return np.zeros((0, len(places)))
        norms = np.array([part.norms if part.weight else [0.0] * len(part.norms) for part in counted])
        return np.where(norms >= NORM_MIN, norms, 0.0)[:, places]


def _directions(shares: NDArray[np.float64], norms: NDArray[np.float64]) -> NDArray[np.float64]:
    """The factors of D."""
    return np.divide(shares, norms, out=np.zeros_like(norms), where=norms > 0)


def _factors(
    shares: NDArray[np.float64], norms: NDArray[np.float64], places: NDArray[np.intp], lengths: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The factors of the merged gradient. lengths: (segments,) |D| of each segment's tensor."""
    has_direction = norms > 0
    longest = (shares * has_direction).sum(0)
    is_directed = (places >= 0) & (has_direction.sum(0) > 1) & (lengths > DIRECTION_MIN * longest)
    to_norm = np.divide((shares * norms).sum(0), lengths, out=np.zeros_like(lengths), where=is_directed)
    return np.where(is_directed, _directions(shares, norms) * to_norm, shares)
