"""Treatments of the age of gradients in async and ssp: the words, the numbers that travel, the slots.

A gradient's *age* is the number of updates that its block has seen since the worker read the parameters that it was computed
from. psd/state/aggregation/staleness.py acts on it. Must not know blocks or messages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from psd.contract.arguments import refuse
from psd.contract.errors import InvalidRequest
from psd_core.optimizer import Range, RuleFacts


@dataclass(frozen=True)
class Staleness:
    """One way to treat aged gradients.

    Attributes:
        scalars: numbers that travel with each push behind the rule's own, what they are unless the user says otherwise, and
            what they may be.
        slots: arrays that it keeps per parameter behind the rule's own; they begin as zeros.
    """

    scalars: tuple[tuple[str, float, Range], ...] = ()
    slots: tuple[str, ...] = ()

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """Names of `scalars`."""
        return tuple(name for name, _, _ in self.scalars)

    @property
    def ranges(self) -> dict[str, Range]:
        """Ranges of `scalars`, by name."""
        return {name: allowed for name, _, allowed in self.scalars}


NONE, RATE, COMPENSATED, ADAPTIVE = "", "lr", "dc", "dc-adaptive"

STALENESS = {
    NONE: Staleness(),
    RATE: Staleness(),
    COMPENSATED: Staleness((("dc_lambda", 0.04, Range(0)),)),
    ADAPTIVE: Staleness((("dc_lambda", 2.0, Range(0)), ("dc_decay", 0.95, Range(0, 1))), ("dc_mean_square",)),
}
"""Treatments by word. "lr": the learning rate is divided by 1 + age (Zhang et al. 2016, arXiv:1511.05950). "dc", "dc-adaptive":
DC-ASGD-c and DC-ASGD-a (Zheng et al. 2017, arXiv:1609.08326), with that paper's values for CIFAR-10."""

_EXPECTED = 'expected "lr", "dc" or "dc-adaptive", the latter two also with a number, such as "dc:0.04"'


def parse_staleness(word: str | None) -> tuple[str, dict[str, float]]:
    """Parse a word such as "dc:0.04" into name and scalars; None: no treatment. InvalidRequest says what was expected."""
    if not isinstance(word, str | None):
        refuse(InvalidRequest, "staleness", _EXPECTED.removeprefix("expected "), word)
    name, colon, number = (word or NONE).partition(":")
    if name not in STALENESS or (not name and word):
        raise InvalidRequest(f"staleness: got {word!r}; {_EXPECTED}")
    scalars = {scalar: default for scalar, default, _ in STALENESS[name].scalars}
    if colon:
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if "dc_lambda" not in scalars or not (math.isfinite(value) and value >= 0):
            raise InvalidRequest(f"staleness: got {word!r}; {_EXPECTED}")
        scalars["dc_lambda"] = value
    return name, scalars


def check_staleness(name: str, rule: RuleFacts) -> None:
    """Raise InvalidRequest unless a rule can be combined with `name`."""
    if name not in STALENESS:
        raise InvalidRequest(f"groups.staleness: must be one of {sorted(filter(None, STALENESS))} or empty, got {name!r}")
    if name == RATE and ("lr" not in rule.scalars or not rule.row.lr_scales_steps):
        reason = "has no lr to divide" if rule.row.lr_scales_steps else "computes the parameters from lr anew at each update"
        raise InvalidRequest(f"groups.staleness: {RATE!r} does not go with rule {rule.name!r}, which {reason}")
    if name and rule.name == "static":
        raise InvalidRequest(f"groups.staleness: is {name!r}, but nothing is pushed to a static group")
