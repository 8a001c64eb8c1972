"""Update rules as a worker names them: SGD, Adam, ..., and Static for tensors that only share their initial values.

An optimizer object holds no state and does no arithmetic: the shards do, with the slots that the flags ask for. It says which
group to declare and, at each push, which scalars travel. Options have torch's names and defaults; the range of each is the
contract's (psd/contract/rules.py). Must not know tensors or connections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

from psd.contract.jobspec import GroupSpec
from psd.contract.rules import RULES

OptimizerT = TypeVar("OptimizerT", bound="Optimizer")

_PAIRS = {"beta1": ("betas", 0), "beta2": ("betas", 1)}
"""Scalars that users know as one of a pair."""


def option_of(scalar: str) -> str:
    """The option that a scalar is read from: itself, or the pair that it is in."""
    return _PAIRS[scalar][0] if scalar in _PAIRS else scalar


def number(where: str, value: object) -> float:
    """The value as a float; TypeError names `where`."""
    if isinstance(value, (bool, str, bytes)):
        raise TypeError(f"{where}: expected a number, got {value!r}")
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"{where}: expected a number, got {value!r}") from None


def _pair(where: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{where}: expected two numbers, got {value!r}")
    return tuple(value)


@dataclass(frozen=True)
class Optimizer:
    """What the optimizers have in common; use one of its subclasses.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    rule: ClassVar[str]
    always: ClassVar[tuple[str, ...]] = ()
    """Flags that the class stands for."""

    def __post_init__(self) -> None:
        info = RULES[self.rule]
        for name in sorted(info.flags & self.options() - set(info.scalars)):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        for name in (*info.scalars, *info.constants):
            option = option_of(name)
            value = getattr(self, option)
            if name in _PAIRS:
                value = _pair(option, value)[_PAIRS[name][1]]
            problem = info.problem(name, number(option, value))
            if problem:
                raise ValueError(f"{option}: {name + ' ' if option != name else ''}{problem}")

    def options(self) -> set[str]:
        """Names of the arguments."""
        return {field.name for field in fields(self)}

    def option_values(self) -> dict[str, Any]:
        """The arguments by name."""
        return {name: getattr(self, name) for name in self.options()}

    def with_options(self: OptimizerT, options: Mapping[str, Any]) -> OptimizerT:
        """The same with some arguments changed; TypeError or ValueError as for the class itself."""
        return replace(self, **options)

    def group(self) -> GroupSpec:
        """What is declared: the rule and what is fixed for the job."""
        return group_spec(GroupSpec(self.rule), self.always, vars(self))

    def scalars(self) -> dict[str, Any]:
        """What travels with each push, by option, in the order of the rule's list."""
        scalars: dict[str, Any] = {}
        for name in RULES[self.rule].scalars:
            option = option_of(name)
            value = getattr(self, option)
            scalars[option] = tuple(map(float, value)) if name in _PAIRS else float(value)
        return scalars


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, equal to torch.optim.SGD of the same arguments.

    Args:
        lr, momentum, weight_decay: numbers >= 0.
        dampening: number; the share of the gradient that does not enter the momentum.
        nesterov: look ahead; needs momentum > 0 and dampening 0.
        maximize: climb instead of descend.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    rule: ClassVar[str] = "sgd"

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ValueError(f"nesterov: needs momentum > 0 and dampening 0, got {self.momentum} and {self.dampening}")


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad, equal to torch.optim.Adagrad of the same arguments.

    Args:
        lr, lr_decay, weight_decay, eps: numbers >= 0. The rate is lr / (1 + (step - 1) * lr_decay).
        initial_accumulator_value: number >= 0; what the sum of squares begins with. Fixed for the job.
        maximize: climb instead of descend.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    rule: ClassVar[str] = "adagrad"

    lr: float = 0.01
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    maximize: bool = False


@dataclass(frozen=True)
class Adadelta(Optimizer):
    """Adadelta, equal to torch.optim.Adadelta of the same arguments.

    Args:
        lr, eps, weight_decay: numbers >= 0. rho: number from 0 to 1.
        maximize: climb instead of descend.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    rule: ClassVar[str] = "adadelta"

    lr: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0.0
    maximize: bool = False


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """RMSprop, equal to torch.optim.RMSprop of the same arguments.

    Args:
        lr, eps, weight_decay, momentum: numbers >= 0. alpha: number from 0 to 1.
        centered: divide by the root of the variance rather than of the second moment.
        maximize: climb instead of descend.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    rule: ClassVar[str] = "rmsprop"

    lr: float = 0.01
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    maximize: bool = False


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, equal to torch.optim.Adam of the same arguments.

    Args:
        lr, eps, weight_decay: numbers >= 0; the decay is added to the gradient. betas: two numbers >= 0 and < 1.
        amsgrad: divide by the largest second moment so far.
        maximize: climb instead of descend.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    rule: ClassVar[str] = "adam"

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False


