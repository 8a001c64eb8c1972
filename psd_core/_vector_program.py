"""Batches as the bytes that C runs: the operands of every operation, and the part of each argument that a store has.

Owns the layout of the record, which csrc/vector.h has in C. Must not open, map or lock anything.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psd_core._vector_format import VectorError, VectorPart
from psd_core._vector_rows import ANY, OperationKind
from psd_core.vector_checks import checked
from psd_core.vector_operations import DTYPES, KINDS, OPERATIONS_MAX, STRIPE, VectorOperation

ANSWERS_MAX = 1024
"""Scalars that one batch may answer."""
OPERANDS_MAX = 512
"""Vectors that one batch may name."""

_NONE = 0xFFFFFFFF
# check, head, size, content, commit, kind; slot, session, sequence; groups, operands, ops, inputs, answers
_RECORD = struct.Struct("=14Q")
_GROUP = struct.Struct("=7Q")
_OPERAND = struct.Struct("=II")
_OP = {kind: struct.Struct(f"=8I5Q2{kind}") for kind in "dq"}
_ALIGN = 64


@dataclass
class _Step:
    """One operation, understood. Arrays are of the part that is here."""

    code: int
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


def compiled(
    operations: Sequence[VectorOperation], vectors: Mapping[str, VectorPart], claim: Sequence[int] = (0, 0, 0)
) -> Program:
    """The batch as C runs it. `claim`: slot, session and sequence number; session 0: nobody's.

    Raises:
        VectorError, NoSuchVector: naming the operation and its argument.
    """
    if len(operations) > OPERATIONS_MAX:
        raise VectorError(f"operations: at most {OPERATIONS_MAX} in a batch, got {len(operations)}")
    steps = []
    for number, operation in enumerate(operations):
        if not isinstance(operation, VectorOperation) or operation.name not in KINDS:
            raise VectorError(f"operations[{number}]: expected an operation on vectors, got {type(operation).__name__}")
        try:
            steps.append(_step_of(checked(operation, vectors), vectors))
        except VectorError as error:
            raise type(error)(f"operations[{number}], {operation.name}: {error}") from None
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
                step.code, DTYPES.index(dtype), step.function, _NONE if step.out is None else numbers[step.out.number],
                first_input, len(step.inputs), first_answers[number], step.answers,
                step.start, step.count, step.width, *offsets, *step.numbers,
            )
        )  # fmt: skip
        first_input += len(step.inputs)
    record = _RECORD.pack(0, head_bytes, at, 0, 0, 0, *claim, len(groups), operands, len(steps), len(inputs), answers)
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
    head = bytearray(_RECORD.pack(0, _RECORD.size, size, 0, 0, 1, *claim, 0, 0, 0, 0, 0))
    return Program(head, size, [(_RECORD.size, np.frombuffer(text, np.uint8))], 0, True, 0)


def catalog_in(record: memoryview) -> bytes | None:
    """The text of the catalog, if that is what a record, which has been checked, is about."""
    fields = _RECORD.unpack_from(record)
    return bytes(record[_RECORD.size : fields[2]]) if fields[5] else None


def _step_of(o: VectorOperation, vectors: Mapping[str, VectorPart]) -> _Step:
    """The step of an operation that has been checked."""
    kind = KINDS[o.name]
    code, inputs = KINDS[kind.loop].number, [vectors[name] for name in (*o.x, *o.y)]
    if not kind.writes:
        left, right = (len(o.x), len(o.y)) if kind.x == ANY else (1, len(o.x) - 1)
        return _Step(code, None, inputs, count=left if right else 0, answers=left * right or left * (left + 1) // 2)
    out = vectors[o.out]
    if kind.brings:
        return (_range if kind.brings == "range" else _rows)(code, kind, o, out)
    if o.name == "custom":
        function: Any = o.function
        if not callable(function):
            raise VectorError(f"function: expected one that can be called, got {function!r}")
        if o.numbers:
            function = partial(_with_numbers, function, o.numbers)
        return _Step(code, out, inputs, start=out.begin, count=out.end - out.begin, user=function)
    if kind.x == ANY:
        return _Step(code, out, inputs, keys=np.array(o.numbers, out.spec.dtype))
    function = list(kind.functions).index(str(o.function)) if kind.functions else 0
    low, high = (*o.numbers, 0, 0)[:2]
    return _Step(code, out, [out, *inputs] if kind.reads_out else inputs, (low, high), function, o.seed)


def _with_numbers(function: Callable[..., Any], numbers: Sequence[float], *blocks: NDArray[Any]) -> Any:
    return function(*blocks, *numbers)


def _range(code: int, kind: OperationKind, o: VectorOperation, out: VectorPart) -> _Step:
    values: NDArray[Any] = o.values  # type: ignore[assignment]
    begin, end = max(o.start, out.begin), min(o.start + len(values), out.end)
    mine = values[begin - o.start : max(begin, end) - o.start]
    # Of a stripe that is written in part, the rest is read: so it is staged, and checked if the process dies meanwhile.
    is_whole = begin % STRIPE == 0 and (end % STRIPE == 0 or end == out.end)
    return _Step(code, out, (), start=begin, count=len(mine), values=mine, reads_out=kind.reads_out or not is_whole)


def _rows(code: int, kind: OperationKind, o: VectorOperation, out: VectorPart) -> _Step:
    """Rows that are here in part at least, sorted; those that come several times in the order in which they come."""
    rows: NDArray[np.int64] = o.places  # type: ignore[assignment]
    values: NDArray[Any] = o.values  # type: ignore[assignment]
    width = out.spec.columns if kind.brings == "rows" else 1
    first, last = out.begin // width, -(-out.end // width) if out.end > out.begin else 0
    if len(rows) and not (first <= int(rows.min()) and int(rows.max()) < last):
        here = (rows >= first) & (rows < last)
        rows, values = rows[here], values[here]
    if len(rows) > 1 and (rows[1:] < rows[:-1]).any():
        order = np.argsort(rows, kind="stable")
        rows, values = rows[order], values[order]
    return _Step(code, out, (), count=len(rows), width=width, values=values, keys=rows, reads_out=kind.reads_out)
