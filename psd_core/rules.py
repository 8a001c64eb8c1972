"""The table of the update rules: one class each, from which its ids, scalars, flags, slots, ranges and defaults follow.

Workers use the classes, such as psd_client.Adam(lr=1e-3). Shards and clients look them up in `RULES`, from which _c_headers.py
makes the headers of the kernels. To add a rule, write csrc/rule_<name>.h, and a class here that is named in `__all__`.

Must not know how a rule computes, or tensors, groups or messages. Imports only the standard library, because setup.py loads it
before psd_core can be imported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from psd_core.optimizer import FLOAT32_TINY, Betas, Number, Optimizer, Positive, Range, Real, Share, Slot, facts_of

__all__ = [
    "SGD",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "FTRL",
    "LAMB",
    "Lion",
    "DelayedNesterov",
]

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
    rests_without: ClassVar[tuple[str, ...]] = ("momentum", "weight_decay")
    is_in_torch: ClassVar[bool] = True
    momentum_slot: ClassVar[str] = "momentum"

    lr: Number
    momentum: Number = 0.0
    dampening: Real = 0.0
    weight_decay: Number = 0.0
    nesterov: bool = False
    maximize: bool = False

    @classmethod
    def ranges_together(cls, flags: Collection[str]) -> Mapping[str, Range] | None:
        """Those of `conflicts`."""
        return {"momentum": Range(FLOAT32_TINY), "dampening": Range(0, 0)} if "nesterov" in flags else {}

    @classmethod
    def conflicts(cls, flags: Collection[str], numbers: Mapping[str, float]) -> list[tuple[str, str]]:
        """Flags and numbers that exclude each other: nesterov needs momentum, and no dampening."""
        momentum, dampening = numbers["momentum"], numbers["dampening"]
        if "nesterov" not in flags or (momentum > 0 and dampening == 0):
            return []
        return [("nesterov", f"needs momentum > 0 and dampening 0, got {momentum} and {dampening}")]

    @classmethod
    def momentum_scale(cls, numbers: Mapping[str, float]) -> float:
        """That of a geometric series; 0 if it has no sum."""
        momentum, entering = numbers["momentum"], 1 - numbers["dampening"]
        return (1 - momentum) / entering if momentum < 1 and entering > 0 else 0.0


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
    rests_without: ClassVar[tuple[str, ...]] = ("weight_decay",)
    is_in_torch: ClassVar[bool] = True

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
        lr, eps, weight_decay: numbers >= 0.
        rho: number from 0 to 1.
        maximize: climb instead of descend.
    """

    rule: ClassVar[str] = "adadelta"
    all_slots: ClassVar[tuple[Slot, ...]] = (Slot("square_avg"), Slot("acc_delta"))
    is_in_torch: ClassVar[bool] = True

    lr: Number = 1.0
    rho: Share = 0.9
    eps: Number = 1e-6
    weight_decay: Number = 0.0
    maximize: bool = False


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """RMSprop, equal to torch.optim.RMSprop of the same arguments.

    Args:
        lr, eps, weight_decay, momentum: numbers >= 0.
        alpha: number from 0 to 1.
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
    is_in_torch: ClassVar[bool] = True

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
        lr, eps, weight_decay: numbers >= 0; the decay is added to the gradient.
        betas: two numbers >= 0 and < 1.
        amsgrad: divide by the largest second moment so far.
        maximize: climb instead of descend.
    """

    rule: ClassVar[str] = "adam"
    all_slots: ClassVar[tuple[Slot, ...]] = (*_MOMENTS, Slot("max_exp_avg_sq", "amsgrad"))
    momentum_slot: ClassVar[str] = "exp_avg"
    faces_flags: ClassVar[tuple[str, ...]] = ("decoupled_weight_decay", "keras")
    is_in_torch: ClassVar[bool] = True

    lr: Number = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: Number = 1e-8
    weight_decay: Number = 0.0
    amsgrad: bool = False
    maximize: bool = False


@dataclass(frozen=True)
class AdamW(Adam):
    """AdamW, equal to torch.optim.AdamW of the same arguments: Adam, with the weight decay separate from the gradient.

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
        lr, eps, weight_decay: numbers >= 0.
        betas: two numbers >= 0 and < 1.
        maximize: climb instead of descend.
    """

    rule: ClassVar[str] = "adamax"
    all_slots: ClassVar[tuple[Slot, ...]] = (Slot("exp_avg"), Slot("exp_inf"))
    momentum_slot: ClassVar[str] = "exp_avg"
    faces_flags: ClassVar[tuple[str, ...]] = ("keras",)
    is_in_torch: ClassVar[bool] = True

    lr: Number = 2e-3
    betas: Betas = (0.9, 0.999)
    eps: Number = 1e-8
    weight_decay: Number = 0.0
    maximize: bool = False


