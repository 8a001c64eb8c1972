"""Names of the update rules: which scalars travel with a push, which flags a rule is built with, which slots it needs.

Shared by the clients, which declare a rule, and the shards, which apply it (psd/state/rules.py holds the arithmetic). Adding a
rule starts here with one entry in RULES.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psd.contract.errors import InvalidRequest

FLOAT32_MAX = 3.4028234663852886e38
"""A double beyond it is infinite where the kernels compute in float32."""

WEIGHT_MIN, WEIGHT_MAX = 1e-9, 1e15
"""Of a push, in samples. Weights and 1 / their sum are rounded to float32; far outside of this range a mean of finite gradients
would become NaN, and with it the parameters."""


@dataclass(frozen=True)
class RuleInfo:
    """What both sides know of a rule.

    Attributes:
        name: as it stands in GroupSpec.rule.
        scalars: names of the numbers that travel with each push, in order.
        flags: names of the switches that are fixed for the job.
    """

    name: str
    scalars: tuple[str, ...]
    flags: frozenset[str]

    def slots(self, flags: Sequence[str]) -> tuple[str, ...]:
        """Names of the per-element slots of a group built with `flags`."""
        return ("momentum",) if "momentum" in flags else ()

    def check_flags(self, flags: Sequence[str]) -> None:
        """Raise InvalidRequest unless `flags` are known, sorted, unique and make sense together."""
        if list(flags) != sorted(set(flags)):
            raise InvalidRequest(f"groups.flags: must be sorted and unique, got {list(flags)}")
        unknown = set(flags) - self.flags
        if unknown:
            raise InvalidRequest(
                f"groups.flags: rule {self.name!r} has no flag {sorted(unknown)[0]!r}; it has {sorted(self.flags)}"
            )
        if "nesterov" in flags and "momentum" not in flags:
            raise InvalidRequest("groups.flags: nesterov needs momentum")

    def check_scalars(self, values: Sequence[float], flags: Sequence[str], group: int) -> None:
        """Raise InvalidRequest unless `values` are finite, in number and in range for this rule."""
        if len(values) != len(self.scalars):
            raise InvalidRequest(
                f"scalars[{group}].values: rule {self.name!r} takes {len(self.scalars)} "
                f"({', '.join(self.scalars)}), got {len(values)}"
            )
        for name, value in zip(self.scalars, values, strict=True):
            if not abs(value) <= FLOAT32_MAX:  # also refuses NaN
                raise InvalidRequest(f"scalars[{group}].{name}: must be finite, also as a float32, got {value}")
            if value < 0 and name != "dampening":
                raise InvalidRequest(f"scalars[{group}].{name}: must be >= 0, got {value}")
        if self.name == "sgd":
            momentum, dampening = values[1], values[2]
            if momentum != 0 and "momentum" not in flags:
                raise InvalidRequest(
                    f"scalars[{group}].momentum: is {momentum}, but the group was declared without momentum "
                    "and has no slot for it"
                )
            if "nesterov" in flags and (momentum <= 0 or dampening != 0):
                raise InvalidRequest(
                    f"scalars[{group}]: nesterov needs momentum > 0 and dampening 0, got {momentum} and {dampening}"
                )


def check_weight(weight: float) -> None:
    """Raise InvalidRequest unless `weight` may stand behind a gradient: 0, or WEIGHT_MIN to WEIGHT_MAX."""
    if weight != 0 and not WEIGHT_MIN <= weight <= WEIGHT_MAX:  # also refuses NaN
        raise InvalidRequest(f"weight: must be 0, or {WEIGHT_MIN:g} to {WEIGHT_MAX:g}, got {weight}")


SGD = RuleInfo("sgd", ("lr", "momentum", "dampening", "weight_decay"), frozenset({"maximize", "momentum", "nesterov"}))
STATIC = RuleInfo("static", (), frozenset())
"""Tensors of a static group get initial values and nothing else: no pushes, no rounds."""

RULES = {rule.name: rule for rule in (SGD, STATIC)}


def rule_info(name: str) -> RuleInfo:
    """The rule of that name; InvalidRequest names those that exist."""
    try:
        return RULES[name]
    except KeyError:
        raise InvalidRequest(f"groups.rule: unknown rule {name!r}; there are {sorted(RULES)}") from None
