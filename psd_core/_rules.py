"""The update rules as the kernels know them: order of scalars, bits of flags, slots; and the one entry that takes a block.

Owns what a caller must match for memory to be safe: which slots a rule needs under which flags. It must not know which values
make sense (psd/contract/rules.py does), and no defaults. The functions for whole arrays are in ``_updates.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from psd_core import _kernels
from psd_core._kernels import InvalidTensor

RealArray = npt.NDArray[np.float32] | npt.NDArray[np.float64]
GradientArray = RealArray | npt.NDArray[np.float16] | npt.NDArray[np.uint16]
"""uint16: the bits of bfloat16, a type that NumPy does not have."""


class Slot(NamedTuple):
    """An array that a rule keeps beside the parameter. `flag`: the flag that it belongs to; "": it is always there."""

    name: str
    flag: str = ""


class Rule(NamedTuple):
    """A rule's interface, in the order of its C header: scalars by position, flags by bit, slots by position.

    A flag with the name of a scalar says that the rule has what the scalar needs; without the flag the scalar must be 0. The
    flag "keras" is there where keras.optimizers puts epsilon or the learning rate elsewhere than torch.optim.
    """

    number: int
    scalars: tuple[str, ...]
    flags: tuple[str, ...]
    slots: tuple[Slot, ...]

    def slots_of(self, flags: Collection[str]) -> tuple[str, ...]:
        """Names of the slots that there are under these flags."""
        return tuple(slot.name for slot in self.slots if not slot.flag or slot.flag in flags)

    def bits(self, flags: Collection[str]) -> int:
        """The flags as the kernel takes them; ValueError names one that the rule does not have."""
        unknown = sorted(set(flags) - set(self.flags))
        if unknown:
            raise ValueError(f"flags: expected some of {', '.join(self.flags) or 'none'}, got {unknown[0]!r}")
        return sum(1 << bit for bit, flag in enumerate(self.flags) if flag in flags)


_MOMENTS = (Slot("exp_avg"), Slot("exp_avg_sq"))
_ADAM_SCALARS = ("lr", "beta1", "beta2", "eps", "weight_decay")
_IDS = _kernels.RULE_IDS

RULES = {
    "adadelta": Rule(
        _IDS["adadelta"],
        ("lr", "rho", "eps", "weight_decay"),
        ("maximize",),
        (Slot("square_avg"), Slot("acc_delta")),
    ),
    "adagrad": Rule(_IDS["adagrad"], ("lr", "lr_decay", "eps", "weight_decay"), ("maximize", "keras"), (Slot("sum"),)),
    "adam": Rule(
        _IDS["adam"],
        _ADAM_SCALARS,
        ("maximize", "amsgrad", "decoupled_weight_decay", "keras"),
        (*_MOMENTS, Slot("max_exp_avg_sq", "amsgrad")),
    ),
    "adamax": Rule(_IDS["adamax"], _ADAM_SCALARS, ("maximize", "keras"), (Slot("exp_avg"), Slot("exp_inf"))),
    "ftrl": Rule(_IDS["ftrl"], ("lr", "beta", "l1", "l2"), (), (Slot("accumulator"), Slot("linear"))),
    "lamb": Rule(_IDS["lamb"], _ADAM_SCALARS, ("maximize",), _MOMENTS),
    "lion": Rule(_IDS["lion"], ("lr", "beta1", "beta2", "weight_decay"), ("maximize",), (Slot("exp_avg"),)),
    "nadam": Rule(_IDS["nadam"], (*_ADAM_SCALARS, "momentum_decay"), ("maximize", "decoupled_weight_decay"), _MOMENTS),
    "rmsprop": Rule(
        _IDS["rmsprop"],
        ("lr", "alpha", "eps", "weight_decay", "momentum"),
        ("maximize", "centered", "momentum", "keras"),
        (Slot("square_avg"), Slot("grad_avg", "centered"), Slot("momentum_buffer", "momentum")),
    ),
    "sgd": Rule(
        _IDS["sgd"],
        ("lr", "momentum", "dampening", "weight_decay"),
        ("maximize", "nesterov", "momentum", "keras"),
        (Slot("momentum", "momentum"),),
    ),
}
"""By name. Slots have torch's names, but for SGD's buffer; FTRL's and Lion's have those of TensorFlow and of Adam."""


def step_block(
    rule: str,
    param_in: RealArray,
    param_out: RealArray,
    slots_in: Sequence[RealArray],
    slots_out: Sequence[RealArray],
    acc: RealArray | None,
    grad: GradientArray | None,
    *,
    weight: float,
    scale: float,
    segment_ends: npt.NDArray[np.uint32],
    touched: npt.NDArray[np.uint8],
    steps_in: npt.NDArray[np.uint64],
    steps_out: npt.NDArray[np.uint64],
    scalars: Sequence[float],
    flags: Collection[str],
) -> None:
    """Reduce the last contribution of a round and apply one update, from one copy of a block to another.

    A block is a run of the flat parameter space made of segments, pieces of tensors that lie end to end. A touched segment i is
    updated as the function of the rule's name does with ``step = steps_in[i] + 1`` and
    ``grad = scale * (acc + weight * grad)``, where an absent term is left out; an untouched one is
    copied through unchanged, slots too. A lone contribution with weight and scale of 1 is used exactly as it is.

    "lamb" alone makes no step, which needs norms of whole tensors, and a block may have parts of them: ``param_out`` gets the
    direction of the update, and the caller makes the step.

    Args:
        rule: a key of ``RULES``.
        param_in: (n,) float32|float64.
        param_out: (n,) same type, writable. Overwritten; ``param_in`` itself, or memory of its own.
        slots_in, slots_out: one (n,) array, like the above, for each of ``RULES[rule].slots_of(flags)``, in that order.
        acc: (n,) same type: the sum of the round's earlier contributions; or None.
        grad: (n,) same type, or float16|uint16 beside float32: the last contribution; None if ``acc`` has them all.
        weight: of ``grad``. scale: of the sum, such as 1 over the sum of weights. Rounded to the arrays' type.
        segment_ends: (k,) uint32, never falling, the last one n: segment i is [segment_ends[i - 1], segment_ends[i]).
        touched: (k,) uint8, not 0 where the round has a gradient for the segment.
        steps_in: (k,) uint64, updates applied to each segment so far.
        steps_out: (k,) uint64, writable. ``steps_in``, plus 1 where touched; ``steps_in`` itself, or memory of its own.
        scalars: one number for each of ``RULES[rule].scalars``.
        flags: names, of ``RULES[rule].flags``.

    Raises:
        InvalidTensor: type, shape, layout, alignment, length, overlap or ends, or a missing array; nothing is written.
        ValueError: a rule, a flag or a number of scalars that there is not; a momentum without the flag that gives it a slot.

    Cost: O(n + k), no allocation, GIL released. Neighbours that are at the same step as far as the rule can tell are one
        run, and runs are worked off in tiles of 1 KiB, so that nothing is read from or written to memory twice.
    """
    plan = _planned(rule, tuple(flags))
    for argument, slots in (("slots_in", slots_in), ("slots_out", slots_out)):
        if len(slots) != len(plan.slots):
            raise InvalidTensor(f"{argument}: expected {len(plan.slots)} arrays ({', '.join(plan.slots)}), got {len(slots)}")
        for name, slot in zip(plan.slots, slots, strict=True):
            if slot is None:
                raise InvalidTensor(f"{name}_{argument.removeprefix('slots_')}: expected an array, got None")
    if len(scalars) != len(plan.scalars):
        raise ValueError(f"scalars: expected {len(plan.scalars)} ({', '.join(plan.scalars)}), got {len(scalars)}")
    for place in plan.zeros:
        if scalars[place] != 0:
            name = plan.scalars[place]
            raise ValueError(f"scalars: expected {name} to be 0 without the flag of this name, got {scalars[place]}")
    _kernels.step_block(
        plan.number,
        param_in,
        param_out,
        plan.kernel_slots,
        tuple(None if place is None else slots_in[place] for place in plan.places),
        tuple(None if place is None else slots_out[place] for place in plan.places),
        acc,
        grad,
        weight,
        scale,
        segment_ends,
        touched,
        steps_in,
        steps_out,
        tuple(scalars),
        plan.bits,
    )


class _Plan(NamedTuple):
    """What follows from a rule and its flags, for every block alike.

    Attributes:
        slots: that there are. kernel_slots: that the kernel knows; places: where each of these is among `slots`.
        zeros: places of the scalars that must be 0.
    """

    number: int
    bits: int
    scalars: tuple[str, ...]
    slots: tuple[str, ...]
    kernel_slots: tuple[str, ...]
    places: tuple[int | None, ...]
    zeros: tuple[int, ...]


@functools.lru_cache(1024)
def _planned(rule: str, flags: tuple[str, ...]) -> _Plan:
    if rule not in RULES:
        raise ValueError(f"rule: expected one of {', '.join(RULES)}, got {rule!r}")
    info = RULES[rule]
    slots = info.slots_of(flags)
    return _Plan(
        info.number,
        info.bits(flags),
        info.scalars,
        slots,
        tuple(slot.name for slot in info.slots),
        tuple(slots.index(slot.name) if slot.name in slots else None for slot in info.slots),
        tuple(i for i, name in enumerate(info.scalars) if name in info.flags and name not in flags),
    )
