"""The table of the update rules: a class each, from which ids, scalars, flags, slots, ranges and defaults follow everywhere.

A class is what a worker names, psd_client.Adam(lr=1e-3) say, and one row of the table: `RULES` is what shards and clients look
up, `c_headers` what the kernels are built with. To add a rule write csrc/rule_<name>.h, and a class here, named in `__all__`.

Must not know how a rule computes; nor tensors, groups or messages. Imports the standard library alone, because setup.py loads
this file before psd_core can be imported.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

__all__ = ["SGD", "Adagrad", "Adadelta", "RMSprop", "Adam", "AdamW", "Adamax", "NAdam", "FTRL", "LAMB", "Lion"]

OptimizerT = TypeVar("OptimizerT", bound="Optimizer")

FLOAT32_MAX = 3.4028234663852886e38
"""A double beyond it is infinite where the kernels compute in float32."""

FLOAT32_TINY = 1.1754943508222875e-38
"""The smallest normal float32: what must be greater than 0 must be so in the kernels, too."""

_BELOW_1 = math.nextafter(1, 0)


class Range(NamedTuple):
    """The values that a number may have, both ends included."""

    low: float = -math.inf
    high: float = math.inf

    def problem(self, value: float) -> str | None:
        """What is wrong with a value, or None."""
        if not abs(value) <= FLOAT32_MAX:  # also refuses NaN
            return f"must be finite, also as a float32, got {value}"
        if self.low <= value <= self.high:
            return None
        if self.low == FLOAT32_TINY:
            return f"must be > 0, also as a float32, got {value}"
        above = "" if self.high == math.inf else " and < 1" if self.high == _BELOW_1 else f" and <= {self.high:g}"
        return f"must be >= {self.low:g}{above}, got {value}"


Real = Annotated[float, Range()]
Number = Annotated[float, Range(0)]
Positive = Annotated[float, Range(FLOAT32_TINY)]
Share = Annotated[float, Range(0, 1)]
Decay = Annotated[float, Range(0, _BELOW_1)]
Betas = tuple[Decay, Decay]

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
        flag: the slot is there only with this flag; empty: always. If no argument is called so, the scalar of this name
            implies the flag, and must be 0 without it.
        start: the argument that says what the slot begins with, fixed for the job; empty: zeros.
    """

    name: str
    flag: str = ""
    start: str = ""


