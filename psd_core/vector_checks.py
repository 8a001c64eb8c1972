"""Checks of operations on server-side vectors, once for all: programs are told before anything travels, a store before it runs.

Owns what a sound operation is, beside its row. Must not know batches, messages, or where vectors lie.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from psd_core._vector_format import NoSuchVector, VectorError, VectorSpec
from psd_core._vector_rows import ANY, OperationKind, VectorOperation
from psd_core.optimizer import number
from psd_core.vector_operations import KINDS, NOT_FOR_WHOLE, NUMBERS_MAX, OPERANDS_MAX

_INT64 = np.iinfo(np.int64)


class HasSpec(Protocol):
    """Whatever has the declaration of a vector: a program's handle of it, a store's part of it."""

    @property
    def spec(self) -> VectorSpec:
        """The declaration."""


def checked(o: VectorOperation, vectors: Mapping[str, HasSpec]) -> VectorOperation:
    """The operation, with numbers and arrays as its vectors have them. vectors: by name; those that there are.

    Raises:
        VectorError, NoSuchVector: naming the argument.
    """
    kind = KINDS[o.name]
    if len(o.x) != kind.x:
        _check_count("x", len(o.x), kind.x, 1)
    if len(o.y) != kind.y:
        _check_count("y", len(o.y), kind.y, 0)
    names = (o.out, *o.x, *o.y) if kind.writes else (*o.x, *o.y)
    like = None
    for place, name in enumerate(names):
        try:
            spec = vectors[name].spec
        except (KeyError, TypeError):
            raise NoSuchVector(f"{_field(kind, o, place)}: there is no vector {name!r}") from None
        if like is None:
            like = spec
        elif spec.size != like.size or spec.dtype != like.dtype:
            raise VectorError(
                f"{_field(kind, o, place)}: expected {like.size} of {like.dtype}, as {like.name!r} has, "
                f"got {spec.name!r} with {spec.size} of {spec.dtype}"
            )
    assert like is not None
    numbers = _numbers(o, kind, like) if o.numbers or kind.writes else o.numbers
    if kind.brings:
        return _with_arrays(o, kind.brings, like)
    if o.name == "random":
        if not numbers[0] < numbers[1]:
            raise VectorError(f"high: must be above low, {numbers[0]}, got {numbers[1]}")
        return o._replace(numbers=numbers, seed=_seed(o.seed))
    return o if numbers is o.numbers else o._replace(numbers=numbers)


def check_operands(field: str, count: int) -> None:
    """Raise VectorError if an operation names more vectors in a field than it may."""
    if count > OPERANDS_MAX:
        raise VectorError(f"{field}: names {count} vectors, the limit is {OPERANDS_MAX}")


def as_places(name: str, places: Any, limit: int, vector: str) -> NDArray[np.int64]:
    """Indices or rows of a vector: whole numbers from 0 to below the limit, of any shape. Raises VectorError."""
    array = np.asarray(places)
    if array.dtype.kind not in "iu" and array.size:
        raise VectorError(f"{name}: expected whole numbers, got {array.dtype}")
    if array.size:
        least, greatest = int(array.min()), int(array.max())
        if least < 0 or greatest >= limit:
            raise VectorError(f"{name}: {least if least < 0 else greatest} is out of range: {vector!r} has 0 to {limit - 1}")
    return array.astype(np.int64, copy=False)


def rows_of(name: str, spec: VectorSpec) -> int:
    """Number of a matrix's rows. Raises VectorError, naming the argument: it is none."""
    if not spec.columns:
        raise VectorError(f"{name}: {spec.name!r} is a vector, which has no rows")
    return spec.size // spec.columns


def _check_count(field: str, found: int, expected: int, least: int) -> None:
    check_operands(field, found)
    if expected != ANY:
        raise VectorError(f"{field}: expected {expected} vectors, got {found}")
    if found < least:
        raise VectorError(f"{field}: expected at least one vector, got none")


def _field(kind: OperationKind, o: VectorOperation, place: int) -> str:
    """Name of a vector's argument, by its place among all that the operation names."""
    place -= kind.writes
    if place < 0:
        return "out"
    field, place, count = ("x", place, kind.x) if place < len(o.x) else ("y", place - len(o.x), kind.y)
    return field if count == 1 else f"{field}[{place}]"


