"""The rules that correspond to Keras's optimizers, and their flags and numbers, by Keras's names.

Decides which classes and options psd has, and refuses the others by name. If Keras computes differently from torch, the rule
has the flag "keras" (psd_core/csrc/rule_*.h say what it changes), and a Keras user always gets it. Imports no framework: it
looks at names and at what get_config() returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from psd.contract.errors import InvalidRequest
from psd.contract.jobspec import GroupSpec
from psd.contract.rules import RULES
from psd_client.optimizers import group_spec
from psd_core.optimizer import option_of


@dataclass(frozen=True)
class _Kind:
    """A class of keras.optimizers.

    Attributes:
        rule: psd's rule. numbers: psd's name of each of Keras's options. scales: factors for psd's options, if not 1.
        fixed: values of psd's options that Keras does not have. only: values that options of Keras must have.
        decays: True if the shards can apply Keras's weight decay, which does not pass through the gradient.
    """

    rule: str
    numbers: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    fixed: Mapping[str, float] = field(default_factory=dict)
    only: Mapping[str, float] = field(default_factory=dict)
    decays: bool = False


_MOMENTS = {"beta_1": "beta1", "beta_2": "beta2"}
_ADAM = {**_MOMENTS, "epsilon": "eps"}

_KINDS = {
    "SGD": _Kind("sgd", {"momentum": "momentum"}, fixed={"dampening": 0}),
    "Adagrad": _Kind(
        "adagrad",
        {"epsilon": "eps", "initial_accumulator_value": "initial_accumulator_value"},
        fixed={"lr_decay": 0},
    ),
    "Adadelta": _Kind("adadelta", {"rho": "rho", "epsilon": "eps"}),
    "RMSprop": _Kind("rmsprop", {"rho": "alpha", "epsilon": "eps", "momentum": "momentum"}),
    "Adam": _Kind("adam", _ADAM, decays=True),
    "AdamW": _Kind("adam", _ADAM, decays=True),
    "Adamax": _Kind("adamax", _ADAM),
    "Nadam": _Kind("nadam", _ADAM, fixed={"momentum_decay": 1}, decays=True),
    "Ftrl": _Kind(
        "ftrl",
        {
            "initial_accumulator_value": "initial_accumulator_value",
            "l1_regularization_strength": "l1",
            "l2_regularization_strength": "l2",
            "beta": "beta",
        },
        scales={"l2": 2},
        only={"learning_rate_power": -0.5, "l2_shrinkage_regularization_strength": 0},
    ),
    "Lamb": _Kind("lamb", _ADAM),
    "Lion": _Kind("lion", _MOMENTS, decays=True),
}

_REFUSED = {
    "clipnorm": "it clips each variable by itself; use global_clipnorm",
    "clipvalue": "it clips each element; use global_clipnorm",
    "use_ema": "the average would be each worker's own; keep one in a callback",
    "gradient_accumulation_steps": "use larger batches, or more workers",
}


@dataclass(frozen=True)
class KerasOptions:
    """A Keras optimizer as the shards know it.

    Attributes:
        always: flags that do not follow from the options. values: psd's options, without the learning rate.
        weight_decay: 0 if there is none. clip_norm: None if there is none.
    """

    rule: GroupSpec
    always: tuple[str, ...]
    values: Mapping[str, Any]
    weight_decay: float = 0.0
    clip_norm: float | None = None

    def group(self, *, decays: bool) -> tuple[GroupSpec, dict[str, Any]]:
        """The declaration of a group, and its options without the learning rate."""
        values = {**self.values, "weight_decay": self.weight_decay if decays else 0.0}
        return group_spec(self.rule, self.always, values), values


def options_of(name: str, config: Mapping[str, Any]) -> KerasOptions:
    """The rule and options of an optimizer. name: its class in keras.optimizers. config: the result of its get_config().

    Raises:
        TypeError: psd does not support the class. InvalidRequest: psd does not support an option.
    """
    kind = _KINDS.get(name)
    if kind is None:
        raise TypeError(f"keras.optimizers.{name} is not supported by psd; supported: {', '.join(_KINDS)}")
    for option, why in _REFUSED.items():
        if config.get(option):
            raise InvalidRequest(f"{name}: {option}={config[option]!r} is not supported by psd: {why}")
    for option, value in kind.only.items():
        if config.get(option, value) != value:
            raise InvalidRequest(f"{name}: {option} must be {value} with psd, got {config[option]!r}")
    weight_decay = float(config.get("weight_decay") or 0)
    if weight_decay and not kind.decays:
        with_decay = ", ".join(name for name, other in _KINDS.items() if other.decays)
        raise InvalidRequest(
            f"{name}: weight_decay={weight_decay} is not supported by psd, whose {kind.rule} adds the decay to the gradient, "
            f"which Keras does not; it is with {with_decay}"
        )
    values: dict[str, Any] = dict(kind.fixed)
    for option, psd_name in kind.numbers.items():
        values[psd_name] = float(config[option]) * kind.scales.get(psd_name, 1)
    if "beta1" in values:
        values["betas"] = values.pop("beta1"), values.pop("beta2")
    info = RULES[kind.rule]
    values |= {flag: bool(config[flag]) for flag in info.flags if flag in config and flag not in info.scalars}
    if not values.get("momentum"):
        values.pop("nesterov", None)  # Keras ignores it then
    always = tuple(sorted({"keras", *(["decoupled_weight_decay"] if weight_decay else [])}.intersection(info.flags)))
    for scalar in info.scalars:
        if option_of(scalar) in values:
            _check(name, kind, scalar, values)
    clip_norm = config.get("global_clipnorm")
    return KerasOptions(GroupSpec(kind.rule), always, values, weight_decay, float(clip_norm) if clip_norm else None)


def _check(name: str, kind: _Kind, scalar: str, values: Mapping[str, Any]) -> None:
    """Raise InvalidRequest, with Keras's names, for a number that is out of psd's range."""
    value = values[option_of(scalar)]
    if isinstance(value, tuple):
        value = value[int(scalar[-1]) - 1]
    problem = RULES[kind.rule].problem(scalar, value)
    if problem:
        option = next((option for option, psd_name in kind.numbers.items() if psd_name == scalar), scalar)
        raise InvalidRequest(f"{name}: {option} {problem}")
