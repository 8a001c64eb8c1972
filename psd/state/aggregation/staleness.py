"""Treatment of old gradients in async and ssp: rules that wrap another rule, and what the readers of a block have read.

`AgedRate` divides the learning rate by 1 + age (Zhang et al. 2016, arXiv:1511.05950). `Compensated` adds to the gradient, to
first order, what it would have changed by while it was under way (DC-ASGD, Zheng et al. 2017, arXiv:1609.08326).
psd/contract/staleness.py names them. Must not know sessions or locks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psd.contract.custom_rules import ListedRule
from psd.contract.errors import InvalidRequest
from psd.contract.jobspec import GroupSpec
from psd.contract.staleness import ADAPTIVE, NONE, RATE
from psd.state import locks
from psd.state.aggregation.rules import Gradient, Rule, rule_of
from psd_core.arena import Page

EPS = 1e-7
"""The constant of DC-ASGD-a, as in the paper."""


class AgedRate(Rule):
    """A rule with its learning rate divided by 1 + age."""

    needs_backup = False

    def __init__(self, rule: Rule, group: GroupSpec) -> None:
        self._rule = rule
        self._rate = group.info.scalars.index("lr")

    @override
    def apply(
        self, before: Page, after: Page, gradient: Gradient, segment_ends: NDArray[np.uint32], scalars: Sequence[float]
    ) -> None:
        aged = list(scalars)
        aged[self._rate] /= 1 + gradient.age
        self._rule.apply(before, after, gradient, segment_ends, aged)


class Compensated(Rule):
    """A rule applied to the gradient g + lambda * g * g * (parameters now - parameters that the worker had read).

    g * g stands for the diagonal of the Hessian. DC-ASGD-a divides lambda, per element, by the root of a running mean of g * g,
    which is the page's last slot. A gradient whose `backup` is not known is left as it is. When the rule maximizes, the
    objective's curvature has the other sign.
    """

    needs_backup = True

    def __init__(self, rule: Rule, group: GroupSpec) -> None:
        self._rule = rule
        self._is_adaptive = group.staleness == ADAPTIVE
        self._lambda = group.info.scalars.index("dc_lambda")
        self._sign = -1.0 if "maximize" in group.flags else 1.0

    @override
    def apply(
        self, before: Page, after: Page, gradient: Gradient, segment_ends: NDArray[np.uint32], scalars: Sequence[float]
    ) -> None:
        grad = gradient.reduced()
        strength: float | NDArray[Any] = self._sign * scalars[self._lambda]
        if self._is_adaptive:
            decay, mean_square = scalars[self._lambda + 1], after.slots[-1]
            np.multiply(grad, grad, out=mean_square)
            mean_square *= 1 - decay
            mean_square += decay * before.slots[-1]
            # Segments without a gradient keep their mean; in the others, zeros are gradients, too.
            for index in np.flatnonzero(gradient.touched == 0).tolist():
                run = slice(int(segment_ends[index - 1]) if index else 0, int(segment_ends[index]))
                mean_square[run] = before.slots[-1][run]
            strength = strength / np.sqrt(mean_square + np.asarray(EPS, mean_square.dtype))
        if gradient.age and gradient.backup is not None:
            moved = before.parameter - gradient.backup
            moved *= grad
            moved *= grad
            moved *= strength
            moved += grad
            gradient = replace(gradient, accumulator=None, last=moved, weight=1.0, scale=1.0)
        self._rule.apply(before, after, gradient, segment_ends, scalars)


def bound_rule(group: GroupSpec, listed: Mapping[str, ListedRule]) -> Rule:
    """The rule of a group as its blocks apply it. It exists, because the spec has been checked."""
    rule = rule_of(group, listed)
    if group.staleness == NONE:
        return rule
    wrap: Callable[[Rule, GroupSpec], Rule] = AgedRate if group.staleness == RATE else Compensated
    return wrap(rule, group)


@locks.guarded_by(locks.Level.BLOCK)
class Readers:
    """The versions of a block that workers have read, and the age of their gradients. Used under the block's lock.

    The backups of DC-ASGD are the pages that the shard has sent, kept pinned: an update never writes to such a page, so that
    keeping it costs no copy. They take at most one page, parameters and slots, per worker and block; workers that have read the
    same version share one. They end with the process: a gradient that was under way then is not compensated.

    Args:
        block: the block's index, for messages.
        unpin: gives a page back.

    Attributes:
        ages: number of gradients by age_bucket of their age. age_total: the sum of these ages.
    """

    def __init__(self, block: int, unpin: Callable[[Page], None]) -> None:
        self.ages: list[int] = []
        self.age_total = 0
        self._block = block
        self._unpin = unpin
        self._pages: dict[int, Page] = {}

    def keep(self, rank: int, page: Page | None) -> None:
        """Keep the pinned page that a worker has read, and give its earlier one back; with None, keep none."""
        before = self._pages.pop(rank, None)
        if page is not None:
            self._pages[rank] = page
        if before is not None:
            self._unpin(before)

    def drop(self) -> None:
        """Give all kept pages back."""
        for rank in list(self._pages):
            self.keep(rank, None)

    def age(self, rank: int, version_read: int | None, version: int) -> int | None:
        """The age of a gradient; None if its worker does not name the version it read.

        Raises:
            InvalidRequest: the block has not reached that version yet.
        """
        if version_read is None:
            return None
        if version_read > version:
            raise InvalidRequest(
                f"versions: worker {rank} says that it has read version {version_read} of block {self._block}, which is at "
                f"{version}"
            )
        return version - version_read

    def backup(self, rank: int, version_read: int | None) -> NDArray[Any] | None:
        """The parameters of the version that a worker has read, if they are kept."""
        page = self._pages.get(rank)
        return page.parameter if page is not None and page.version == version_read else None

    def count(self, age: int | None) -> None:
        """Note that a gradient of this age was applied."""
        if age is not None:
            bucket = age_bucket(age)
            self.ages += [0] * (bucket + 1 - len(self.ages))
            self.ages[bucket] += 1
            self.age_total += age


def age_bucket(age: int) -> int:
    """The place of an age in a histogram of 0, 1, 2, 3 to 4, 5 to 8, 9 to 16, and so on."""
    return age if age < 2 else (age - 1).bit_length() + 1