def _numbers(o: VectorOperation, kind: OperationKind, like: VectorSpec) -> Sequence[float]:
    """The numbers, as vectors of this dtype have them."""
    if len(o.numbers) > NUMBERS_MAX:
        raise VectorError(f"numbers: {len(o.numbers)} are above the limit of {NUMBERS_MAX}")
    if kind.functions is not None:
        names = _arguments(o, kind.functions, like.dtype)
        if len(o.numbers) != len(names):
            raise VectorError(f"{o.function} takes the arguments: {', '.join(names) or 'none'}; got {len(o.numbers)}")
    elif o.name == "custom":
        names = [f"arguments[{place}]" for place in range(len(o.numbers))]
    elif kind.x == ANY and kind.numbers:
        names = [f"{kind.numbers[0]}[{place}]" for place in range(len(o.x))]
        if len(o.numbers) != len(names):
            raise VectorError(f"{kind.numbers[0]}: expected one for each of {len(names)} vectors, got {len(o.numbers)}")
    else:
        names = kind.numbers
        if len(o.numbers) != len(names):
            raise VectorError(f"numbers: expected {len(names)}, got {len(o.numbers)}")
    if like.dtype != "int64" and all(type(value) is float for value in o.numbers):
        return o.numbers
    return [_number(name, value, like) for name, value in zip(names, o.numbers, strict=True)]


def _arguments(o: VectorOperation, functions: Mapping[str, tuple[str, ...]], dtype: str) -> Sequence[str]:
    """Names of the numbers that the function takes."""
    if not isinstance(o.function, str):
        raise VectorError(f"expected the name of a function, got {reprlib.repr(o.function)}")
    if o.function not in functions:
        raise VectorError(f"no function {o.function[:80]!r}; there are {', '.join(functions)}, and import paths")
    if dtype == "int64" and o.function in NOT_FOR_WHOLE:
        raise VectorError(f"{o.function} is not for int64")
    return functions[o.function]


def _number(name: str, value: Any, like: VectorSpec) -> float:
    try:
        if like.dtype != "int64":
            return number(name, value)
        whole = _whole(value)
    except TypeError:
        where, what = (f" (vector {like.name!r} is int64)", "a whole number") if like.dtype == "int64" else ("", "a number")
        raise VectorError(f"{name}{where}: expected {what}, got {reprlib.repr(value)}") from None
    if not _INT64.min <= whole <= _INT64.max:
        raise VectorError(f"{name}: expected a number from {_INT64.min} to {_INT64.max}, got {whole}")
    return whole


def _whole(value: Any) -> int:
    """A whole number; TypeError for anything else, a bool included."""
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _seed(value: Any) -> int:
    try:
        seed = _whole(value)
    except TypeError:
        seed = -1
    if not 0 <= seed < 1 << 64:
        raise VectorError(f"seed: expected a whole number from 0 to 2**64 - 1, got {reprlib.repr(value)}")
    return seed


def _with_arrays(o: VectorOperation, brings: str, out: VectorSpec) -> VectorOperation:
    """The operation with its arrays, which lie within the vector and go together."""
    values = np.asarray(o.values)
    if not np.can_cast(values.dtype, out.dtype, "same_kind"):
        raise VectorError(f"values: expected {out.dtype}, got {values.dtype}")
    values = values.astype(out.dtype, copy=False)
    if brings == "range":
        if values.ndim != 1:
            raise VectorError(f"values: expected one dimension, got shape {values.shape}")
        if not isinstance(o.start, int) or not 0 <= o.start <= out.size - len(values):
            raise VectorError(
                f"start: {len(values)} elements from {o.start!r} on do not lie in vector {out.name!r}, which has {out.size}"
            )
        return o._replace(values=values)
    places = as_places(brings, o.places, rows_of("out", out) if brings == "rows" else out.size, out.name)
    if places.ndim != 1:
        raise VectorError(f"{brings}: expected one dimension, got {places.ndim}")
    shape = (len(places), out.columns) if brings == "rows" else (len(places),)
    if values.shape != shape:
        raise VectorError(f"values: expected shape {shape}, got shape {values.shape}")
    return o._replace(places=places, values=values)
