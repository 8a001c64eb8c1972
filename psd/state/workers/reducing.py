"""Reductions of the numbers that workers bring to a barrier: exact, and the same whatever the order of the arrivals.

Must not know when a barrier opens, or who arrives at it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from psd.contract.config import Limits
from psd.contract.errors import InvalidRequest
from psd.contract.scalars import check_name, number_message, number_of
from psd.v1 import control_pb2
from psd.v1.control_pb2 import Number

_SUM_BITS = 63
"""Bits of a sum of integers, without its sign."""

_UNIT_BITS = 1074
"""Every finite float64 is a multiple of 2 to the power of minus this."""


class Brought(NamedTuple):
    """Numbers that one worker brings.

    Attributes:
        how: the NumberReduction; 0: there are no numbers. names, values: of one length, in the order of the names.
    """

    how: int
    names: tuple[str, ...]
    values: tuple[float | int, ...]


NOTHING = Brought(0, (), ())


def brought_by(request: control_pb2.BarrierRequest, limits: Limits, world_size: int) -> Brought:
    """The numbers of a request; InvalidRequest if they are too many, or one is not what `Number` says."""
    how, count = request.reduction, len(request.numbers)
    if not how and not count:
        return NOTHING
    if how not in _REDUCE:
        raise InvalidRequest(
            f"reduction: is {how}, which is none of {', '.join(map(str, _REDUCE))}, and there are {count} numbers"
        )
    if not 1 <= count <= limits.reduced_numbers_max:
        raise InvalidRequest(
            f"numbers: expected 1 to {limits.reduced_numbers_max} (the shard's --max-reduced-numbers), got {count}"
        )
    found: dict[str, float | int] = {}
    for number in request.numbers:
        check_name(number.name, limits.name_bytes_max)
        if number.WhichOneof("value") is None:
            raise InvalidRequest(f"numbers: {number.name!r} has no value")
        if number.name in found:
            raise InvalidRequest(f"numbers: {number.name!r} is there twice")
        found[number.name] = value = number_of(number)
        if how == control_pb2.NUMBER_REDUCTION_SUM and isinstance(value, int) and abs(value) >= (1 << _SUM_BITS) // world_size:
            raise InvalidRequest(
                f"numbers: {number.name!r} is {value}, and sums of such integers over {world_size} workers may not fit into 64 "
                "bits; bring it as a real number"
            )
    names = tuple(sorted(found))
    return Brought(how, names, tuple(found[name] for name in names))


def difference(mine: Brought, rank: int, others: Brought, other_rank: int) -> str:
    """The reason why the numbers of two workers cannot be reduced together, in words; empty if they can be."""
    if mine.how != others.how:
        return f"reduction: worker {rank} asks for {_word(mine.how)}, worker {other_rank} for {_word(others.how)}"
    for these, whose, who, lacks in ((mine, others, rank, other_rank), (others, mine, other_rank, rank)):
        if only := sorted({*these.names} - {*whose.names}):
            return f"numbers: worker {who} brings {only[0]!r}, and worker {lacks} does not"
    return ""


def _word(how: int) -> str:
    return f'"{control_pb2.NumberReduction.Name(how).rpartition("_")[2].lower()}"' if how else "none"


def reduced(brought: Sequence[Brought]) -> list[Number]:
    """The numbers of several workers, who have the same names, as one list of numbers."""
    how, names = brought[0].how, brought[0].names
    return [number_message(name, _reduce(how, [each.values[i] for each in brought])) for i, name in enumerate(names)]


def _reduce(how: int, values: list[float | int]) -> float | int:
    is_real = any(isinstance(value, float) for value in values)
    found: float | int = _REDUCE[how]([float(value) for value in values] if is_real else values)
    return found


def _sum(values: list[Any]) -> Any:
    return exact_sum(values) if isinstance(values[0], float) else sum(values)


def _mean(values: list[Any]) -> float:
    return exact_sum(values, len(values)) if isinstance(values[0], float) else sum(values) / len(values)


def _least(values: list[Any]) -> Any:
    return math.nan if any(map(math.isnan, values)) else min(values, key=_in_order)


def _greatest(values: list[Any]) -> Any:
    return math.nan if any(map(math.isnan, values)) else max(values, key=_in_order)


def _in_order(value: Any) -> tuple[Any, float]:
    """A key that also orders the two zeros, which are equal."""
    return value, math.copysign(1.0, value)


_REDUCE: dict[int, Callable[[list[Any]], Any]] = {
    control_pb2.NUMBER_REDUCTION_SUM: _sum,
    control_pb2.NUMBER_REDUCTION_MEAN: _mean,
    control_pb2.NUMBER_REDUCTION_MIN: _least,
    control_pb2.NUMBER_REDUCTION_MAX: _greatest,
}


def exact_sum(values: Sequence[float], divisor: int = 1) -> float:
    """The sum of floats, rounded once, divided by a whole number: the same whatever their order.

    Infinite if it is too large; NaN if a value is, or if there are infinities of both signs.
    """
    try:
        return math.fsum(values) / divisor
    except ValueError:  # infinities of both signs
        return math.nan
    except OverflowError:  # on the way: the sum itself need not be too large
        odd = [value for value in values if not math.isfinite(value)]
        if odd:
            return sum(odd)
    ratios = map(float.as_integer_ratio, values)  # whose denominators are powers of two
    total = sum(numerator << _UNIT_BITS >> (denominator.bit_length() - 1) for numerator, denominator in ratios)
    try:
        return total / (divisor << _UNIT_BITS)
    except OverflowError:
        return math.inf if total > 0 else -math.inf
