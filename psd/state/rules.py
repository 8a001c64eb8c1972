"""The update rules as a shard applies them to a page: what binds a group's flags and calls one kernel.

psd/contract/rules.py says what a rule's numbers may be, psd_core what they do. Must not know workers, rounds or locks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

import psd_core
from psd.contract.jobspec import GroupSpec
from psd.contract.rules import rule_info
from psd.contract.verdicts import Squares
from psd_core.arena import Page

if TYPE_CHECKING:
    from psd.state.rounds import Accumulators


@dataclass(slots=True)
class Gradient:
    """The reduced gradient of a block, not yet summed: scale * (accumulator + weight * last).

    The last contribution of a round is added in the same pass that applies the rule; a single one is not accumulated at all.

    Attributes:
        accumulator: sum of the weighted earlier contributions, or None.
        last: the contribution that closes the round, or None.
        touched: (k,) uint8, the segments for which some worker has a gradient; the others are carried over unchanged.
        ratios: (k,) float64, for a layer-wise rule: the trust ratio of each segment's tensor.
    """

    accumulator: NDArray[Any] | None
    last: NDArray[Any] | None
    weight: float
    scale: float
    touched: NDArray[np.uint8]
    ratios: NDArray[np.float64] | None = None


class Rule(Protocol):
    """One update rule, bound to the flags of a group."""

    @property
    def slot_starts(self) -> tuple[float, ...]:
        """What each of the arrays that it keeps per parameter begins with."""
        ...

    def apply(
        self, before: Page, after: Page, gradient: Gradient, segment_ends: NDArray[np.uint32], scalars: Sequence[float]
    ) -> None:
        """Write to `after` what `before` becomes under the gradient. `after` is a spare page of the same shape."""
        ...


class Elementwise:
    """A rule of psd_core, bound to the flags of a group."""

    def __init__(self, group: GroupSpec) -> None:
        self.slot_starts = rule_info(group.rule).slot_starts(group.flags, group.constants)
        self._name = group.rule
        self._flags = group.flags

    def apply(
        self, before: Page, after: Page, gradient: Gradient, segment_ends: NDArray[np.uint32], scalars: Sequence[float]
    ) -> None:
        """See Rule."""
        psd_core.step_block(
            self._name,
            before.parameter,
            after.parameter,
            before.slots,
            after.slots,
            gradient.accumulator,
            gradient.last,
            weight=gradient.weight,
            scale=gradient.scale,
            segment_ends=segment_ends,
            touched=gradient.touched,
            steps_in=before.steps,
            steps_out=after.steps,
            scalars=scalars,
            flags=self._flags,
        )


class Layerwise:
    """LAMB: the kernel gives the update's direction, the verdict each tensor's trust ratio.

    The direction is computed twice, once to measure it and once to apply it, so that nothing of a model's size is kept between
    the two.
    """

    def __init__(self, group: GroupSpec) -> None:
        self.slot_starts = rule_info(group.rule).slot_starts(group.flags, group.constants)
        self._name = group.rule
        self._flags = group.flags
        self._lr = rule_info(group.rule).scalars.index("lr")

    def squares(
        self,
        before: Page,
        gradient: Gradient,
        segment_ends: NDArray[np.uint32],
        scalars: Sequence[float],
        accumulators: Accumulators,
    ) -> Squares:
        """Sums of squares, two for each segment: of its parameters and of its direction; zeros where nothing is touched."""
        sums = [0] * (2 * len(segment_ends))
        if gradient.accumulator is None:
            return sums
        direction, *slots = lent = [accumulators.lend() for _ in (before.parameter, *before.slots)]
        try:
            self._direct(before, direction, slots, np.empty_like(before.steps), gradient, segment_ends, scalars)
            for segment, part, offset in _touched(gradient, segment_ends):
                parameter_squares = psd_core.square_sum(before.parameter[part], offset)
                direction_squares = psd_core.square_sum(direction[part], offset)
                if parameter_squares is None or direction_squares is None:
                    return None
                sums[2 * segment : 2 * segment + 2] = parameter_squares, direction_squares
        finally:
            for array in lent:
                accumulators.give_back(array)
        return sums

    def apply(
        self, before: Page, after: Page, gradient: Gradient, segment_ends: NDArray[np.uint32], scalars: Sequence[float]
    ) -> None:
        """See Rule. The gradient has the ratios."""
        assert gradient.ratios is not None
        self._direct(before, after.parameter, after.slots, after.steps, gradient, segment_ends, scalars)
        for segment, part, _ in _touched(gradient, segment_ends):
            step = after.parameter[part]
            psd_core.scaled_copy(step, step, -scalars[self._lr] * gradient.ratios[segment])
            psd_core.accumulate(step, before.parameter[part])

    def _direct(
        self,
        before: Page,
        direction: NDArray[Any],
        slots: Sequence[NDArray[Any]],
        steps: NDArray[np.uint64],
        gradient: Gradient,
        segment_ends: NDArray[np.uint32],
        scalars: Sequence[float],
    ) -> None:
        psd_core.step_block(
            self._name,
            before.parameter,
            direction,
            before.slots,
            slots,
            gradient.accumulator,
            gradient.last,
            weight=gradient.weight,
            scale=gradient.scale,
            segment_ends=segment_ends,
            touched=gradient.touched,
            steps_in=before.steps,
            steps_out=steps,
            scalars=scalars,
            flags=self._flags,
        )


class Static:
    """Tensors that never change."""

    slot_starts = ()

    def apply(self, *_: object) -> None:
        """Never called: nothing is pushed to a static group."""
        raise AssertionError("a static group has no updates")


def rule_of(group: GroupSpec) -> Rule:
    """The rule of a group; the spec has been checked, so that it exists."""
    return Static() if group.is_static else Layerwise(group) if group.is_layerwise else Elementwise(group)


def _touched(gradient: Gradient, segment_ends: NDArray[np.uint32]) -> Iterator[tuple[int, slice, int]]:
    """Number, place and offset in its run of each segment that the gradient touches."""
    start = 0
    for segment, (end, is_touched) in enumerate(zip(segment_ends.tolist(), gradient.touched.tolist(), strict=True)):
        if is_touched:
            yield segment, slice(start, end), start % psd_core.RUN
        start = end
