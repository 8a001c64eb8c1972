"""Batches of operations on server-side vectors as messages: written for each shard by the client, and read by the shard.

The numbers that an operation brings are its part of the *payload*, in arrays that each begin at a multiple of 8 bytes: values,
or indices and values. A client sends a shard only what that shard has. Must not know sessions, stores or connections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import InvalidRequest
from psd.contract.vectors import NUMBERS_MAX, OPERANDS_MAX, ListedFunction, Operation, check_alike, check_function, spec_message
from psd.v1 import vectors_pb2
from psd_core import vector_operations as words
from psd_core.vector import VectorSpec
from psd_core.vector_operations import extent

_ALIGNMENT = 8

_OPERATORS: dict[type, int] = {
    words.Fill: vectors_pb2.VECTOR_OPERATOR_FILL,
    words.Copy: vectors_pb2.VECTOR_OPERATOR_COPY,
    words.Scale: vectors_pb2.VECTOR_OPERATOR_SCALE,
    words.Axpy: vectors_pb2.VECTOR_OPERATOR_AXPY,
    words.Combine: vectors_pb2.VECTOR_OPERATOR_COMBINE,
    words.Random: vectors_pb2.VECTOR_OPERATOR_RANDOM,
    words.Map: vectors_pb2.VECTOR_OPERATOR_MAP,
    words.Zip: vectors_pb2.VECTOR_OPERATOR_ZIP,
    ListedFunction: vectors_pb2.VECTOR_OPERATOR_CUSTOM,
    words.Put: vectors_pb2.VECTOR_OPERATOR_PUT,
    words.Add: vectors_pb2.VECTOR_OPERATOR_ADD,
    words.AddAt: vectors_pb2.VECTOR_OPERATOR_ADD_AT,
    words.AddRows: vectors_pb2.VECTOR_OPERATOR_ADD_ROWS,
    words.Dot: vectors_pb2.VECTOR_OPERATOR_DOT,
    words.Sum: vectors_pb2.VECTOR_OPERATOR_SUM,
    words.Norm2: vectors_pb2.VECTOR_OPERATOR_NORM2,
    words.Min: vectors_pb2.VECTOR_OPERATOR_MIN,
    words.Max: vectors_pb2.VECTOR_OPERATOR_MAX,
    words.Gram: vectors_pb2.VECTOR_OPERATOR_GRAM,
}
_KINDS = {number: kind for kind, number in _OPERATORS.items()}
_READ_ONLY = (words.Dot, words.Sum, words.Norm2, words.Min, words.Max, words.Gram)
_ONE_OPERAND = (words.Copy, words.Axpy, words.Map, words.Sum, words.Norm2, words.Min, words.Max)
_WITH_PAYLOAD = (words.Put, words.Add, words.AddAt, words.AddRows)
_NUMBERS = {words.Fill: 1, words.Scale: 1, words.Axpy: 1, words.Random: 2}

Pieces = list[NDArray[Any]]


class OutgoingBatch:
    """A batch as it is sent.

    Args:
        vectors: the declarations of all vectors that the operations name.
    """

    def __init__(self, operations: Sequence[Operation], vectors: Mapping[str, VectorSpec]) -> None:
        self._operations = operations
        self._specs = vectors
        self._places = {name: place for place, name in enumerate(vectors)}
        self._message = vectors_pb2.VectorBatch(vectors=[spec_message(spec) for spec in vectors.values()])
        for operation in operations:
            self._add(operation)
        self._brings = [place for place, operation in enumerate(operations) if isinstance(operation, _WITH_PAYLOAD)]

    def at(self, shard: int, shards: int) -> tuple[vectors_pb2.VectorBatch, Pieces]:
        """The message for one shard, without a payload, and the pieces of that."""
        message, pieces = vectors_pb2.VectorBatch(), Pieces()
        message.CopyFrom(self._message)
        for place in self._brings:
            operation: Any = self._operations[place]
            spec, entry = self._specs[operation.out], message.operations[place]
            first, last = extent(spec.size, shard, shards)
            if isinstance(operation, (words.Put, words.Add)):
                low, high = max(first, operation.start), min(last, operation.start + len(operation.values))
                entry.start, entry.count = low, max(0, high - low)
                pieces.append(operation.values[low - operation.start : low - operation.start + entry.count])
                continue
            places, length = (operation.rows, spec.columns) if isinstance(operation, words.AddRows) else (operation.indices, 1)
            is_here = (places * length < last) & ((places + 1) * length > first)
            whole = bool(is_here.all())
            pieces.append(places if whole else places[is_here])
            pieces.append((operation.values if whole else operation.values[is_here]).reshape(-1))
            entry.count = len(pieces[-2])
        return message, pieces

    def _add(self, operation: Operation) -> None:
        has: Any = operation
        entry = self._message.operations.add(operator=_OPERATORS[type(operation)])
        x = getattr(operation, "x", ())
        names = [x] if isinstance(x, str) else list(x)
        if isinstance(operation, (words.Zip, words.Dot)):
            names.append(operation.y)
        entry.x.extend(self._places[name] for name in names)
        if isinstance(operation, words.Gram):
            entry.y.extend(self._places[name] for name in operation.y)
        if not isinstance(operation, _READ_ONLY):
            entry.out = self._places[has.out]
        numbers: Sequence[float] = ()
        if isinstance(operation, words.Fill):
            numbers = (operation.value,)
        elif isinstance(operation, (words.Scale, words.Axpy)):
            numbers = (operation.a,)
        elif isinstance(operation, words.Combine):
            numbers = operation.a
        elif isinstance(operation, words.Random):
            numbers, entry.seed = (operation.low, operation.high), operation.seed
        elif isinstance(operation, (words.Map, words.Zip, ListedFunction)):
            numbers, entry.function = operation.arguments, operation.function
        if numbers:
            is_whole = self._specs[has.out].dtype == "int64"
            field: Any = entry.wholes if is_whole else entry.numbers
            field.extend(numbers)


def payload_bytes(pieces: Sequence[NDArray[Any]]) -> int:
    """Bytes of the payload that these pieces make."""
    return sum(piece.nbytes + _padding(piece.nbytes) for piece in pieces)


def payload_parts(pieces: Sequence[NDArray[Any]]) -> Iterator[memoryview]:
    """The payload, piece by piece, with what lies between."""
    for piece in pieces:
        yield np.ascontiguousarray(piece).data.cast("B")
        if _padding(piece.nbytes):
            yield memoryview(bytes(_padding(piece.nbytes)))


def _padding(nbytes: int) -> int:
    return -nbytes % _ALIGNMENT


class IncomingBatch:
    """Reads a batch on a shard, operation by operation, checking all that needs no vector's values.

    Args:
        specs: the declarations of `message.vectors`, in order, which the caller has checked.
        functions: the users' that are listed, by import path.
    """

    def __init__(
        self,
        message: vectors_pb2.VectorBatch,
        payload: memoryview,
        specs: Sequence[VectorSpec],
        functions: Mapping[str, Callable[..., Any]],
    ) -> None:
        self._message = message
        self._payload = payload
        self._specs = specs
        self._functions = functions
        self._at = 0

    def operations(self) -> list[words.Operation]:
        """The operations.

        Raises:
            InvalidRequest: one of them is wrong; the message says which, and how.
        """
        found: list[words.Operation] = []
        for place, entry in enumerate(self._message.operations):
            kind: Any = _KINDS.get(entry.operator)
            if kind is None:
                raise InvalidRequest(f"operations[{place}].operator: {entry.operator} is none")
            try:
                found.append(self._operation(kind, entry))
            except InvalidRequest as error:
                raise type(error)(f"operations[{place}], {kind.__name__.lower()}: {error}", **error.detail) from None
        if self._at != len(self._payload):
            raise InvalidRequest(f"payload: has {len(self._payload)} bytes, but the operations bring {self._at}")
        return found

    def _operation(self, kind: Any, entry: vectors_pb2.VectorOperation) -> Any:
        x, y = self._named("x", entry.x), self._named("y", entry.y)
        expected = 1 if kind in _ONE_OPERAND else 2 if kind in (words.Zip, words.Dot) else None
        if expected is not None and len(x) != expected:
            raise InvalidRequest(f"x: expected {expected} vectors, got {len(x)}")
        if kind in (words.Combine, ListedFunction, words.Gram) and not x:
            raise InvalidRequest("x: expected at least one vector, got none")
        if kind in _READ_ONLY:
            check_alike("x", [*x, *y])
            if kind is words.Dot:
                return words.Dot(x[0].name, x[1].name)
            if kind is words.Gram:
                return words.Gram([spec.name for spec in x], [spec.name for spec in y])
            return kind(x[0].name)
        (out,) = self._named("out", [entry.out])
        check_alike("x", [out, *x])
        names = [spec.name for spec in x]
        if kind in _WITH_PAYLOAD:
            return self._with_payload(kind, entry, out)
        if kind is words.Copy:
            return words.Copy(out.name, names[0])
        if len(entry.wholes) + len(entry.numbers) > NUMBERS_MAX:
            raise InvalidRequest(f"numbers: {len(entry.wholes) + len(entry.numbers)} are above the limit of {NUMBERS_MAX}")
        numbers: Sequence[float] = list(entry.wholes) if out.dtype == "int64" else list(entry.numbers)
        count = len(x) if kind is words.Combine else _NUMBERS.get(kind, len(numbers))
        if len(numbers) != count:
            field = "wholes" if out.dtype == "int64" else "numbers"
            raise InvalidRequest(f"{field}: expected {count}, got {len(numbers)}")
        if kind is words.Fill or kind is words.Scale:
            return kind(out.name, numbers[0])
        if kind is words.Axpy:
            return words.Axpy(out.name, numbers[0], names[0])
        if kind is words.Combine:
            return words.Combine(out.name, numbers, names)
        if kind is words.Random:
            if not numbers[0] < numbers[1]:
                raise InvalidRequest(f"numbers: expected low below high, got {numbers[0]} and {numbers[1]}")
            return words.Random(out.name, entry.seed, *numbers)
        check_function("map" if kind is words.Map else "zip", entry.function, len(numbers), out.dtype)
        if kind is ListedFunction:
            return words.Apply(out.name, self._function(entry.function, numbers), names)
        return kind(out.name, entry.function, *names, numbers)

    def _function(self, path: str, arguments: Sequence[float]) -> Callable[..., Any]:
        function = self._functions.get(path)
        if function is None:
            listed = ", ".join(self._functions) or "none"
            raise InvalidRequest(f"function: {path[:256]!r} is not allowed on this shard; psd-server --rule lists {listed}")
        found = function
        return (lambda *pieces: found(*pieces, *arguments)) if arguments else found

    def _with_payload(self, kind: Any, entry: vectors_pb2.VectorOperation, out: VectorSpec) -> Any:
        count = entry.count
        if kind is words.Put or kind is words.Add:
            if entry.start + count > out.size:
                raise InvalidRequest(f"start: {entry.start} + {count} elements end beyond {out.name!r}, which has {out.size}")
            return kind(out.name, entry.start, self._take(count, out.dtype))
        columns = 1
        if kind is words.AddRows:
            columns = out.columns
            if not columns:
                raise InvalidRequest(f"out: {out.name!r} is a vector, which has no rows")
        places = self._take(count, "int64")
        check_places(places, out.size // columns, out.name)
        values = self._take(count * columns, out.dtype)
        if kind is words.AddRows:
            return words.AddRows(out.name, places, values.reshape(count, columns))
        return words.AddAt(out.name, places, values)

    def _take(self, count: int, dtype: str) -> NDArray[Any]:
        """The next array of the payload."""
        nbytes = count * np.dtype(dtype).itemsize
        if nbytes > len(self._payload) - self._at:
            raise InvalidRequest(f"payload: has {len(self._payload)} bytes, but the operations bring more")
        piece = self._payload[self._at : self._at + nbytes]
        self._at = min(self._at + nbytes + _padding(nbytes), len(self._payload))
        array: NDArray[Any] = np.frombuffer(piece, dtype)
        return array if array.flags.aligned else array.copy()

    def _named(self, field: str, places: Sequence[int]) -> list[VectorSpec]:
        if len(places) > OPERANDS_MAX:
            raise InvalidRequest(f"{field}: names {len(places)} vectors, the limit is {OPERANDS_MAX}")
        for place in places:
            if place >= len(self._specs):
                raise InvalidRequest(f"{field}: {place} is not below the number of `vectors`, {len(self._specs)}")
        return [self._specs[place] for place in places]


def check_places(places: NDArray[np.int64], limit: int, name: str) -> None:
    """Raise InvalidRequest unless indices, or numbers of rows, lie in a vector."""
    if places.size:
        least, greatest = int(places.min()), int(places.max())
        if least < 0 or greatest >= limit:
            wrong = least if least < 0 else greatest
            raise InvalidRequest(f"indices: {wrong} is out of range: {name!r} has 0 to {limit - 1}")
