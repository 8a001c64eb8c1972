"""Groups for declarations and scalars for pushes, made from the worker's rule, such as psd_client.Adam(lr=1e-3).

The rules are those of psd_core/rules.py, and CustomRule. Must not know tensors or connections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from psd.contract.jobspec import GroupSpec
from psd_client.custom_rule import CustomRule
from psd_core.optimizer import Optimizer, number, option_of, scalar_of


def spec_of(optimizer: Optimizer) -> GroupSpec:
    """The declaration of a rule's group: the rule's name, flags and constants."""
    if isinstance(optimizer, CustomRule):
        return optimizer.spec
    return group_spec(GroupSpec(optimizer.rule), optimizer.always, optimizer.option_values())


def group_spec(declared: GroupSpec, always: tuple[str, ...], options: Mapping[str, Any]) -> GroupSpec:
    """The declaration of a group like `declared`, but with these options, such as those in an entry of `param_groups`.

    Momentum is a number and, if it is not 0, also a flag: the flag gives it a slot.
    """
    info = declared.info
    if info.is_custom:
        return declared
    flags = {flag for flag in info.flags if options.get(flag)} | set(always)
    return replace(declared, flags=tuple(sorted(flags)), constants=tuple(float(options[name]) for name in info.constants))


def scalar_values(group: GroupSpec, options: Mapping[str, object], index: int) -> list[float]:
    """The values of one group's scalars in the rule's order, from a mapping such as an entry of `param_groups`.

    Raises:
        InvalidRequest: a scalar is not finite, out of range, or contradicts the group's flags.
        KeyError, TypeError: a scalar is missing or is not a number; the message names it.
    """
    rule = group.info
    values = []
    for name in rule.scalars:
        option = name if rule.is_custom else option_of(name)
        if option not in options:
            raise KeyError(f"param_groups[{index}]: {option!r} is missing")
        where, value = f"param_groups[{index}][{option!r}]", options[option]
        values.append(number(where, value) if rule.is_custom else scalar_of(name, where, value))
    rule.check_scalars(values, group.flags, f"param_groups[{index}]")
    return values