@dataclass(frozen=True)
class NAdam(Optimizer):
    """NAdam, equal to torch.optim.NAdam of the same arguments, as long as betas and momentum_decay do not change.

    Args:
        lr, eps, weight_decay, momentum_decay: numbers >= 0.
        betas: two numbers >= 0 and < 1.
        decoupled_weight_decay: as in AdamW.
        maximize: climb instead of descend.
    """

    rule: ClassVar[str] = "nadam"
    all_slots: ClassVar[tuple[Slot, ...]] = _MOMENTS
    momentum_slot: ClassVar[str] = "exp_avg"
    is_in_torch: ClassVar[bool] = True

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
        lr: number > 0, the paper's alpha.
        beta: number >= 0.
        l1, l2: numbers >= 0; l1 makes parameters exactly 0.
        initial_accumulator_value: number >= 0; what the sum of squares begins with. Fixed for the job.
    """

    rule: ClassVar[str] = "ftrl"
    all_slots: ClassVar[tuple[Slot, ...]] = (Slot("accumulator", start="initial_accumulator_value"), Slot("linear"))
    settles: ClassVar[bool] = True
    lr_scales_steps: ClassVar[bool] = False

    lr: Positive
    beta: Number = 1.0
    l1: Number = 0.0
    l2: Number = 0.0
    initial_accumulator_value: Number = 0.0


@dataclass(frozen=True)
class LAMB(Optimizer):
    """LAMB (You et al. 2020, arXiv:1904.00962): a step in Adam's direction, scaled for each tensor by the ratio of its norm to
    the direction's.

    Synchronous only; implies exact aggregation.

    Args:
        lr, eps, weight_decay: numbers >= 0; the decay is part of the direction.
        betas: two numbers >= 0 and < 1.
        maximize: climb instead of descend.
    """

    rule: ClassVar[str] = "lamb"
    all_slots: ClassVar[tuple[Slot, ...]] = _MOMENTS
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
        lr, weight_decay: numbers >= 0; the decay is separate from the gradient, as in AdamW.
        betas: two numbers >= 0 and < 1.
        maximize: climb instead of descend.
    """

    rule: ClassVar[str] = "lion"
    all_slots: ClassVar[tuple[Slot, ...]] = (Slot("exp_avg"),)
    momentum_slot: ClassVar[str] = "exp_avg"

    lr: Number = 1e-4
    betas: Betas = (0.9, 0.99)
    weight_decay: Number = 0.0
    maximize: bool = False


@dataclass(frozen=True)
class DelayedNesterov(Optimizer):
    """Delayed Nesterov (Liu et al. 2024, arXiv:2401.09135), for learners whose differences come one by one: `outer` of
    psd_client.torch.Local, in a job with consistency="async".

    With N = every, B the sum of the gradients since the momentum m has moved, and c = activation, the n-th gradient g does
    m = momentum * m + B / N, p = p - lr * ((1 - c * N + c) * momentum * m + g / N), B = 0 if N divides n; else
    p = p - lr * (c * momentum * m + g / N).

    Args:
        lr: number >= 0; N updates make as long a step as one of SGD's.
        momentum: number from 0 to 1.
        every: whole number N >= 1; about as many as there are learners.
        activation: number from 0 to 1 / N, c; what the momentum does in the updates between.
        maximize: climb instead of descend.
    """

    rule: ClassVar[str] = "delayed_nesterov"
    all_slots: ClassVar[tuple[Slot, ...]] = (Slot("momentum"), Slot("waiting"))
    goes_in_turns: ClassVar[bool] = True
    momentum_slot: ClassVar[str] = "momentum"

    lr: Number
    momentum: Share = 0.9
    every: Positive = 4
    activation: Share = 0.0
    maximize: bool = False

    @classmethod
    def conflicts(cls, flags: Collection[str], numbers: Mapping[str, float]) -> list[tuple[str, str]]:
        """Numbers that go together with no others: `every` is a whole one, and the activation at most 1 / every."""
        del flags
        every, activation = numbers["every"], numbers["activation"]
        if every != int(every) or every > 1e9:
            return [("every", f"must be a whole number, at most 10^9, got {every}")]
        return [("activation", f"must be at most 1 / every, got {activation}")] if activation * every > 1 else []

    @classmethod
    def momentum_scale(cls, numbers: Mapping[str, float]) -> float:
        """That of a geometric series."""
        return 1 - numbers["momentum"]


RULES = {
    row.rule: replace(facts_of(row), number=number)
    for number, row in enumerate(sorted(Optimizer.__subclasses__(), key=lambda row: row.rule))  # not AdamW, a form of Adam
}
"""Facts by name, in the order of the kernels' ids."""

CLASSES: tuple[type[Optimizer], ...] = tuple(globals()[name] for name in __all__)
"""Classes for workers."""
