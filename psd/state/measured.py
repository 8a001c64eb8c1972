"""The open round of a block in a job whose updates need norms over the whole gradient: it waits for a verdict, too.

When all members' gradients are here it is *gathered*: its gradient is final, and can be measured. With the verdict it is
complete. Under the block's lock, as all rounds; must not know pages' versions, shards or workers' leases.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import psd_core
from psd.contract.verdicts import Squares, Verdict
from psd.state.rounds import Accumulators, Contribution, ExactRound
from psd.state.rules import Gradient, Layerwise, Rule
from psd_core.arena import Page


class Unmeasured(enum.Enum):
    """The reason why a round has no measure here."""

    OPEN = "open"  # gradients are still to come
    CLOSED = "closed"


class MeasuredRound(ExactRound):
    """Keeps contributions apart until all are there; then one gradient, until its verdict comes.

    Args:
        ratio_places: for a layer-wise rule: of each segment of the block, where its tensor's ratio is in a verdict.

    Attributes:
        verdict: None: not known here yet.
    """

    def __init__(
        self,
        segment_count: int,
        *,
        is_mean: bool,
        accumulators: Accumulators,
        waited: Callable[[], int],
        ratio_places: NDArray[np.intp] | None,
    ) -> None:
        super().__init__(segment_count, is_mean=is_mean, accumulators=accumulators, waited=waited)
        self.verdict: Verdict | None = None
        self._ratio_places = ratio_places
        self._whole: Gradient | None = None
        self._squares: dict[bool, Squares] = {}

    def is_complete_with(self, part: Contribution) -> bool:
        """See Round. A gradient alone never completes it: it has to be measured."""
        del part
        return False

    def is_gathered(self) -> bool:
        """True if the gradients of all members are here."""
        return super().is_complete()

    def is_complete(self) -> bool:
        """See Round. A round without members changes nothing and needs no verdict."""
        return self.is_gathered() and (self.members == 0 or self.verdict is not None)

    def gradient(self, last: Contribution | None) -> Gradient:
        """See Round: follows the verdict."""
        assert last is None
        whole, verdict = self._gathered(), self.verdict
        if verdict is None:
            return whole
        if verdict.skip:
            return replace(whole, accumulator=None)
        ratios = None if self._ratio_places is None else np.array(verdict.ratios)[self._ratio_places]
        return replace(whole, scale=verdict.scale, ratios=ratios)

    def measure(self, page: Page, rule: Rule, segment_ends: NDArray[np.uint32], under: Verdict | None) -> Squares:
        """Sums of squares of a gathered round: of the gradient; or of the updates `under` a verdict, two for each segment."""
        of_gradient = under is None
        if of_gradient not in self._squares:
            gradient = self._gathered()
            if under is not None:
                assert isinstance(rule, Layerwise)
                judged = replace(gradient, scale=under.scale)
                self._squares[of_gradient] = rule.squares(page, judged, segment_ends, self.scalars, self._accumulators)
            elif gradient.accumulator is None:
                self._squares[of_gradient] = [0]
            else:
                total = psd_core.square_sum(gradient.accumulator)
                self._squares[of_gradient] = None if total is None else [total]
        return self._squares[of_gradient]

    def end(self) -> None:
        """See Round."""
        self._whole = None
        super().end()

    def _gathered(self) -> Gradient:
        """The gradient, reduced to one array; the same numbers that a step would reduce it to."""
        if self._whole is None:
            found = super().gradient(None)
            self._whole = Gradient(self._reduced_to_one(found), None, 1.0, 1.0, found.touched)
        return self._whole

    def _reduced_to_one(self, found: Gradient) -> NDArray[Any] | None:
        values, last = found.accumulator, found.last
        if last is None or (values is None and (found.weight, found.scale) == (1.0, 1.0)):
            return values if last is None else last
        if values is None:
            values = self._sum = self._accumulators.lend()
            psd_core.scaled_copy(values, last, found.weight)
        else:
            psd_core.accumulate(values, last, found.weight)
        psd_core.scaled_copy(values, values, found.scale)
        return values
