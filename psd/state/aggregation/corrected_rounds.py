"""The open round of a block with tensors whose gradients are corrected by the momentum before they are merged (HeLoCo).

psd/contract/heloco.py has the formula: it needs, of each tensor and each member of the round, norms and a product over all
shards. Each shard measures its parts; the verdict has the two factors of each member's correction, and the round is the
weighted mean of the corrected gradients. The momentum is that of the page to which the round is applied; before the first
round it is 0, and corrects nothing. Tensors that are not corrected have the weighted mean. Used under the block's lock; must
not know versions, workers' leases or shards.
"""

from __future__ import annotations

import numpy as np
from typing_extensions import override

import psd_core
from psd.contract.errors import InvalidRequest
from psd.contract.verdicts import Squares, Verdict
from psd.state.aggregation.exact_rounds import WeighedRound, shares_of
from psd.state.aggregation.rounds import Contribution, Unmeasured, Update
from psd_core.arena import Page


class CorrectedRound(WeighedRound):
    """Turns the members' gradients towards the momentum, tensor by tensor, and takes their mean."""

    @override
    def judge(self, verdict: Verdict) -> None:
        """Note the verdict.

        Raises:
            InvalidRequest: it is on a round of other members.
        """
        places = self._setting.ratio_places
        if places is not None and self._decided and not verdict.skip:
            tensors, left = divmod(len(verdict.ratios), 2 * self._decided.bit_count())
            if left or tensors <= places.max():
                raise InvalidRequest(
                    f"verdict.ratios: {len(verdict.ratios)} are not 2 for each of {self._decided.bit_count()} members and each "
                    "tensor that merges by heloco"
                )
        super().judge(verdict)

    @override
    def update(self, last: Contribution | None) -> Update:
        setting, verdict = self._setting, self._verdict
        places = setting.ratio_places
        if places is None or verdict is None or verdict.skip:
            return super().update(last)
        assert last is None
        if self._whole is None:
            counted = self._counted()
            found = np.array(verdict.ratios).reshape(-1, len(counted), 2)[places]
            factors = np.where((places >= 0)[:, None, None], found, (1.0, 0.0)).transpose(2, 1, 0) * shares_of(counted)
            gradient = self._weighed(counted, factors[0])
            turns = factors[1].sum(0)
            if turns.any():
                assert setting.momentum is not None
                momentum, scale = setting.momentum(self._scalars_of(counted))
                psd_core.weigh_segments(gradient.accumulator, momentum, setting.segment_ends, turns * scale, add=True)
            self._whole = self._update_of(counted, gradient)
        return self._whole

    @override
    def measure(self, page: Page | None, under: Verdict | None) -> Squares | Unmeasured:
        """Sums for each segment: of the momentum's squares and, for each member, the gradient's, and its products' by sign."""
        if not self._has_all:
            return Unmeasured.OPEN
        if True not in self._squares:
            self._squares[True] = self._sums()
        return self._squares[True]

    def _sums(self) -> Squares:
        setting, counted = self._setting, self._counted()
        places, ends = setting.ratio_places, setting.segment_ends.tolist()
        values = [self._values(part) for part in counted]
        each = 1 + 3 * len(values)
        sums: list[int | None] = [0] * (each * len(ends))
        assert places is not None
        assert setting.momentum is not None
        if all(one is None for one in values):
            return [one or 0 for one in sums]
        momentum, scale = setting.momentum(self._scalars_of(counted))
        mean = setting.accumulators.lend()
        try:
            psd_core.scaled_copy(mean, momentum, scale)
            for segment, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
                if places[segment] < 0:
                    continue
                offset, at = start % psd_core.RUN, each * segment
                sums[at] = psd_core.square_sum(mean[start:end], offset)
                for one in values:
                    if one is not None:
                        product = psd_core.product_sum(one[start:end], mean[start:end], offset)
                        sums[at + 1] = psd_core.square_sum(one[start:end], offset)
                        sums[at + 2] = None if product is None else max(product, 0)
                        sums[at + 3] = None if product is None else max(-product, 0)
                    at += 3
        finally:
            setting.accumulators.give_back(mean)
        return None if None in sums else [one or 0 for one in sums]
