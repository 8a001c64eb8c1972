"""Update rules as a worker names them: SGD, and Static for tensors that only share their initial values.

An optimizer object holds no state and does no arithmetic: the shards do, with the slots that the flags ask for. It says which
group to declare and, at each push, which scalars travel. Must not know tensors or connections.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from psd.contract.jobspec import GroupSpec
from psd.contract.rules import RULES


def _check_number(name: str, value: float, low: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if not (math.isfinite(value) and value >= low):
        expected = "finite" if low == -math.inf else f"finite and at least {low:g}"
        raise ValueError(f"{name}: must be {expected}, got {value}")


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, equal to torch.optim.SGD of the same arguments.

    Args:
        lr, momentum, weight_decay: numbers >= 0.
        dampening: number; the share of the gradient that does not enter the momentum.
        nesterov: look ahead; needs momentum > 0 and dampening 0.
        maximize: climb instead of descend.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        for name in ("lr", "momentum", "weight_decay"):
            _check_number(name, getattr(self, name), 0)
        _check_number("dampening", self.dampening, -math.inf)
        for name in ("nesterov", "maximize"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ValueError(f"nesterov: needs momentum > 0 and dampening 0, got {self.momentum} and {self.dampening}")

    def group(self) -> GroupSpec:
        """What is declared: the rule and what is fixed for the job."""
        flags = {"maximize": self.maximize, "momentum": self.momentum != 0, "nesterov": self.nesterov}
        return GroupSpec("sgd", tuple(name for name, is_set in flags.items() if is_set))

    def scalars(self) -> dict[str, float]:
        """What travels with each push, by name, in the order of the rule's list."""
        return {name: float(getattr(self, name)) for name in RULES["sgd"].scalars}


@dataclass(frozen=True)
class Static:
    """No updates: the tensors get the job's initial values, and nothing is ever pushed to them."""

    def group(self) -> GroupSpec:
        """What is declared."""
        return GroupSpec("static")

    def scalars(self) -> dict[str, float]:
        """Nothing travels."""
        return {}


def scalar_values(group: GroupSpec, scalars: Mapping[str, object], index: int) -> list[float]:
    """The values of one group's scalars in the rule's order, from a mapping such as an entry of `param_groups`.

    Raises:
        InvalidRequest: not finite, out of range, or at odds with the group's flags.
        KeyError, TypeError: a scalar is missing or is no number; the message names it.
    """
    rule = RULES[group.rule]
    values = []
    for name in rule.scalars:
        if name not in scalars:
            raise KeyError(f"param_groups[{index}]: {name!r} is missing")
        value = scalars[name]
        try:
            values.append(float(value))  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise TypeError(f"param_groups[{index}][{name!r}]: expected a number, got {value!r}") from None
    rule.check_scalars(values, group.flags, index)
    return values
