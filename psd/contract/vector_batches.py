"""Batches of operations on server-side vectors as messages: written for each shard by the client, and read by the shard.

An operation's numbers are its part of the *payload*, in arrays that each begin at a multiple of 8 bytes: values, or places and
values. A client sends a shard only the numbers for its own elements. psd_core decides which operations are valid. Must not know
sessions, stores or connections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import InvalidRequest
from psd.contract.vectors import spec_message
from psd.v1 import vectors_pb2
from psd_core.vector import VectorError, VectorSpec
from psd_core.vector_checks import check_operands
from psd_core.vector_operations import KINDS, OperationKind, VectorOperation, extent

_ALIGNMENT = 8
_BY_NUMBER = {kind.number: kind for kind in KINDS.values()}

Pieces = list[NDArray[Any]]


class OutgoingBatch:
    """A batch as it is sent.

    Args:
        vectors: the declarations of all vectors that the operations name.
    """

    def __init__(self, operations: Sequence[VectorOperation], vectors: Mapping[str, VectorSpec]) -> None:
        self._operations = operations
        self._specs = vectors
        self._places = {name: place for place, name in enumerate(vectors)}
        self._message = vectors_pb2.VectorBatch(vectors=[spec_message(spec) for spec in vectors.values()])
        for operation in operations:
            self._add(operation, KINDS[operation.name])
        self._brings = [place for place, operation in enumerate(operations) if KINDS[operation.name].brings]

    def at(self, shard: int, shards: int) -> tuple[vectors_pb2.VectorBatch, Pieces]:
        """The message for one shard without its payload, and the pieces of the payload."""
        message, pieces = vectors_pb2.VectorBatch(), Pieces()
        message.CopyFrom(self._message)
        for place in self._brings:
            operation = self._operations[place]
            spec, entry = self._specs[operation.out], message.operations[place]
            entry.start, entry.count, mine = _part(operation, spec, *extent(spec.size, shard, shards))
            pieces += mine
        return message, pieces

    def _add(self, operation: VectorOperation, kind: OperationKind) -> None:
        entry = self._message.operations.add(
            operator=kind.number,
            x=[self._places[name] for name in operation.x],
            y=[self._places[name] for name in operation.y],
            function=operation.function,
            seed=operation.seed,
        )
        if kind.writes:
            entry.out = self._places[operation.out]
            numbers: Any = entry.wholes if self._specs[operation.out].dtype == "int64" else entry.numbers
            numbers.extend(operation.numbers)


def _part(operation: VectorOperation, spec: VectorSpec, first: int, last: int) -> tuple[int, int, Pieces]:
    """The part of an operation's numbers for a shard with these elements: where it starts, how many there are, and arrays."""
    values: Any = operation.values
    places = operation.places
    if places is None:
        low, high = max(first, operation.start), min(last, operation.start + len(values))
        count = max(0, high - low)
        return low, count, [values[low - operation.start : low - operation.start + count]]
    width = spec.columns if values.ndim == 2 else 1
    is_here = (places * width < last) & ((places + 1) * width > first)
    if not is_here.all():
        places, values = places[is_here], values[is_here]
    return 0, len(places), [places, values.reshape(-1)]


def payload_bytes(pieces: Sequence[NDArray[Any]]) -> int:
    """Bytes of the payload made of these pieces."""
    return sum(piece.nbytes + _padding(piece.nbytes) for piece in pieces)


def payload_parts(pieces: Sequence[NDArray[Any]]) -> Iterator[memoryview]:
    """The payload, piece by piece, with the padding after each."""
    for piece in pieces:
        yield np.ascontiguousarray(piece).data.cast("B")
        if _padding(piece.nbytes):
            yield memoryview(bytes(_padding(piece.nbytes)))


def _padding(nbytes: int) -> int:
    return -nbytes % _ALIGNMENT


class IncomingBatch:
    """Reads a batch on a shard, operation by operation, as far as a message can be wrong; the store checks the rest.

    Args:
        specs: the declarations of `message.vectors`, in order, which the caller has checked.
        functions: the users' listed functions, by import path.
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

    def operations(self) -> list[VectorOperation]:
        """The operations.

        Raises:
            InvalidRequest: one of them is wrong; the message says which, and how.
        """
        found = []
        for place, entry in enumerate(self._message.operations):
            kind = _BY_NUMBER.get(entry.operator)
            if kind is None:
                raise InvalidRequest(f"operations[{place}].operator: {entry.operator} is none")
            try:
                found.append(self._operation(kind, entry))
            except (InvalidRequest, VectorError) as error:
                raise InvalidRequest(f"operations[{place}], {kind.name}: {error}") from None
        if self._at != len(self._payload):
            raise InvalidRequest(f"payload: has {len(self._payload)} bytes, but the operations bring {self._at}")
        return found

    def _operation(self, kind: OperationKind, entry: vectors_pb2.VectorOperation) -> VectorOperation:
        x, y = self._named("x", entry.x), self._named("y", entry.y)
        if not kind.writes:
            return VectorOperation(kind.name, "", x, y)
        (out,) = self._named("out", [entry.out])
        spec = self._specs[entry.out]
        if kind.brings:
            return self._with_arrays(VectorOperation(kind.name, out, x, y), kind.brings, spec, entry)
        function = self._function(entry.function) if kind.name == "custom" else entry.function
        numbers = entry.wholes if spec.dtype == "int64" else entry.numbers
        return VectorOperation(kind.name, out, x, y, list(numbers), function, entry.seed)

    def _function(self, path: str) -> Callable[..., Any]:
        function = self._functions.get(path)
        if function is None:
            listed = ", ".join(self._functions) or "none"
            raise InvalidRequest(f"function: {path[:256]!r} is not allowed on this shard; psd-server --rule lists {listed}")
        return function

    def _with_arrays(
        self, operation: VectorOperation, brings: str, out: VectorSpec, entry: vectors_pb2.VectorOperation
    ) -> VectorOperation:
        if brings == "range":
            return operation._replace(start=entry.start, values=self._take(entry.count, out.dtype))
        places = self._take(entry.count, "int64")
        if brings == "indices":
            return operation._replace(places=places, values=self._take(entry.count, out.dtype))
        columns = out.columns or 1  # 0 for a vector, which the store refuses
        values = self._take(entry.count * columns, out.dtype)
        return operation._replace(places=places, values=values.reshape(entry.count, columns))

    def _take(self, count: int, dtype: str) -> NDArray[Any]:
        """The next array of the payload."""
        nbytes = count * np.dtype(dtype).itemsize
        if nbytes > len(self._payload) - self._at:
            raise InvalidRequest(f"payload: has {len(self._payload)} bytes, but the operations bring more")
        piece = self._payload[self._at : self._at + nbytes]
        self._at = min(self._at + nbytes + _padding(nbytes), len(self._payload))
        array: NDArray[Any] = np.frombuffer(piece, dtype)
        return array if array.flags.aligned else array.copy()

    def _named(self, field: str, places: Sequence[int]) -> list[str]:
        if not places:
            return []
        check_operands(field, len(places))
        if max(places) >= len(self._specs):
            raise InvalidRequest(f"{field}: {max(places)} is not below the number of `vectors`, {len(self._specs)}")
        return [self._specs[place].name for place in places]