@dataclass(frozen=True)
class AdamW(Optimizer):
    """AdamW, equal to torch.optim.AdamW of the same arguments: Adam, with the weight decay apart from the gradient.

    Args:
        lr, eps, weight_decay: numbers >= 0; parameters are multiplied by 1 - lr * weight_decay.
        betas: two numbers >= 0 and < 1.
        amsgrad: divide by the largest second moment so far.
        maximize: climb instead of descend.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    rule: ClassVar[str] = "adam"
    always: ClassVar[tuple[str, ...]] = ("decoupled_weight_decay",)

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    amsgrad: bool = False
    maximize: bool = False


@dataclass(frozen=True)
class Adamax(Optimizer):
    """Adamax, equal to torch.optim.Adamax of the same arguments.

    Args:
        lr, eps, weight_decay: numbers >= 0. betas: two numbers >= 0 and < 1.
        maximize: climb instead of descend.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    rule: ClassVar[str] = "adamax"

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    maximize: bool = False


@dataclass(frozen=True)
class NAdam(Optimizer):
    """NAdam, equal to torch.optim.NAdam of the same arguments, as long as betas and momentum_decay do not change.

    Args:
        lr, eps, weight_decay, momentum_decay: numbers >= 0. betas: two numbers >= 0 and < 1.
        decoupled_weight_decay: as in AdamW.
        maximize: climb instead of descend.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    rule: ClassVar[str] = "nadam"

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum_decay: float = 4e-3
    decoupled_weight_decay: bool = False
    maximize: bool = False


@dataclass(frozen=True)
class FTRL(Optimizer):
    """FTRL-proximal with per-coordinate learning rates (McMahan et al. 2013, alg. 1). Let parameters begin as zeros.

    Args:
        lr: number > 0, the paper's alpha. beta: number >= 0.
        l1, l2: numbers >= 0; the former makes parameters exactly 0.
        initial_accumulator_value: number >= 0; what the sum of squares begins with. Fixed for the job.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    rule: ClassVar[str] = "ftrl"

    lr: float
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    initial_accumulator_value: float = 0.0


@dataclass(frozen=True)
class LAMB(Optimizer):
    """LAMB (You et al. 2020, arXiv:1904.00962): Adam's direction, by whose norm and the tensor's each tensor is stepped.

    Synchronous only; implies exact aggregation.

    Args:
        lr, eps, weight_decay: numbers >= 0; the decay is a part of the direction. betas: two numbers >= 0 and < 1.
        maximize: climb instead of descend.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    rule: ClassVar[str] = "lamb"

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 1e-2
    maximize: bool = False


@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion (Chen et al. 2023, arXiv:2302.06675).

    Args:
        lr, weight_decay: numbers >= 0; the decay is apart from the gradient, as in AdamW. betas: two numbers >= 0 and < 1.
        maximize: climb instead of descend.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    rule: ClassVar[str] = "lion"

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    maximize: bool = False


@dataclass(frozen=True)
class Static(Optimizer):
    """No updates: the tensors get the job's initial values, and nothing is ever pushed to them."""

    rule: ClassVar[str] = "static"


def group_spec(declared: GroupSpec, always: tuple[str, ...], options: Mapping[str, Any]) -> GroupSpec:
    """What would be declared for a group of the same rule and staleness with these options, such as an entry of `param_groups`.

    Momentum is both a number and, if it is not 0, the flag that gives it a slot.
    """
    info = declared.info
    if info.is_custom:
        return declared
    flags = {flag for flag in info.flags if options.get(flag)} | set(always)
    return replace(declared, flags=tuple(sorted(flags)), constants=tuple(float(options[name]) for name in info.constants))


def scalar_values(group: GroupSpec, options: Mapping[str, object], index: int) -> list[float]:
    """The values of one group's scalars in the rule's order, from a mapping such as an entry of `param_groups`.

    Raises:
        InvalidRequest: not finite, out of range, or at odds with the group's flags.
        KeyError, TypeError: a scalar is missing or is no number; the message names it.
    """
    rule = group.info
    values = []
    for name in rule.scalars:
        option = name if rule.is_custom else option_of(name)
        if option not in options:
            raise KeyError(f"param_groups[{index}]: {option!r} is missing")
        where, value = f"param_groups[{index}][{option!r}]", options[option]
        if option != name:
            value = _pair(where, value)[_PAIRS[name][1]]
        values.append(number(where, value))
    rule.check_scalars(values, group.flags, index)
    return values
