"""The update rules as a job declares them: which numbers are in range, which are fixed, and what slots begin with.

Shared by the clients, which declare a rule, and the shards, which apply it. The names of scalars, flags and slots are the
kernels' (psd_core.RULES): a rule that is there is here, and this module adds what its numbers mean.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import psd_core
from psd.contract.config import is_rule_path
from psd.contract.custom_rules import name_problem
from psd.contract.errors import InvalidRequest
from psd.contract.staleness import STALENESS, check_staleness

FLOAT32_MAX = 3.4028234663852886e38
"""A double beyond it is infinite where the kernels compute in float32."""

WEIGHT_MIN, WEIGHT_MAX = 1e-9, 1e15
"""Of a push, in samples. Weights and 1 / their sum are rounded to float32; far outside of this range a mean of finite gradients
would become NaN, and with it the parameters."""


FLOAT32_TINY = 1.1754943508222875e-38
"""The smallest normal float32: what must be greater than 0 must be so in the kernels, too."""

_RANGES: dict[str, tuple[float, float]] = {
    "alpha": (0, 1),
    "beta1": (0, math.nextafter(1, 0)),
    "beta2": (0, math.nextafter(1, 0)),
    "dampening": (-math.inf, math.inf),
    "dc_decay": (0, 1),
    "rho": (0, 1),
}
"""Of scalars, both ends included; of those that are not listed: 0 or more."""

_RANGES_OF_STALENESS = {name for staleness in STALENESS.values() for name in staleness.scalar_names}

_RANGES_OF_RULE = {("ftrl", "lr"): (FLOAT32_TINY, math.inf)}  # it divides by the learning rate

_CONSTANTS = {
    "adagrad": {"initial_accumulator_value": "sum"},
    "ftrl": {"initial_accumulator_value": "accumulator"},
}
"""Numbers that are fixed for the job, and the slot that begins with each; the other slots begin as zeros."""


@dataclass(frozen=True)
class RuleInfo:
    """What both sides know of a rule.

    Attributes:
        name: as it stands in GroupSpec.rule.
        scalars: names of the numbers that travel with each push, in order.
        flags: names of the switches that are fixed for the job.
        constants: names of the numbers that are fixed for the job, in order: initial values of slots.
        extra_slots: names of slots behind those of psd_core's rule: all of a user's own rule, and what its staleness keeps.
        is_custom: a user's own rule, of which psd knows nothing but what it declares.
    """

    name: str
    scalars: tuple[str, ...]
    flags: frozenset[str]
    constants: tuple[str, ...] = ()
    extra_slots: tuple[str, ...] = ()
    is_custom: bool = False

    def slots(self, flags: Collection[str]) -> tuple[str, ...]:
        """Names of the per-element slots of a group built with `flags`."""
        own = psd_core.RULES[self.name].slots_of(flags) if self.name in psd_core.RULES else ()
        return own + self.extra_slots

    def slot_starts(self, flags: Collection[str], constants: Sequence[float]) -> tuple[float, ...]:
        """What each of `slots` is filled with before the first update."""
        slot_of = {name: name for name in self.constants} if self.is_custom else _CONSTANTS.get(self.name, {})
        starts = {slot_of[name]: value for name, value in zip(self.constants, constants, strict=True)}
        return tuple(starts.get(slot, 0.0) for slot in self.slots(flags))

    def problem(self, name: str, value: float) -> str | None:
        """What is wrong with the value of a scalar or a constant by itself, or None."""
        if not abs(value) <= FLOAT32_MAX:  # also refuses NaN
            return f"must be finite, also as a float32, got {value}"
        if self.is_custom and name not in _RANGES_OF_STALENESS:
            return None
        low, high = _RANGES_OF_RULE.get((self.name, name)) or _RANGES.get(name, (0, math.inf))
        if low <= value <= high:
            return None
        if low == FLOAT32_TINY:
            return f"must be > 0, also as a float32, got {value}"
        words = f"must be >= {low:g}"
        if high < math.inf:
            words += " and <= 1" if high == 1 else " and < 1"
        return f"{words}, got {value}"

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

    def check_constants(self, values: Sequence[float]) -> None:
        """Raise InvalidRequest unless `values` are finite, in number and in range for this rule."""
        if len(values) != len(self.constants):
            raise InvalidRequest(
                f"groups.constants: rule {self.name!r} takes {len(self.constants)} "
                f"({', '.join(self.constants)}), got {len(values)}"
            )
        for name, value in zip(self.constants, values, strict=True):
            problem = self.problem(name, value)
            if problem:
                raise InvalidRequest(f"groups.constants: {name} {problem}")

    def check_scalars(self, values: Sequence[float], flags: Collection[str], group: int) -> None:
        """Raise InvalidRequest unless `values` are finite, in number and in range for this rule."""
        if len(values) != len(self.scalars):
            raise InvalidRequest(
                f"scalars[{group}].values: rule {self.name!r} takes {len(self.scalars)} "
                f"({', '.join(self.scalars)}), got {len(values)}"
            )
        by_name = dict(zip(self.scalars, values, strict=True))
        for name, value in by_name.items():
            problem = self.problem(name, value)
            if problem:
                raise InvalidRequest(f"scalars[{group}].{name}: {problem}")
            if value != 0 and name in self.flags and name not in flags:
                raise InvalidRequest(
                    f"scalars[{group}].{name}: is {value}, but the group was declared without {name} and has no slot for it"
                )
        if "nesterov" in flags and (by_name["momentum"] <= 0 or by_name["dampening"] != 0):
            raise InvalidRequest(
                f"scalars[{group}]: nesterov needs momentum > 0 and dampening 0, "
                f"got {by_name['momentum']} and {by_name['dampening']}"
            )


def check_weight(weight: float) -> None:
    """Raise InvalidRequest unless `weight` may stand behind a gradient: 0, or WEIGHT_MIN to WEIGHT_MAX."""
    if weight != 0 and not WEIGHT_MIN <= weight <= WEIGHT_MAX:  # also refuses NaN
        raise InvalidRequest(f"weight: must be 0, or {WEIGHT_MIN:g} to {WEIGHT_MAX:g}, got {weight}")


STATIC = RuleInfo("static", (), frozenset())
"""Tensors of a static group get initial values and nothing else: no pushes, no rounds."""

LAYERWISE = "lamb"
"""The rule whose updates depend on norms over whole tensors; see psd/contract/verdicts.py."""

RULES = {STATIC.name: STATIC} | {
    name: RuleInfo(name, rule.scalars, frozenset(rule.flags), tuple(_CONSTANTS.get(name, ())))
    for name, rule in psd_core.RULES.items()
}


def rule_info(name: str, *, slots: Sequence[str] = (), scalars: Sequence[str] = (), staleness: str = "") -> RuleInfo:
    """What is known of a rule as a group declares it, staleness included.

    Args:
        name: of one of psd's rules, or the import path of a user's own. slots, scalars: names; of the latter only.

    Raises:
        InvalidRequest: there is no such rule, or the arguments do not go with it.
    """
    if is_rule_path(name):
        for field, names in (("slots", slots), ("scalars", scalars)):
            problem = name_problem(names)
            if problem:
                raise InvalidRequest(f"groups.{field}: of rule {name!r}: {problem}")
        info = RuleInfo(name, tuple(scalars), frozenset(), tuple(slots), tuple(slots), is_custom=True)
    elif name not in RULES:
        raise InvalidRequest(
            f"groups.rule: unknown rule {name!r}; there are {sorted(RULES)}, and import paths such as my_module:MyRule"
        )
    elif slots or scalars:
        raise InvalidRequest(f"groups.{'slots' if slots else 'scalars'}: only a user's own rule names them, not {name!r}")
    else:
        info = RULES[name]
    if not staleness:
        return info
    check_staleness(staleness, name, info.scalars)
    more = STALENESS[staleness]
    return replace(info, scalars=info.scalars + more.scalar_names, extra_slots=info.extra_slots + more.slots)
