"""Treatment of the age of gradients in async and ssp: a rule around another rule, and the ages that a block has seen.

psd/contract/staleness.py names it. Must not know sessions or locks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psd.contract.custom_rules import ListedRule
from psd.contract.errors import InvalidRequest
from psd.contract.jobspec import GroupSpec
from psd.state import locks
from psd.state.aggregation.rules import BoundRule, Gradient, Rule, rule_of
from psd_core.arena import Page
from psd_core.steps import TablesCore


class AgedRate(Rule):
    """The rule, with lr / (1 + age) (Zhang et al. 2016, arXiv:1511.05950)."""

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


def bound_rule(group: GroupSpec, listed: Mapping[str, ListedRule]) -> BoundRule:
    """The rule of a group as its blocks apply it. It exists, because the spec has been checked."""
    rule, info = rule_of(group, listed), group.info
    return BoundRule(
        AgedRate(rule, group) if group.staleness else rule,
        group.rule,
        info.slot_starts(group.flags, group.constants),
        info.momentum_at(group.flags),
        info.momentum_scale,
    )


@locks.guarded_by(locks.Level.BLOCK)
class Ages:
    """The ages of the gradients that a block has applied without rounds. Under the block's lock.

    Attributes:
        counts: gradients by age_bucket of their age. total: the sum of these ages.
    """

    def __init__(self, block: int) -> None:
        self.counts: list[int] = []
        self.total = 0
        self._block = block

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

    def count(self, age: int | None) -> None:
        """Note that a gradient of this age was applied."""
        if age is not None:
            bucket = age_bucket(age)
            self.counts += [0] * (bucket + 1 - len(self.counts))
            self.counts[bucket] += 1
            self.total += age


class SteppedAges(Ages):
    """The ages of gradients of rows, those that steps have applied among them (psd_core/steps.py). core: has these."""

    def __init__(self, block: int, core: TablesCore) -> None:
        self._block = block
        self._own: list[int] = []
        self._own_total = 0
        self._core = core

    @property
    def counts(self) -> list[int]:  # type: ignore[override]
        """Gradients by age_bucket of their age."""
        return [one + other for one, other in zip_longest(self._own, self._core.ages[0], fillvalue=0)]

    @property
    def total(self) -> int:  # type: ignore[override]
        """The sum of these ages."""
        return self._own_total + self._core.ages[1]

    @override
    def count(self, age: int | None) -> None:
        if age is not None:
            bucket = age_bucket(age)
            self._own += [0] * (bucket + 1 - len(self._own))
            self._own[bucket] += 1
            self._own_total += age


def age_bucket(age: int) -> int:
    """The place of an age in a histogram of 0, 1, 2, 3 to 4, 5 to 8, 9 to 16, and so on."""
    return age if age < 2 else (age - 1).bit_length() + 1