@dataclass(frozen=True)
class Optimizer:
    """What the rules have in common; use one of the subclasses. They hold no state and compute nothing: the shards do.

    Arguments that are bool are flags; numbers travel with each push as scalars, in this order, but for a slot's `start`.

    Attributes:
        rule: its name in jobs, and in the C header rule_<name>.h.
        all_slots: with every flag; with torch's names, if torch has the rule, but for SGD's.
        faces_flags: flags that are no arguments. "keras": epsilon or the learning rate is where keras.optimizers has it.
        always: flags that the class stands for.
        needs: flag -> the flag that it does not go without.
        is_in_torch: torch.optim has the class, with these arguments.
        is_layerwise: an update needs norms of whole tensors; the kernel gives its direction alone.
        lr_scales_steps: if not, the parameters are computed from lr anew at each update, and a smaller lr is no smaller step.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    rule: ClassVar[str] = ""
    all_slots: ClassVar[tuple[Slot, ...]] = ()
    faces_flags: ClassVar[tuple[str, ...]] = ()
    always: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[Mapping[str, str]] = {}
    is_in_torch: ClassVar[bool] = True
    is_layerwise: ClassVar[bool] = False
    lr_scales_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        facts = RULES[self.rule]
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
    def conflicts(cls, flags: Collection[str], numbers: Mapping[str, float]) -> list[tuple[str, str]]:
        """Flags that do not go with the numbers, and why."""
        del flags, numbers
        return []

    def option_values(self) -> dict[str, Any]:
        """The arguments by name."""
        return {argument.name: getattr(self, argument.name) for argument in fields(self)}

    def with_options(self: OptimizerT, options: Mapping[str, Any]) -> OptimizerT:
        """The same with some arguments changed; TypeError or ValueError as for the class itself."""
        return replace(self, **options)

    def scalars(self) -> dict[str, Any]:
        """What travels with each push, by option."""
        values = self.option_values()
        options = dict.fromkeys(option_of(name) for name in RULES[self.rule].scalars)
        return {name: tuple(map(float, values[name])) if name == "betas" else float(values[name]) for name in options}


_MOMENTS = (Slot("exp_avg"), Slot("exp_avg_sq"))


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, equal to torch.optim.SGD of the same arguments.

    Args:
        lr, momentum, weight_decay: numbers >= 0.
        dampening: number; the share of the gradient that does not enter the momentum.
        nesterov: look ahead; needs momentum > 0 and dampening 0.
        maximize: climb instead of descend.
    """

    rule: ClassVar[str] = "sgd"
    all_slots: ClassVar[tuple[Slot, ...]] = (Slot("momentum", "momentum"),)
    faces_flags: ClassVar[tuple[str, ...]] = ("keras",)
    needs: ClassVar[Mapping[str, str]] = {"nesterov": "momentum"}

    lr: Number
    momentum: Number = 0.0
    dampening: Real = 0.0
    weight_decay: Number = 0.0
    nesterov: bool = False
    maximize: bool = False

    @classmethod
    def conflicts(cls, flags: Collection[str], numbers: Mapping[str, float]) -> list[tuple[str, str]]:
        """See Optimizer."""
        momentum, dampening = numbers["momentum"], numbers["dampening"]
        if "nesterov" not in flags or (momentum > 0 and dampening == 0):
            return []
        return [("nesterov", f"needs momentum > 0 and dampening 0, got {momentum} and {dampening}")]


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad, equal to torch.optim.Adagrad of the same arguments.

    Args:
        lr, lr_decay, weight_decay, eps: numbers >= 0. The rate is lr / (1 + (step - 1) * lr_decay).
        initial_accumulator_value: number >= 0; what the sum of squares begins with. Fixed for the job.
        maximize: climb instead of descend.
    """

    rule: ClassVar[str] = "adagrad"
    all_slots: ClassVar[tuple[Slot, ...]] = (Slot("sum", start="initial_accumulator_value"),)
    faces_flags: ClassVar[tuple[str, ...]] = ("keras",)

    lr: Number = 0.01
    lr_decay: Number = 0.0
    weight_decay: Number = 0.0
    initial_accumulator_value: Number = 0.0
    eps: Number = 1e-10
    maximize: bool = False


@dataclass(frozen=True)
class Adadelta(Optimizer):
    """Adadelta, equal to torch.optim.Adadelta of the same arguments.

    Args:
        lr, eps, weight_decay: numbers >= 0. rho: number from 0 to 1.
        maximize: climb instead of descend.
    """

    rule: ClassVar[str] = "adadelta"
    all_slots: ClassVar[tuple[Slot, ...]] = (Slot("square_avg"), Slot("acc_delta"))

    lr: Number = 1.0
    rho: Share = 0.9
    eps: Number = 1e-6
    weight_decay: Number = 0.0
    maximize: bool = False


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """RMSprop, equal to torch.optim.RMSprop of the same arguments.

    Args:
        lr, eps, weight_decay, momentum: numbers >= 0. alpha: number from 0 to 1.
        centered: divide by the root of the variance rather than of the second moment.
        maximize: climb instead of descend.
    """

    rule: ClassVar[str] = "rmsprop"
    all_slots: ClassVar[tuple[Slot, ...]] = (
        Slot("square_avg"),
        Slot("grad_avg", "centered"),
        Slot("momentum_buffer", "momentum"),
    )
    faces_flags: ClassVar[tuple[str, ...]] = ("keras",)

    lr: Number = 0.01
    alpha: Share = 0.99
    eps: Number = 1e-8
    weight_decay: Number = 0.0
    momentum: Number = 0.0
    centered: bool = False
    maximize: bool = False


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, equal to torch.optim.Adam of the same arguments.

    Args:
        lr, eps, weight_decay: numbers >= 0; the decay is added to the gradient. betas: two numbers >= 0 and < 1.
        amsgrad: divide by the largest second moment so far.
        maximize: climb instead of descend.
    """

    rule: ClassVar[str] = "adam"
    all_slots: ClassVar[tuple[Slot, ...]] = (*_MOMENTS, Slot("max_exp_avg_sq", "amsgrad"))
    faces_flags: ClassVar[tuple[str, ...]] = ("decoupled_weight_decay", "keras")

    lr: Number = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: Number = 1e-8
    weight_decay: Number = 0.0
    amsgrad: bool = False
    maximize: bool = False


