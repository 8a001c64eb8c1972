"""The base class of the rules in rules.py, their parts (ranges of numbers, slots), and the facts that follow from a class.

Must not know any rule. Imports only the standard library, because setup.py loads it before psd_core can be imported.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

OptimizerT = TypeVar("OptimizerT", bound="Optimizer")

FLOAT32_MAX = 3.4028234663852886e38
"""Largest float32: kernels that compute in float32 take a larger double for infinity."""

FLOAT32_TINY = 1.1754943508222875e-38
"""Smallest normal float32: a number that must be greater than 0 must be so in the kernels, too."""

_BELOW_1 = math.nextafter(1, 0)


class Range(NamedTuple):
    """The values that a number may have, both ends included."""

    low: float = -math.inf
    high: float = math.inf

    def problem(self, value: float) -> str | None:
        """The problem with a value, in words; None if there is none."""
        if not abs(value) <= FLOAT32_MAX:  # also refuses NaN
            return f"must be finite, also as a float32, got {value}"
        if self.low <= value <= self.high:
            return None
        if self.low == FLOAT32_TINY:
            return f"must be > 0, also as a float32, got {value}"
        above = "" if self.high == math.inf else " and < 1" if self.high == _BELOW_1 else f" and <= {self.high:g}"
        return f"must be >= {self.low:g}{above}, got {value}"


Real = float
Number = float
Positive = float
Share = float
Betas = tuple[float, float]

_RANGES = {
    "Real": Range(),
    "Number": Range(0),
    "Positive": Range(FLOAT32_TINY),
    "Share": Range(0, 1),
    "Betas": Range(0, _BELOW_1),
}
"""Ranges of arguments, by their annotation."""

_PAIRS = {"beta1": ("betas", 0), "beta2": ("betas", 1)}
"""Scalars that users give in a pair: the pair's name, and the place in it."""


def option_of(scalar: str) -> str:
    """The option that contains a scalar: its own, or its pair's."""
    return _PAIRS[scalar][0] if scalar in _PAIRS else scalar


def number(where: str, value: object) -> float:
    """The value as a float; TypeError names `where`."""
    if isinstance(value, (bool, str, bytes)):
        raise TypeError(f"{where}: expected a number, got {value!r}")
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"{where}: expected a number, got {value!r}") from None


def scalar_of(scalar: str, where: str, value: Any) -> float:
    """A scalar from the value of its option; TypeError names `where`."""
    if scalar in _PAIRS:
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise TypeError(f"{where}: expected two numbers, got {value!r}")
        value = value[_PAIRS[scalar][1]]
    return number(where, value)


class Slot(NamedTuple):
    """An array that a rule keeps beside the parameter.

    Attributes:
        flag: the flag without which the slot does not exist; empty: it always does. A number of the same name implies the flag
            if it is not 0, and must be 0 without it.
        start: the argument with the slot's initial value, fixed for the job; empty: zeros.
    """

    name: str
    flag: str = ""
    start: str = ""


