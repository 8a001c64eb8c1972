"""Numbers that a worker brings to all_reduce, and what becomes of those of all workers. Must not know how they travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psd.contract.arguments import choice, refuse
from psd.contract.errors import InvalidRequest
from psd.contract.scalars import check_name, checked_number, number_message, number_of
from psd.v1 import control_pb2
from psd.v1.control_pb2 import Number

ALL_REDUCE = "all_reduce"
"""Name of the barrier at which the workers meet, and of the operation."""

NAME_BYTES_MAX = 4096
"""Bytes of a name that some shards may take; what this one takes it says itself."""

_REDUCTIONS = {
    "sum": control_pb2.NUMBER_REDUCTION_SUM,
    "mean": control_pb2.NUMBER_REDUCTION_MEAN,
    "min": control_pb2.NUMBER_REDUCTION_MIN,
    "max": control_pb2.NUMBER_REDUCTION_MAX,
}


class Reduced(dict[str, "float | int"]):
    """The result of ParameterServer.all_reduce: numbers by name, in the order in which they were given.

    Attributes:
        workers: number of workers whose numbers these are.
    """

    def __init__(self, reply: control_pb2.BarrierReply, given: Mapping[str, Any]) -> None:
        found = {number.name: number_of(number) for number in reply.numbers}
        super().__init__({name: found[name] for name in given})
        self.workers = reply.workers


def reduction_of(op: str) -> int:
    """The NumberReduction of a word; InvalidRequest if there is none."""
    return _REDUCTIONS[choice(InvalidRequest, "op", op, _REDUCTIONS)]


def numbers_of(values: Mapping[str, Any]) -> list[Number]:
    """Numbers by name as messages, in the order of their names; InvalidRequest if these are none."""
    if not isinstance(values, Mapping) or not values or not all(isinstance(name, str) for name in values):
        refuse(InvalidRequest, "values", 'numbers by name, such as {"loss": 0.5}', values)
    found = []
    for name in sorted(values):
        check_name(name, NAME_BYTES_MAX)
        found.append(number_message(name, checked_number(name, values[name])))
    return found
