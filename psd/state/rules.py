"""The update rules as a shard applies them: one small class each, which binds a group's flags and calls one kernel.

psd/contract/rules.py names a rule's scalars, flags and slots for both sides; here is what they do to a page. Must not know
workers, rounds or locks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import psd_core
from psd.contract.jobspec import GroupSpec
from psd.contract.rules import SGD
from psd_core.arena import Page


@dataclass(slots=True)
class Gradient:
    """The reduced gradient of a block, not yet summed: scale * (accumulator + weight * last).

    The last contribution of a round is added in the same pass that applies the rule; a single one is not accumulated at all.

    Attributes:
        accumulator: sum of the weighted earlier contributions, or None.
        last: the contribution that closes the round, or None.
        touched: (k,) uint8, the segments for which some worker has a gradient; the others are carried over unchanged.
    """

    accumulator: NDArray[Any] | None
    last: NDArray[Any] | None
    weight: float
    scale: float
    touched: NDArray[np.uint8]


class Rule(Protocol):
    """One update rule, bound to the flags of a group.

    Attributes:
        slot_count: arrays that it keeps per parameter; they start as zeros.
    """

    slot_count: int

    def apply(
        self, before: Page, after: Page, gradient: Gradient, segment_ends: NDArray[np.uint32], scalars: Sequence[float]
    ) -> None:
        """Write to `after` what `before` becomes under the gradient. `after` is a spare page of the same shape."""
        ...


class Sgd:
    """Stochastic gradient descent with momentum, as torch.optim.SGD computes it."""

    def __init__(self, group: GroupSpec) -> None:
        self.slot_count = len(SGD.slots(group.flags))
        self._nesterov = "nesterov" in group.flags
        self._maximize = "maximize" in group.flags

    def apply(
        self, before: Page, after: Page, gradient: Gradient, segment_ends: NDArray[np.uint32], scalars: Sequence[float]
    ) -> None:
        """See Rule."""
        lr, momentum, dampening, weight_decay = scalars
        psd_core.sgd_block(
            before.parameter,
            after.parameter,
            before.slots[0] if self.slot_count else None,
            after.slots[0] if self.slot_count else None,
            gradient.accumulator,
            gradient.last,
            weight=gradient.weight,
            scale=gradient.scale,
            segment_ends=segment_ends,
            touched=gradient.touched,
            steps_in=before.steps,
            steps_out=after.steps,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=self._nesterov,
            maximize=self._maximize,
        )


class Static:
    """Tensors that never change."""

    slot_count = 0

    def apply(self, *_: object) -> None:
        """Never called: nothing is pushed to a static group."""
        raise AssertionError("a static group has no updates")


def rule_of(group: GroupSpec) -> Rule:
    """The rule of a group; the spec has been checked, so that it exists."""
    return Static() if group.is_static else Sgd(group)