@dataclass(frozen=True)
class Optimizer:
    """Base of the rules, which hold no state and compute nothing: the shards do. Use a subclass.

    Arguments that are bool are flags. Numbers, except a slot's `start`, are sent with each push as scalars, in this order.

    Attributes:
        rule: the rule's name in jobs, and in the C header rule_<name>.h.
        all_slots: the slots with every flag; with torch's names, if torch has the rule, except SGD's.
        faces_flags: flags that are no arguments. "keras": epsilon or the learning rate is placed as in keras.optimizers.
        always: flags that are always on in this class.
        needs: for a flag, another flag without which it is refused.
        is_in_torch: True if torch.optim has the class, with these arguments.
        is_layerwise: True if an update needs norms of whole tensors; the kernel then computes only its direction.
        rests_without: numbers: while all are 0, a gradient of zeros changes nothing. Empty: it changes at least the slots.
        settles: True if a second gradient of zeros, with the same numbers, changes nothing more; and none changes zeros.
        goes_in_turns: True if some updates do other than those before and after, by their number: rows cannot catch up.
        momentum_slot: the slot with a mean, or a fading sum, of the gradients so far; empty: none has it as it is.
        lr_scales_steps: False if each update computes the parameters from lr, so that a smaller lr is no smaller step.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    rule: ClassVar[str]
    all_slots: ClassVar[tuple[Slot, ...]] = ()
    faces_flags: ClassVar[tuple[str, ...]] = ()
    always: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[Mapping[str, str]] = {}
    is_in_torch: ClassVar[bool] = False
    is_layerwise: ClassVar[bool] = False
    rests_without: ClassVar[tuple[str, ...]] = ()
    settles: ClassVar[bool] = False
    goes_in_turns: ClassVar[bool] = False
    momentum_slot: ClassVar[str] = ""
    lr_scales_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        facts = facts_of(type(self))
        values = self.option_values()
        for name in sorted(values.keys() & facts.flags - facts.ranges.keys()):
            if not isinstance(values[name], bool):
                raise TypeError(f"{name}: expected True or False, got {values[name]!r}")
        numbers = {}
        for name, allowed in facts.ranges.items():
            option = option_of(name)
            numbers[name] = scalar_of(name, option, values[option])
            problem = allowed.problem(numbers[name])
            if problem:
                raise ValueError(f"{option}: {name + ' ' if option != name else ''}{problem}")
        for name, problem in self.conflicts([name for name in facts.flags if values.get(name)], numbers):
            raise ValueError(f"{name}: {problem}")

    @classmethod
    def ranges_together(cls, flags: Collection[str]) -> Mapping[str, Range] | None:
        """Narrower ranges of some numbers, within which `conflicts` finds none; None: none are known."""
        del flags
        return None if any("conflicts" in vars(row) for row in cls.__mro__ if row is not Optimizer) else {}

    @classmethod
    def conflicts(cls, flags: Collection[str], numbers: Mapping[str, float]) -> list[tuple[str, str]]:
        """Flags that the numbers do not allow, and why."""
        del flags, numbers
        return []

    @classmethod
    def momentum_scale(cls, numbers: Mapping[str, float]) -> float:
        """The factor by which `momentum_slot` is a mean of gradients, given the rule's numbers."""
        del numbers
        return 1.0

    def option_values(self) -> dict[str, Any]:
        """The arguments by name."""
        return {argument.name: getattr(self, argument.name) for argument in fields(self)}

    def with_options(self: OptimizerT, options: Mapping[str, Any]) -> OptimizerT:
        """The same rule with some arguments changed; TypeError or ValueError as from the class itself."""
        return replace(self, **options)

    def scalars(self) -> dict[str, Any]:
        """Numbers that are sent with each push, by option."""
        values = self.option_values()
        options = dict.fromkeys(option_of(name) for name in facts_of(type(self)).scalars)
        return {name: tuple(map(float, values[name])) if name == "betas" else float(values[name]) for name in options}


@dataclass(frozen=True)
class RuleFacts:
    """Facts that follow from a rule's class.

    Attributes:
        name: the rule's name, as in GroupSpec.rule. row: the class.
        number: the kernels' id of the rule.
        scalars: names of the numbers that are sent with each push, in order.
        flags: names of the switches, which are fixed for the job.
        constants: names of the numbers that are fixed for the job, in order: initial values of slots.
        all_slots: the slots with every flag, in order.
        ranges: ranges of scalars and constants, by name.
    """

    name: str
    row: type[Optimizer] = Optimizer
    number: int = -1
    scalars: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    all_slots: tuple[Slot, ...] = ()
    ranges: Mapping[str, Range] = field(default_factory=dict)

    def slots(self, flags: Collection[str]) -> tuple[str, ...]:
        """Names of the slots with these flags."""
        return tuple(slot.name for slot in self.all_slots if not slot.flag or slot.flag in flags)


def facts_of(row: type[Optimizer]) -> RuleFacts:
    """Facts of a class, without the number."""
    arguments = {argument.name: str(argument.type) for argument in fields(row)}
    flags = [option for option, kind in arguments.items() if kind == "bool"]
    ranges: dict[str, Range] = {}
    for option, kind in arguments.items():
        if kind != "bool":
            names = [scalar for scalar in _PAIRS if option_of(scalar) == option] or [option]
            ranges |= dict.fromkeys(names, _RANGES[kind])
    flags += [slot.flag for slot in row.all_slots if slot.flag and slot.flag not in flags] + list(row.faces_flags)
    constants = tuple(slot.start for slot in row.all_slots if slot.start)
    scalars = tuple(name for name in ranges if name not in constants)
    return RuleFacts(row.rule, row, -1, scalars, tuple(flags), constants, row.all_slots, ranges)
