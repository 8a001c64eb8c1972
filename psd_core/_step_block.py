"""The one function that applies a rule: to a block, from one copy to another.

Checks what memory safety needs: the slots that a rule has under the given flags. Must not know which values make sense.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from psd_core import _kernels
from psd_core._c_headers import checksum
from psd_core._kernels import InvalidArray
from psd_core.rules import RULES

RealArray = npt.NDArray[np.float32] | npt.NDArray[np.float64]
SumsArray = npt.NDArray[np.uint8]
GradientArray = RealArray | npt.NDArray[np.float16] | npt.NDArray[np.uint16]
"""Arrays of gradients; uint16 has the bits of bfloat16, which NumPy lacks."""


if checksum() != _kernels.RULES_CHECKSUM:
    raise ImportError("psd_core: its kernels were built with another rules.py; build them again: pip install --editable .")


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
    sums: SumsArray | None = None,
) -> None:
    """Add the last contribution of a round and apply one update, from one copy of a block to another.

    A block is a run of the flat parameter space, made of segments: pieces of tensors, end to end. A touched segment i is
    updated, as its step ``steps_in[i] + 1``, by the gradient ``scale * (acc + weight * grad)``, where a missing term is left
    out. An untouched one is copied unchanged, with its slots. A lone contribution of weight and scale 1 is used as it is.

    Rules that are in torch.optim follow it operation by operation in the arrays' type; torch itself may fuse a multiply and an
    add, and so differ by rounding. A layer-wise rule makes no step: that needs norms of whole tensors, and a block may have
    only parts of them. ``param_out`` gets the direction of the update, and the caller makes the step.

    Args:
        rule: a key of ``RULES``.
        param_in: (n,) float32|float64.
        param_out: (n,) same type, writable. Overwritten; ``param_in`` itself, or separate memory.
        slots_in, slots_out: one (n,) array, like those above, for each of ``RULES[rule].slots(flags)``, in that order.
        acc: (n,) same type: the sum of the round's earlier contributions; or None.
        grad: (n,) same type, or float16|uint16 beside float32: the last contribution; None if ``acc`` has them all.
        weight: factor of ``grad``. scale: factor of the sum, such as 1 / sum of weights. Both are rounded to the arrays' type.
        segment_ends: (k,) uint32, never falling, the last one n: segment i is [segment_ends[i - 1], segment_ends[i]).
        touched: (k,) uint8, not 0 for segments for which the round has a gradient.
        steps_in: (k,) uint64, updates applied to each segment so far.
        steps_out: (k,) uint64, writable. Set to ``steps_in``, plus 1 if touched; ``steps_in`` itself, or separate memory.
        scalars: one number for each of ``RULES[rule].scalars``.
        flags: names from ``RULES[rule].flags``.
        sums: writable, SUMS_BYTES of ``_arena``; becomes the checksum of the whole pieces of ``param_out``, with which a
            ``Content`` goes on. ``param_out`` then goes past the processor's caches. None: it is stored plainly.

    Raises:
        InvalidArray: type, shape, layout, alignment, length, overlap or ends, or a missing array; nothing is written.
        ValueError: an unknown rule or flag, a wrong number of scalars, or a momentum without the flag that gives it a slot.

    Cost: O(n + k), no allocation, GIL released. Neighbouring segments whose steps the rule cannot tell apart are one run,
        and runs are processed in tiles of 1 KiB, so that nothing is read from or written to memory twice.
    """
    plan = planned(rule, tuple(flags))
    for argument, slots in (("slots_in", slots_in), ("slots_out", slots_out)):
        if len(slots) != len(plan.slots):
            raise InvalidArray(f"{argument}: expected {len(plan.slots)} arrays ({', '.join(plan.slots)}), got {len(slots)}")
        for name, slot in zip(plan.slots, slots, strict=True):
            if slot is None:
                raise InvalidArray(f"{name}_{argument.removeprefix('slots_')}: expected an array, got None")
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
        tuple([None if place is None else slots_in[place] for place in plan.places]),
        tuple([None if place is None else slots_out[place] for place in plan.places]),
        acc,
        grad,
        weight,
        scale,
        segment_ends,
        touched,
        steps_in,
        steps_out,
        tuple(scalars),
        plan.flags,
        sums,
    )


class Plan(NamedTuple):
    """The consequences of a rule and its flags, the same for every block.

    Attributes:
        flags: True for each of the rule's flags that is on.
        slots: the slots under these flags. kernel_slots: all that the kernel knows. places: place of each of these in `slots`.
        zeros: places of the scalars that must be 0.
    """

    number: int
    flags: tuple[bool, ...]
    scalars: tuple[str, ...]
    slots: tuple[str, ...]
    kernel_slots: tuple[str, ...]
    places: tuple[int | None, ...]
    zeros: tuple[int, ...]


@functools.lru_cache(1024)
def planned(rule: str, flags: tuple[str, ...]) -> Plan:
    """The consequences of a rule and its flags. Raises ValueError as `step_block` does."""
    if rule not in RULES:
        raise ValueError(f"rule: expected one of {', '.join(RULES)}, got {rule!r}")
    facts = RULES[rule]
    unknown = sorted(set(flags) - set(facts.flags))
    if unknown:
        raise ValueError(f"flags: expected some of {', '.join(facts.flags) or 'none'}, got {unknown[0]!r}")
    slots = facts.slots(flags)
    kernel_slots = tuple(slot.name for slot in facts.all_slots)
    return Plan(
        facts.number,
        tuple(flag in flags for flag in facts.flags),
        facts.scalars,
        slots,
        kernel_slots,
        tuple(slots.index(name) if name in slots else None for name in kernel_slots),
        tuple(i for i, name in enumerate(facts.scalars) if name in facts.flags and name not in flags),
    )