@dataclass(frozen=True)
class AdamW(Adam):
    """AdamW, equal to torch.optim.AdamW of the same arguments: Adam, with the weight decay apart from the gradient.

    Args:
        lr, eps, weight_decay: numbers >= 0; parameters are multiplied by 1 - lr * weight_decay.
        betas, amsgrad, maximize: as in Adam.
    """

    always: ClassVar[tuple[str, ...]] = ("decoupled_weight_decay",)

    weight_decay: Number = 1e-2


@dataclass(frozen=True)
class Adamax(Optimizer):
    """Adamax, equal to torch.optim.Adamax of the same arguments.

    Args:
        lr, eps, weight_decay: numbers >= 0. betas: two numbers >= 0 and < 1.
        maximize: climb instead of descend.
    """

    rule: ClassVar[str] = "adamax"
    all_slots: ClassVar[tuple[Slot, ...]] = (Slot("exp_avg"), Slot("exp_inf"))
    faces_flags: ClassVar[tuple[str, ...]] = ("keras",)

    lr: Number = 2e-3
    betas: Betas = (0.9, 0.999)
    eps: Number = 1e-8
    weight_decay: Number = 0.0
    maximize: bool = False


@dataclass(frozen=True)
class NAdam(Optimizer):
    """NAdam, equal to torch.optim.NAdam of the same arguments, as long as betas and momentum_decay do not change.

    Args:
        lr, eps, weight_decay, momentum_decay: numbers >= 0. betas: two numbers >= 0 and < 1.
        decoupled_weight_decay: as in AdamW.
        maximize: climb instead of descend.
    """

    rule: ClassVar[str] = "nadam"
    all_slots: ClassVar[tuple[Slot, ...]] = _MOMENTS

    lr: Number = 2e-3
    betas: Betas = (0.9, 0.999)
    eps: Number = 1e-8
    weight_decay: Number = 0.0
    momentum_decay: Number = 4e-3
    decoupled_weight_decay: bool = False
    maximize: bool = False


@dataclass(frozen=True)
class FTRL(Optimizer):
    """FTRL-proximal with per-coordinate learning rates (McMahan et al. 2013, alg. 1). Let parameters begin as zeros.

    Args:
        lr: number > 0, the paper's alpha. beta: number >= 0.
        l1, l2: numbers >= 0; the former makes parameters exactly 0.
        initial_accumulator_value: number >= 0; what the sum of squares begins with. Fixed for the job.
    """

    rule: ClassVar[str] = "ftrl"
    all_slots: ClassVar[tuple[Slot, ...]] = (Slot("accumulator", start="initial_accumulator_value"), Slot("linear"))
    is_in_torch: ClassVar[bool] = False
    lr_scales_steps: ClassVar[bool] = False

    lr: Positive
    beta: Number = 1.0
    l1: Number = 0.0
    l2: Number = 0.0
    initial_accumulator_value: Number = 0.0


@dataclass(frozen=True)
class LAMB(Optimizer):
    """LAMB (You et al. 2020, arXiv:1904.00962): Adam's direction, by whose norm and the tensor's each tensor is stepped.

    Synchronous only; implies exact aggregation.

    Args:
        lr, eps, weight_decay: numbers >= 0; the decay is a part of the direction. betas: two numbers >= 0 and < 1.
        maximize: climb instead of descend.
    """

    rule: ClassVar[str] = "lamb"
    all_slots: ClassVar[tuple[Slot, ...]] = _MOMENTS
    is_in_torch: ClassVar[bool] = False
    is_layerwise: ClassVar[bool] = True

    lr: Number = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: Number = 1e-6
    weight_decay: Number = 1e-2
    maximize: bool = False


@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion (Chen et al. 2023, arXiv:2302.06675).

    Args:
        lr, weight_decay: numbers >= 0; the decay is apart from the gradient, as in AdamW. betas: two numbers >= 0 and < 1.
        maximize: climb instead of descend.
    """

    rule: ClassVar[str] = "lion"
    all_slots: ClassVar[tuple[Slot, ...]] = (Slot("exp_avg"),)
    is_in_torch: ClassVar[bool] = False

    lr: Number = 1e-4
    betas: Betas = (0.9, 0.99)
    weight_decay: Number = 0.0
    maximize: bool = False


@dataclass(frozen=True)
class RuleFacts:
    """What follows from a rule's class.

    Attributes:
        name: as it stands in GroupSpec.rule. row: the class. number: the kernels' id.
        scalars: names of the numbers that travel with each push, in order.
        flags: names of the switches that are fixed for the job.
        constants: names of the numbers that are fixed for the job, in order: initial values of slots.
        all_slots: with every flag, in order. ranges: of scalars and constants, by name.
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
        """Names of the slots that there are under these flags."""
        return tuple(slot.name for slot in self.all_slots if not slot.flag or slot.flag in flags)


