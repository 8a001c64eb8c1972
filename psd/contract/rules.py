"""The update rules as a job declares them: checks of flags, constants and scalars.

Shared by the clients, which declare a rule, and the shards, which apply it. The rules are those of psd_core/rules.py, which has
the bounds of their numbers, and the users' own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from psd.contract.arguments import real_number
from psd.contract.config import is_rule_path
from psd.contract.custom_rules import name_problem
from psd.contract.errors import InvalidRequest
from psd_core.optimizer import Range, RuleFacts, Slot, facts_of
from psd_core.row_rules import RowwiseAdagrad
from psd_core.rules import RULES as PSD_RULES

WEIGHT_MIN, WEIGHT_MAX = 1e-9, 1e15
"""Limits of a push's weight, in samples. Weights and 1 / their sum are rounded to float32; far outside this range a mean of
finite gradients would become NaN, and so would the parameters."""

_ANY = Range()


@dataclass(frozen=True)
class RuleInfo(RuleFacts):
    """Facts of a rule as a group declares it, and the checks of both sides.

    Attributes:
        is_custom: True for a user's own rule, of which psd knows only what the rule declares.
    """

    is_custom: bool = False

    def momentum_at(self, flags: Collection[str]) -> int | None:
        """The place, among the slots, of the one with a mean of the gradients so far; None: there is none."""
        slots = self.slots(flags)
        return slots.index(self.row.momentum_slot) if self.row.momentum_slot in slots else None

    def momentum_scale(self, scalars: Sequence[float]) -> float:
        """The factor by which that slot is a mean."""
        return self.row.momentum_scale(dict(zip(self.scalars, scalars, strict=True)))

    def slot_starts(self, flags: Collection[str], constants: Sequence[float]) -> tuple[float, ...]:
        """Initial values of the slots."""
        values = dict(zip(self.constants, constants, strict=True))
        return tuple(values.get(slot.start, 0.0) for slot in self.all_slots if slot.name in self.slots(flags))

    def problem(self, name: str, value: float) -> str | None:
        """Problem with the value of a scalar or a constant by itself; None if there is none."""
        return self.ranges.get(name, _ANY).problem(value)

    def ranges_together(self, flags: Collection[str]) -> list[Range] | None:
        """Ranges of the scalars, in order, within which `check_scalars` takes them all; None: there are no such ranges."""
        if self.is_custom:
            return None
        narrower = self.row.ranges_together(flags) if self.scalars else {}
        if narrower is None:
            return None
        own = dict(self.ranges) | {name: Range(0, 0) for name in self.scalars if name in self.flags and name not in flags}
        return [(own | dict(narrower)).get(name, _ANY) for name in self.scalars]

    def check_flags(self, flags: Sequence[str]) -> None:
        """Raise InvalidRequest unless `flags` are known, sorted, unique and make sense together."""
        if list(flags) != sorted(set(flags)):
            raise InvalidRequest(f"groups.flags: must be sorted and unique, got {list(flags)}")
        unknown = set(flags).difference(self.flags)
        if unknown:
            raise InvalidRequest(
                f"groups.flags: rule {self.name!r} has no flag {sorted(unknown)[0]!r}; it has {sorted(self.flags)}"
            )
        for flag, needed in self.row.needs.items():
            if flag in flags and needed not in flags:
                raise InvalidRequest(f"groups.flags: {flag} needs {needed}")

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

    def check_scalars(self, values: Sequence[float], flags: Collection[str], where: str) -> None:
        """Raise InvalidRequest unless `values` are finite, in number and in range for this rule.

        where: the place in a message, such as "scalars[0]".
        """
        if len(values) != len(self.scalars):
            raise InvalidRequest(
                f"{where}.values: rule {self.name!r} takes {len(self.scalars)} ({', '.join(self.scalars)}), got {len(values)}"
            )
        by_name = dict(zip(self.scalars, values, strict=True))
        for name, value in by_name.items():
            problem = self.problem(name, value)
            if problem:
                raise InvalidRequest(f"{where}.{name}: {problem}")
            if value != 0 and name in self.flags and name not in flags:
                raise InvalidRequest(
                    f"{where}.{name}: is {value}, but the group was declared without {name} and has no slot for it"
                )
        for flag, problem in self.row.conflicts(flags, by_name):
            raise InvalidRequest(f"{where}: {flag} {problem}")


def weight_of(value: Any, name: str = "weight") -> float:
    """The weight of a gradient: 0, or WEIGHT_MIN to WEIGHT_MAX. Raises InvalidRequest, naming `name`, for anything else."""
    weight = float(value) if type(value) in (float, int) else real_number(InvalidRequest, name, value)
    if weight != 0 and not WEIGHT_MIN <= weight <= WEIGHT_MAX:  # also refuses NaN
        raise InvalidRequest(f"{name}: must be 0, or {WEIGHT_MIN:g} to {WEIGHT_MAX:g}, got {weight}")
    return weight


STATIC = RuleInfo("static")
"""The rule of static groups: their tensors get initial values only, no pushes and no rounds."""

BUFFERS = RuleInfo("buffers", flags=("mean",))
"""The rule of tensors that workers compute themselves, such as BatchNorm's running statistics: kept as one worker has sent
them, or as the mean."""

PUBLISHED = RuleInfo("published")
"""The rule of published tensors: each push sets them, whole. They have no slots, and nothing is computed."""

TABLE_RULES = {RowwiseAdagrad.rule: RuleInfo(**vars(facts_of(RowwiseAdagrad)))}
"""Rules that only tables have."""

RULES = (
    {STATIC.name: STATIC, BUFFERS.name: BUFFERS, PUBLISHED.name: PUBLISHED}
    | {name: RuleInfo(**vars(facts)) for name, facts in PSD_RULES.items()}
    | TABLE_RULES
)


def rule_info(name: str, *, slots: Sequence[str] = (), scalars: Sequence[str] = ()) -> RuleInfo:
    """Facts of a rule as a group declares it.

    Args:
        name: one of psd's rules, or the import path of a user's own. slots, scalars: names; only for a user's own.

    Raises:
        InvalidRequest: there is no such rule, or the arguments do not fit it.
    """
    if is_rule_path(name):
        for field, names in (("slots", slots), ("scalars", scalars)):
            problem = name_problem(names)
            if problem:
                raise InvalidRequest(f"groups.{field}: of rule {name!r}: {problem}")
        kept = tuple(Slot(slot, start=slot) for slot in slots)
        return RuleInfo(name, scalars=tuple(scalars), constants=tuple(slots), all_slots=kept, is_custom=True)
    if name not in RULES:
        raise InvalidRequest(
            f"groups.rule: unknown rule {name!r}; there are {sorted(RULES)}, and import paths such as my_module:MyRule"
        )
    if slots or scalars:
        field = "slots" if slots else "scalars"
        raise InvalidRequest(f"groups.{field}: only a CustomRule may name its {field}; {name!r} has built-in ones")
    return RULES[name]
