"""The update rules as a shard applies them to a page: what binds a group's flags and calls one kernel.

psd/contract/rules.py says what a rule's numbers may be, psd_core what they do. Must not know workers, rounds or locks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import psd_core
from psd.contract.jobspec import GroupSpec
from psd.contract.rules import rule_info
from psd_core.arena import Page


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


class Static:
    """Tensors that never change."""

    slot_starts = ()

    def apply(self, *_: object) -> None:
        """Never called: nothing is pushed to a static group."""
        raise AssertionError("a static group has no updates")


def rule_of(group: GroupSpec) -> Rule:
    """The rule of a group; the spec has been checked, so that it exists."""
    return Static() if group.is_static else Elementwise(group)