def _facts(number: int, row: type[Optimizer]) -> RuleFacts:
    hints = get_type_hints(row, include_extras=True)
    arguments = {argument.name: hints[argument.name] for argument in fields(row)}
    ranges: dict[str, Range] = {}
    for option, kind in arguments.items():
        names = [scalar for scalar in _PAIRS if option_of(scalar) == option] or [option]
        parts = get_args(kind) if get_origin(kind) is tuple else [kind]
        ranges |= {name: part.__metadata__[0] for name, part in zip(names, parts, strict=True) if kind is not bool}
    flags = [option for option, kind in arguments.items() if kind is bool]
    flags += [slot.flag for slot in row.all_slots if slot.flag and slot.flag not in flags] + list(row.faces_flags)
    constants = tuple(slot.start for slot in row.all_slots if slot.start)
    scalars = tuple(name for name in ranges if name not in constants)
    return RuleFacts(row.rule, row, number, scalars, tuple(flags), constants, row.all_slots, ranges)


RULES = {
    row.rule: _facts(number, row)
    for number, row in enumerate(sorted(Optimizer.__subclasses__(), key=lambda row: row.rule))  # not AdamW, a form of Adam
}
"""By name, in the order of the kernels' ids."""


CLASSES: tuple[type[Optimizer], ...] = tuple(globals()[name] for name in __all__)
"""What workers may name, in the order of the documentation."""


def c_headers() -> dict[str, str]:
    """The C headers that follow from the table, by file name."""
    rules = RULES.values()
    flags_max = 8 * (max(len(rule.flags) for rule in rules) // 8 + 1)  # a multiple of 8, so that the doubles follow at once
    slots = [f"SLOT_{r.name}_{slot.name}".upper() + f" = {at}" for r in rules for at, slot in enumerate(r.all_slots)]
    structs = ""
    for name, rule in RULES.items():
        flags = ", ".join([*rule.flags, f"unused[{flags_max - len(rule.flags)}]"])
        structs += f"typedef struct {{ struct {{ uint8_t {flags}; }} is; double {', '.join(rule.scalars)}; }} psd_{name};\n"
    plain = f"""/* Made from psd_core/rules.py: the rules' ids, and by which names C knows their flags, scalars and slots. */
#include <stdint.h>
enum {{ {", ".join(f"PSD_{name.upper()}" for name in RULES)}, PSD_RULES }};
enum {{ {", ".join(slots)} }};
#define PSD_FLAGS_MAX {flags_max}
#define PSD_SCALARS_MAX {max(len(rule.scalars) for rule in rules)}
#define PSD_SLOTS_MAX {max(len(rule.all_slots) for rule in rules)}
{structs}typedef union {{
    struct {{ uint8_t flags[PSD_FLAGS_MAX]; double scalars[PSD_SCALARS_MAX]; }};
    {" ".join(f"psd_{name} {name};" for name in RULES)}
}} psd_hyper;
"""
    table = ""
    for name, rule in RULES.items():
        upper, functions = name.upper(), f"FN({name}_prepare), FN(psd_{name}_tile)"
        table += f"    [PSD_{upper}] = {{{len(rule.all_slots)}, {upper}_STEPS_ALIKE_FROM, {functions}}},\n"
    templates = f"""/* Template over `real`, made from psd_core/rules.py: all rules. */
{"".join(f'#include "rule_{name}.h"{chr(10)}' for name in RULES)}typedef union {{
    {" ".join(f"FN({name}) {name};" for name in RULES)}
}} FN(constants);
static const FN(rule) FN(rules)[] = {{
{table}}};
"""
    return {"rules.h": plain, "rule_templates.h": templates}


def checksum() -> int:
    """Tells tables apart: kernels that were built with another one would take a rule's numbers for others."""
    return zlib.crc32("".join(c_headers().values()).encode())
