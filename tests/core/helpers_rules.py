"""Every rule with every combination of its flags, as step_block takes it: on blocks, and on whole tensors."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import psd_core

SCALARS = {
    "adadelta": {"lr": 0.7, "rho": 0.9, "eps": 1e-6},
    "adagrad": {"lr": 0.05, "lr_decay": 0.01, "eps": 1e-10},
    "adam": {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8},
    "adamax": {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8},
    "delayed_nesterov": {"lr": 0.05, "momentum": 0.9, "every": 3.0},
    "ftrl": {"lr": 0.1, "beta": 1.0},
    "lamb": {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6},
    "lion": {"lr": 0.01, "beta1": 0.9, "beta2": 0.99},
    "nadam": {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "momentum_decay": 0.004},
    "rmsprop": {"lr": 0.01, "alpha": 0.99, "eps": 1e-8},
    "sgd": {"lr": 0.05},
}
"""Numbers that are not 0 in every case; of other rules everything is 0.1."""

OPTIONAL = {
    "delayed_nesterov": {"activation": 0.2},
    "adagrad": {"weight_decay": 0.01},
    "ftrl": {"l1": 0.05, "l2": 0.1},
    "rmsprop": {"weight_decay": 0.01, "momentum": 0.9},
    "sgd": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
}
"""Numbers that are 0 in some cases; of other rules the weight decay."""


def optional_of(rule: str) -> dict[str, float]:
    return {name: x for name, x in OPTIONAL.get(rule, {"weight_decay": 0.01}).items() if name in psd_core.RULES[rule].scalars}


@dataclass(frozen=True)
class Case:
    """One rule with one choice of options."""

    rule: str
    scalars: tuple[float, ...]
    flags: tuple[str, ...]

    def __str__(self) -> str:
        on = [name for name in optional_of(self.rule) if self.named[name]]
        return "-".join([self.rule, *on, *(flag for flag in self.flags if flag not in on)])

    @property
    def named(self) -> dict[str, float]:
        return dict(zip(psd_core.RULES[self.rule].scalars, self.scalars, strict=True))

    @property
    def slots(self) -> tuple[str, ...]:
        return psd_core.RULES[self.rule].slots(self.flags)

    @property
    def options(self) -> dict[str, Any]:
        """Options in torch.optim's form: numbers, and flags but for momentum, which its number implies."""
        return {**self.named, **{flag: flag in self.flags for flag in psd_core.RULES[self.rule].flags if flag != "momentum"}}

    def apply(self, param: Any, out: Any, grad: Any, slots: Sequence[Any], step: int) -> None:
        """Step a whole array, which is at the update `step`, into `out`; the slots in place."""
        psd_core.step_block(
            self.rule,
            param,
            out,
            slots,
            slots,
            None,
            grad,
            weight=1.0,
            scale=1.0,
            segment_ends=np.array([len(param)], np.uint32),
            touched=np.ones(1, np.uint8),
            steps_in=np.array([step - 1], np.uint64),
            steps_out=np.zeros(1, np.uint64),
            scalars=self.scalars,
            flags=self.flags,
        )

    def update(self, param: Any, grad: Any, slots: Sequence[Any], step: int) -> None:
        """Step a whole tensor in place; where its norm counts, by the direction that the kernel gives."""
        if not psd_core.RULES[self.rule].row.is_layerwise:
            self.apply(param, param, grad, slots, step)
            return
        direction = np.empty_like(param)
        self.apply(param, direction, grad, slots, step)
        ratio = psd_core.trust_ratio(*map(psd_core.square_sum, (param, direction)))
        psd_core.accumulate(param, direction, -self.named["lr"] * ratio)

    def new_slots(self, param: Any, value: float = 0.0) -> list[Any]:
        return [np.full_like(param, value) for _ in self.slots]


def over(name: str, values: Sequence[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """One test for all values of an argument: each as a test of its own would take pytest longer than what it shows.

    What fails is named.
    """

    def of(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def all_of_them(**others: Any) -> None:
            for value in values:
                try:
                    test(**others, **{name: value})
                except Exception as error:
                    raise AssertionError(f"{name}: {value}") from error

        signature = inspect.signature(test)
        others = [parameter for parameter in signature.parameters.values() if parameter.name != name]
        all_of_them.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]  # for pytest
        return all_of_them

    return of


def update(rule: str, param: Any, grad: Any, *slots: Any, step: int = 1, **options: Any) -> None:
    """Step a whole tensor in place by a rule with these numbers and flags; numbers that are not named are 0."""
    facts = psd_core.RULES[rule]
    flags = tuple(flag for flag in facts.flags if options.get(flag))
    case = Case(rule, tuple(options.get(name, 0.0) for name in facts.scalars), flags)
    case.update(param, grad, slots[: len(case.slots)], step)


def cases(*rules: str) -> list[Case]:
    """All combinations of options of these rules, in torch's form; of all elementwise ones by default."""
    found = []
    for rule in rules or (name for name, facts in psd_core.RULES.items() if not facts.row.is_layerwise):
        info = psd_core.RULES[rule]
        optional = optional_of(rule)
        free = [flag for flag in info.flags if flag not in info.scalars and flag != "keras"]
        for chosen in itertools.product([False, True], repeat=len(optional) + len(free)):
            scalars = dict.fromkeys(info.scalars, 0.0) | SCALARS.get(rule, dict.fromkeys(info.scalars, 0.1))
            scalars |= {name: value for (name, value), on in zip(optional.items(), chosen, strict=False) if on}
            flags = [flag for flag, on in zip(free, chosen[len(optional) :], strict=True) if on]
            flags += [flag for flag in info.flags if flag in info.scalars and scalars[flag]]
            if "nesterov" in flags and (not scalars["momentum"] or scalars["dampening"]):
                continue
            found.append(Case(rule, tuple(scalars[name] for name in info.scalars), tuple(sorted(flags))))
    return found


def keras_cases() -> list[Case]:
    """The same as `cases`, in Keras's form, of the rules for which it is another."""
    rules = [name for name, rule in psd_core.RULES.items() if "keras" in rule.flags]
    return [Case(case.rule, case.scalars, tuple(sorted({*case.flags, "keras"}))) for case in cases(*rules)]


def make_block(case, lengths, touched, steps, *, acc=True, grad=True, dtype=np.float32, seed=0):
    """Arguments of step_block for segments of these lengths; outputs hold NaN until they are written."""
    n, k, s = sum(lengths), len(lengths), len(case.slots)
    values = np.random.default_rng(seed).standard_normal((3 + s, n)).astype(dtype)
    return {
        "rule": case.rule,
        "param_in": values[0],
        "param_out": np.full(n, np.nan, dtype),
        "slots_in": tuple(np.abs(slot) for slot in values[3:]),
        "slots_out": tuple(np.full(n, np.nan, dtype) for _ in range(s)),
        "acc": values[1] if acc else None,
        "grad": values[2] if grad else None,
        "weight": 1.0,
        "scale": 1.0,
        "segment_ends": np.cumsum(lengths, dtype=np.uint32).reshape(k),
        "touched": np.array(touched, np.uint8),
        "steps_in": np.array(steps, np.uint64),
        "steps_out": np.full(k, 99, np.uint64),
        "scalars": case.scalars,
        "flags": case.flags,
    }
