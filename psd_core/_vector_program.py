"""Batches as the bytes that C runs: checks of every operation, the operands, the part of each argument that a store has.

Owns the layout of the record, which csrc/vector.h has in C. Must not open, map or lock anything.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from psd_core import vector_operations as op
from psd_core._vector_format import NoSuchVector, VectorError, VectorPart
from psd_core.vector_operations import DTYPES, MAP_FUNCTIONS, OPERATIONS_MAX, STRIPE, ZIP_FUNCTIONS, Operation

INPUTS_MAX = 1024
"""Vectors that one operation may read."""
ANSWERS_MAX = 1024
"""Scalars that one batch may answer."""
OPERANDS_MAX = 512
"""Vectors that one batch may name."""

_NONE = 0xFFFFFFFF
# check, head, size, commit, kind; slot, session, sequence; groups, operands, ops, inputs, answers
_RECORD = struct.Struct("=13Q")
_GROUP = struct.Struct("=7Q")
_OPERAND = struct.Struct("=II")
_OP = {kind: struct.Struct(f"=8I5Q2{kind}") for kind in "dq"}
_ALIGN = 64
# In the order of csrc/vector.h.
_CODES = {
    name: code
    for code, name in enumerate(
        "fill copy scale axpy combine random map zip put add add_rows apply dot sum min max gram".split()  # noqa: SIM905
    )
}
_MAPS, _ZIPS = ({name: number for number, name in enumerate(table)} for table in (MAP_FUNCTIONS, ZIP_FUNCTIONS))
_INT64 = (-(1 << 63), (1 << 63) - 1)


@dataclass
class _Step:
    """One operation, understood. Arrays are of the part that is here."""

    code: str
    out: VectorPart | None
    inputs: Sequence[VectorPart]
    numbers: tuple[float, float] = (0, 0)
    function: int = 0
    start: int = 0
    count: int = 0
    width: int = 1
    values: NDArray[Any] | None = None
    keys: NDArray[Any] | None = None
    answers: int = 0
    reads_out: bool = False
    user: Callable[..., Any] | None = None


class UserFunction(NamedTuple):
    """A function to call on stripes, with the dtypes of its arguments and of its result."""

    function: Callable[..., Any]
    inputs: tuple[np.dtype[Any], ...]
    dtype: np.dtype[Any]


@dataclass
class Program:
    """A batch as C runs it.

    Attributes:
        head: of the record, whose `size` bytes have the `parts` at their offsets, too.
        changes: the batch writes to a vector. staging: stripes of the staging area that it needs.
        functions: by the number of the operation in the record.
    """

    head: bytearray
    size: int
    parts: list[tuple[int, NDArray[Any]]]
    answers: int
    changes: bool
    staging: int
    functions: dict[int, UserFunction] = field(default_factory=dict)


def whole_numbers(name: str, array: NDArray[Any], limit: int) -> NDArray[np.int64]:
    """Indices or rows, checked: (n,) whole numbers from 0 to below the limit."""
    array = np.asarray(array)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise VectorError(f"{name}: expected one dimension of whole numbers, got {array.ndim} of {array.dtype}")
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < limit:
        wrong = int(array.min()) if int(array.min()) < 0 else int(array.max())
        raise VectorError(f"{name}: expected numbers from 0 to {limit - 1}, got {wrong}")
    return array.astype(np.int64, copy=False)


def compiled(operations: Sequence[Operation], vectors: Mapping[str, VectorPart], claim: Sequence[int] = (0, 0, 0)) -> Program:
    """The batch as C runs it. `claim`: slot, session and sequence number; session 0: nobody's.

    Raises:
        VectorError, NoSuchVector: naming the operation and its argument.
    """
    if len(operations) > OPERATIONS_MAX:
        raise VectorError(f"operations: at most {OPERATIONS_MAX} in a batch, got {len(operations)}")
    steps = []
    for number, operation in enumerate(operations):
        understand = _UNDERSTAND.get(type(operation))
        if understand is None:
            raise VectorError(f"operations[{number}]: expected an operation on vectors, got {type(operation).__name__}")
        try:
            steps.append(understand(operation, vectors))
        except VectorError as error:
            raise type(error)(f"operations[{number}], {type(operation).__name__}: {error}") from None
    return _laid_out(steps, claim)


def _laid_out(steps: list[_Step], claim: Sequence[int]) -> Program:
    groups: dict[int, list[int]] = {}
    answers, first_answers = 0, []
    for number, step in enumerate(steps):
        any_part = step.out or step.inputs[0]
        groups.setdefault(any_part.spec.size, []).append(number)
        first_answers.append(answers)
        answers += step.answers
    if answers > ANSWERS_MAX:
        raise VectorError(f"operations: at most {ANSWERS_MAX} scalars may be answered, got {answers}")
    has_functions = any(step.user for step in steps)
    read = {part.number for step in steps for part in (*step.inputs, *([step.out] if step.out and step.reads_out else ()))}
    staged: dict[int, int] = {}
    group_bytes, operand_bytes, inputs = [], [], []
    operands = 0
    order: list[int] = []
    numbers: dict[int, int] = {}  # of operands, by vector
    for size, members in groups.items():
        first_operand, first_op = operands, len(order)
        for number in members:
            step = steps[number]
            order.append(number)
            for part in (step.out, *step.inputs):
                if part is not None and part.number not in numbers:
                    numbers[part.number] = operands
                    operands += 1
        for number in members:
            out = steps[number].out
            if out is not None and (has_functions or out.number in read):
                staged.setdefault(out.number, len(staged) + 1)
        part = steps[members[0]].out or steps[members[0]].inputs[0]
        stripes = -(-(part.end - part.begin) // STRIPE)
        group_bytes.append(
            _GROUP.pack(size, part.begin // STRIPE, stripes, first_op, len(members), first_operand, operands - first_operand)
        )
    if operands > OPERANDS_MAX:
        raise VectorError(f"operations: at most {OPERANDS_MAX} vectors in a batch, got {operands}")
    operand_bytes = [_OPERAND.pack(number, staged.get(number, 0)) for number in numbers]
    for number in order:
        inputs += [numbers[part.number] for part in steps[number].inputs]
    ops_at = _RECORD.size + _GROUP.size * len(groups) + _OPERAND.size * operands
    head_bytes = ops_at + _OP["d"].size * len(steps) + -(-len(inputs) // 2) * 8
    at, parts, op_bytes, first_input = head_bytes, [], [], 0
    functions = {}
    for position, number in enumerate(order):
        step = steps[number]
        offsets = []
        for array in (step.values, step.keys):
            at = -(-at // _ALIGN) * _ALIGN
            offsets.append(at)
            if array is not None:
                parts.append((at, array))
                at += array.nbytes
        dtype = (step.out or step.inputs[0]).spec.dtype
        if step.user is not None:
            functions[position] = UserFunction(
                step.user, tuple(np.dtype(part.spec.dtype) for part in step.inputs), np.dtype(dtype)
            )
            at += step.count * np.dtype(dtype).itemsize
        op_bytes.append(
            _OP["q" if dtype == "int64" else "d"].pack(
                _CODES[step.code], DTYPES.index(dtype), step.function, _NONE if step.out is None else numbers[step.out.number],
                first_input, len(step.inputs), first_answers[number], step.answers,
                step.start, step.count, step.width, *offsets, *step.numbers,
            )
        )  # fmt: skip
        first_input += len(step.inputs)
    record = _RECORD.pack(0, head_bytes, at, 0, 0, *claim, len(groups), operands, len(steps), len(inputs), answers)
    head = bytearray(b"".join((record, *group_bytes, *operand_bytes, *op_bytes)))
    head += struct.pack(f"={len(inputs)}I", *inputs)
    head += bytes(head_bytes - len(head))
    changes = any(step.out is not None for step in steps)
    if not changes:  # only what no batch can change: coefficients; C finds them behind the head
        assert not parts
    return Program(head, at, parts, answers, changes, len(staged), functions)


def calls_of(program: Program) -> Callable[[int, int, Callable[[int, int], bytes]], NDArray[np.uint8]]:
    """A function that C calls for users' functions: with the operation's number, the elements, and how to get an argument."""

    def call(number: int, n: int, block: Callable[[int, int], bytes]) -> NDArray[np.uint8]:
        user = program.functions[number]
        blocks = [np.frombuffer(block(i, n * dtype.itemsize), dtype) for i, dtype in enumerate(user.inputs)]
        result = np.asarray(user.function(*blocks))
        if not np.can_cast(result.dtype, user.dtype, "safe") or result.shape not in ((), (1,), (n,)):
            raise VectorError(
                f"function: expected {n} of {user.dtype} to be returned, got {result.dtype} of shape {result.shape}"
            )
        return np.ascontiguousarray(np.broadcast_to(result, (n,)), user.dtype).view(np.uint8)

    return call


def catalog_record(text: bytes, claim: Sequence[int] = (0, 0, 0)) -> Program:
    """The record of a change of the catalog."""
    size = _RECORD.size + len(text)
    head = bytearray(_RECORD.pack(0, _RECORD.size, size, 0, 1, *claim, 0, 0, 0, 0, 0))
    return Program(head, size, [(_RECORD.size, np.frombuffer(text, np.uint8))], 0, True, 0)


def catalog_in(record: memoryview) -> bytes | None:
    """The text of the catalog, if that is what a record, which has been checked, is about."""
    fields = _RECORD.unpack_from(record)
    return bytes(record[_RECORD.size : fields[2]]) if fields[4] else None


# What each operation means. Every function gets the operation and the vectors, and raises VectorError without its number.


def _part(name: str, vector: Any, vectors: Mapping[str, VectorPart], like: VectorPart | None = None) -> VectorPart:
    try:
        part = vectors[vector]
    except (KeyError, TypeError):
        raise NoSuchVector(f"{name}: there is no vector {vector!r}") from None
    if like is not None and (part.spec.size != like.spec.size or part.spec.dtype != like.spec.dtype):
        raise VectorError(
            f"{name}: expected {like.spec.size} of {like.spec.dtype}, as {like.spec.name!r} has, "
            f"got {vector!r} with {part.spec.size} of {part.spec.dtype}"
        )
    return part


def _number(name: str, value: Any, part: VectorPart) -> float:
    try:
        if part.spec.dtype != "int64":
            return float(value)
        whole = operator.index(value)
    except (TypeError, ValueError):
        kind = "a whole number" if part.spec.dtype == "int64" else "a number"
        raise VectorError(f"{name}: expected {kind}, got {value!r}") from None
    if not _INT64[0] <= whole <= _INT64[1]:
        raise VectorError(f"{name}: expected a number from {_INT64[0]} to {_INT64[1]}, got {whole}")
    return whole


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _values(values: Any, part: VectorPart, shape: tuple[int, ...] | None = None) -> NDArray[Any]:
    array = np.asarray(values)
    if not np.can_cast(array.dtype, part.spec.dtype, "same_kind"):
        raise VectorError(f"values: expected {part.spec.dtype}, got {array.dtype}")
    if array.ndim != (1 if shape is None else len(shape)) or (shape is not None and array.shape != shape):
        expected = "one dimension" if shape is None else f"shape {shape}"
        raise VectorError(f"values: expected {expected}, got shape {array.shape}")
    return array.astype(part.spec.dtype, copy=False)


def _some(name: str, names: Any, vectors: Mapping[str, VectorPart], like: VectorPart | None) -> list[VectorPart]:
    if isinstance(names, str) or not 1 <= len(names) <= INPUTS_MAX:
        raise VectorError(f"{name}: expected 1 to {INPUTS_MAX} vectors, got {names!r}")
    first = like or _part(f"{name}[0]", names[0], vectors)
    return [_part(f"{name}[{i}]", vector, vectors, first) for i, vector in enumerate(names)]


def _fill(o: op.Fill, vectors: Mapping[str, VectorPart]) -> _Step:
    out = _part("out", o.out, vectors)
    return _Step("fill", out, (), (_number("value", o.value, out), 0))


def _copy(o: op.Copy, vectors: Mapping[str, VectorPart]) -> _Step:
    out = _part("out", o.out, vectors)
    return _Step("copy", out, (_part("x", o.x, vectors, out),))


def _scale(o: op.Scale, vectors: Mapping[str, VectorPart]) -> _Step:
    out = _part("out", o.out, vectors)
    return _Step("scale", out, (out,), (_number("a", o.a, out), 0))


def _axpy(o: op.Axpy, vectors: Mapping[str, VectorPart]) -> _Step:
    out = _part("out", o.out, vectors)
    return _Step("axpy", out, (out, _part("x", o.x, vectors, out)), (_number("a", o.a, out), 0))


def _combine(o: op.Combine, vectors: Mapping[str, VectorPart]) -> _Step:
    out = _part("out", o.out, vectors)
    x = _some("x", o.x, vectors, out)
    if len(o.a) != len(x):
        raise VectorError(f"a: expected {len(x)} numbers, one for each of x, got {len(o.a)}")
    numbers = [_number(f"a[{i}]", a, out) for i, a in enumerate(o.a)]
    return _Step("combine", out, x, keys=np.array(numbers, out.spec.dtype))


def _random(o: op.Random, vectors: Mapping[str, VectorPart]) -> _Step:
    out = _part("out", o.out, vectors)
    if not isinstance(o.seed, int) or not 0 <= o.seed < 1 << 64:
        raise VectorError(f"seed: expected a whole number from 0 to 2**64 - 1, got {o.seed!r}")
    low, high = (
        _number(name, _whole(v) if out.spec.dtype == "int64" else v, out) for name, v in (("low", o.low), ("high", o.high))
    )
    if not low < high:
        raise VectorError(f"high: expected more than low, {low}, got {high}")
    return _Step("random", out, (), (low, high), start=o.seed)


def _function(
    o: op.Map | op.Zip, table: Mapping[str, tuple[str, ...]], numbers: Mapping[str, int], out: VectorPart
) -> dict[str, Any]:
    if o.function not in table:
        raise VectorError(f"function: expected one of {', '.join(table)}, got {o.function!r}")
    if out.spec.dtype == "int64" and o.function in op.NOT_FOR_WHOLE:
        raise VectorError(f"function: {o.function} is not for int64")
    names = table[o.function]
    if len(o.arguments) != len(names):
        raise VectorError(f"arguments: {o.function} takes {len(names)}, got {len(o.arguments)}")
    values = [_number(name, value, out) for name, value in zip(names, o.arguments, strict=True)]
    return {"function": numbers[o.function], "numbers": (*values, 0, 0)[:2]}


def _map(o: op.Map, vectors: Mapping[str, VectorPart]) -> _Step:
    out = _part("out", o.out, vectors)
    return _Step("map", out, (_part("x", o.x, vectors, out),), **_function(o, MAP_FUNCTIONS, _MAPS, out))


def _zip(o: op.Zip, vectors: Mapping[str, VectorPart]) -> _Step:
    out = _part("out", o.out, vectors)
    inputs = _part("x", o.x, vectors, out), _part("y", o.y, vectors, out)
    return _Step("zip", out, inputs, **_function(o, ZIP_FUNCTIONS, _ZIPS, out))


def _apply(o: op.Apply, vectors: Mapping[str, VectorPart]) -> _Step:
    out = _part("out", o.out, vectors)
    if not callable(o.function):
        raise VectorError(f"function: expected one that can be called, got {o.function!r}")
    inputs = _some("x", o.x, vectors, out)
    return _Step("apply", out, inputs, start=out.begin, count=out.end - out.begin, user=o.function)


def _range(o: op.Put | op.Add, vectors: Mapping[str, VectorPart]) -> _Step:
    out = _part("out", o.out, vectors)
    values = _values(o.values, out)
    if not isinstance(o.start, int) or not 0 <= o.start <= out.spec.size - len(values):
        raise VectorError(f"start: expected 0 to {out.spec.size - len(values)} for {len(values)} values, got {o.start!r}")
    begin, end = max(o.start, out.begin), min(o.start + len(values), out.end)
    mine = values[begin - o.start : max(begin, end) - o.start]
    is_add = isinstance(o, op.Add)
    return _Step("add" if is_add else "put", out, (), start=begin, count=len(mine), values=mine, reads_out=is_add)


def _add_at(o: op.AddAt, vectors: Mapping[str, VectorPart]) -> _Step:
    out = _part("out", o.out, vectors)
    indices = whole_numbers("indices", o.indices, out.spec.size)
    return _rows(out, indices, _values(o.values, out, (len(indices),)), 1)


def _add_rows(o: op.AddRows, vectors: Mapping[str, VectorPart]) -> _Step:
    out = _part("out", o.out, vectors)
    if not out.spec.columns:
        raise VectorError(f"out: {o.out!r} is no matrix")
    rows = whole_numbers("rows", o.rows, out.spec.size // out.spec.columns)
    return _rows(out, rows, _values(o.values, out, (len(rows), out.spec.columns)), out.spec.columns)


def _rows(out: VectorPart, rows: NDArray[np.int64], values: NDArray[Any], width: int) -> _Step:
    """Rows that are here in part at least, sorted; those that come several times in the order in which they come."""
    first, last = out.begin // width, -(-out.end // width) if out.end > out.begin else 0
    if len(rows) and not (first <= int(rows.min()) and int(rows.max()) < last):
        here = (rows >= first) & (rows < last)
        rows, values = rows[here], values[here]
    if len(rows) > 1 and (rows[1:] < rows[:-1]).any():
        order = np.argsort(rows, kind="stable")
        rows, values = rows[order], values[order]
    return _Step("add_rows", out, (), count=len(rows), width=width, values=values, keys=rows, reads_out=True)


def _reduction(code: str) -> Callable[[Any, Mapping[str, VectorPart]], _Step]:
    def understand(o: Any, vectors: Mapping[str, VectorPart]) -> _Step:
        return _Step(code, None, (_part("x", o.x, vectors),), answers=1)

    return understand


def _dot(o: op.Dot, vectors: Mapping[str, VectorPart]) -> _Step:
    x = _part("x", o.x, vectors)
    return _Step("dot", None, (x, _part("y", o.y, vectors, x)), count=1, answers=1)


def _gram(o: op.Gram, vectors: Mapping[str, VectorPart]) -> _Step:
    x = _some("x", o.x, vectors, None)
    if not o.y:
        return _Step("gram", None, x, answers=len(x) * (len(x) + 1) // 2)
    y = _some("y", o.y, vectors, x[0])
    if len(x) + len(y) > INPUTS_MAX:
        raise VectorError(f"x and y: expected at most {INPUTS_MAX} vectors, got {len(x) + len(y)}")
    return _Step("gram", None, [*x, *y], count=len(x), answers=len(x) * len(y))


_UNDERSTAND = cast(
    "dict[type, Callable[[Any, Mapping[str, VectorPart]], _Step]]",
    {
        op.Fill: _fill, op.Copy: _copy, op.Scale: _scale, op.Axpy: _axpy, op.Combine: _combine, op.Random: _random,
        op.Map: _map, op.Zip: _zip, op.Apply: _apply, op.Put: _range, op.Add: _range, op.AddAt: _add_at, op.AddRows: _add_rows,
        op.Dot: _dot, op.Sum: _reduction("sum"), op.Norm2: _reduction("dot"), op.Min: _reduction("min"),
        op.Max: _reduction("max"), op.Gram: _gram,
    },
)  # fmt: skip
