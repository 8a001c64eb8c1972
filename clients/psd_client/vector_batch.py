"""Batches of operations on server-side vectors, and their answers.

Each operation is checked when it is added to the batch, before anything is sent (psd_core/vector_checks.py). Most methods of
Batch are made from the rows of psd_core/vector_operations.py. Must not know shards or messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from psd.contract.arguments import refuse
from psd.contract.config import is_rule_path
from psd.contract.errors import InvalidRequest
from psd_client.vector_arguments import as_indices, as_row_numbers, as_stretch, as_values
from psd_core.reductions import Answer as Found
from psd_core.vector import VectorError, VectorSpec
from psd_core.vector_checks import checked
from psd_core.vector_operations import ROWS, Notes, Operand, Operations, Row, VectorOperation


class Calls(Protocol):
    """The calls of a connection that vectors need. A worker has all of them (VectorCalls); a reader only pulls."""

    def run(self, operations: list[VectorOperation], vectors: Mapping[str, VectorSpec]) -> list[Found]:
        """Have all shards run a batch on these vectors; return the results of its reductions over all shards, in order."""

    def drop(self, spec: VectorSpec) -> None:
        """Remove a vector."""

    def pull(self, spec: VectorSpec, first: int, last: int) -> NDArray[Any]:
        """Elements of a range."""

    def pull_at(self, spec: VectorSpec, indices: NDArray[np.int64], *, of_rows: bool) -> NDArray[Any]:
        """Fetch the elements at indices (n,), or rows of a matrix by number, one after the other."""


class VectorHandle(Operand):
    """A reference to a vector, by its name.

    Attributes:
        name, size, dtype: as declared. dtype is a string.
        spec, calls: the declaration and the connection's calls; not for programs.
    """

    def __init__(self, spec: VectorSpec, calls: Calls) -> None:
        self.name = spec.name
        self.size = spec.size
        self.dtype = spec.dtype
        self.spec = spec
        self.calls = calls


class BatchAnswer:
    """The answer to one operation of a batch: `value`, `float(...)` or `int(...)`, once the batch has run."""

    def __init__(self, what: str, take: Callable[[Iterator[Any]], Any]) -> None:
        """Take the operation's description, and what makes its value from the shards' results; not for programs."""
        self._what = what
        self._take = take
        self._value: Any = None

    @property
    def value(self) -> Any:
        """The answer: a float; an int for argmax, and for int64 vectors with all operations but norm2; an array (n, m) for
        gram.

        Raises:
            RuntimeError: the batch has not run.
        """
        if self._value is None:
            raise RuntimeError(f"psd: {self._what}: has no value before its batch has run: use it after the `with` block")
        return self._value

    def resolve(self, found: Iterator[Any]) -> None:
        """Set the value; not for programs."""
        self._value = self._take(found)

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __repr__(self) -> str:
        return f"BatchAnswer({self._what}{'' if self._value is None else f' = {self._value!r}'})"


class Batch(Operations, Notes[BatchAnswer]):
    """Operations that are sent together: one round trip per shard, and only scalars come back. Made by `ParameterServer.batch`.

    ::

        with ps.batch() as b:
            b.axpy(y, 0.5, x)
            d = b.dot(x, y)        # sees the y that the axpy has made
        print(float(d))

    The methods are those of Vector, with the vector as the first argument. They only record the operations; the batch runs at
    the end of the `with` block. Each shard runs the operations in order, as one transaction: all or none of them, exactly once,
    and no other worker sees a part. If the block raises an error, nothing runs. Arrays that are passed must not be changed
    before the batch has run.

    All errors are raised at the end of the block.

    Raises:
        InvalidRequest: the batch has more operations or bytes than the shards accept, or they refuse an operation; nothing was
            changed.
        UnknownVector: a vector was dropped.
        ShardUnavailable, SessionFenced, ShardRestarted, RolledBack: as `ParameterServer.push`. The program may run the same
            batch again, with `run`; it counts once. If it runs another batch instead, the failed one is completed first.
    """

    def __init__(self, calls: Calls) -> None:
        """Take the connection; not for programs."""
        self._calls = calls
        self._operations: list[VectorOperation] = []
        self._handles: dict[str, VectorHandle] = {}
        self._answers: list[BatchAnswer] = []
        self._has_run = False

    def __len__(self) -> int:
        """Number of operations."""
        return len(self._operations)

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is None:
            self.run()

    def run(self) -> None:
        """Run the batch, unless it has run; for use without `with`, or after an error. An empty batch does nothing."""
        if not self._has_run and self._operations:
            named = (name for o in self._operations for name in (o.out, *o.x, *o.y) if name)
            vectors = {name: self._handles[name].spec for name in named}
            found = iter(self._calls.run(self._operations, vectors))
            for answer in self._answers:
                answer.resolve(found)
        self._has_run = True

    # -- the methods that are no rows ------------------------------------------------------------------------------------

    def put(self, y: VectorHandle, values: Any, start: int | None = None) -> None:
        """Set the elements of y, all or those from `start` on, to the values of an array; see Vector.put."""
        name = self._name(y)
        first, array = as_stretch(values, start, y.spec)
        self._note(VectorOperation("put", name, start=first, values=array))

    def add(self, y: VectorHandle, values: Any, indices: Any = None) -> None:
        """Add the values of an array to the elements of y, all or those at indices; see Vector.add."""
        name, spec = self._name(y), y.spec
        if indices is None:
            start, array = as_stretch(values, None, spec)
            self._note(VectorOperation("add", name, start=start, values=array))
        else:
            places = as_indices(indices, spec)
            array = as_values(values, places.shape, spec).reshape(-1)
            self._note(VectorOperation("add_at", name, places=places.reshape(-1), values=array))

    def add_rows(self, y: VectorHandle, values: Any, rows: Any) -> None:
        """Add an array's rows to rows of y; see Matrix.add_rows."""
        name, spec = self._name(y), y.spec
        numbers = as_row_numbers(rows, spec)
        array = as_values(values, (*numbers.shape, spec.columns), spec).reshape(-1, spec.columns)
        self._note(VectorOperation("add_rows", name, places=numbers.reshape(-1), values=array))

    def gram(self, ys: Sequence[VectorHandle], xs: Sequence[VectorHandle] | None = None) -> BatchAnswer:
        """Compute all dot products of several vectors in one pass: an array of `ys[i].dot(xs[j])`; without xs,
        `ys[i].dot(ys[j])`.

        For int64 vectors the array holds Python integers (dtype object) if one of the products does not fit int64.
        """
        if not ys or (xs is not None and not xs):
            raise InvalidRequest("gram: expected at least one vector, got none")
        rows, cols = list(map(self._name, ys)), list(map(self._name, xs or ()))
        is_whole = self._note(VectorOperation("gram", "", rows, cols)).dtype == "int64"
        return self._answer("gram", partial(_products, len(rows), len(cols), is_whole), *rows, *cols)

    # -- how it is done --------------------------------------------------------------------------------------------------

    def _name(self, vector: VectorHandle) -> str:
        """The name of a vector that a program has passed; raises InvalidRequest if this is not a vector of this connection."""
        if not isinstance(vector, VectorHandle):
            refuse(InvalidRequest, "vector", "one of ParameterServer.vector or matrix", vector)
        if vector.calls is not self._calls:
            raise InvalidRequest(f"vector {vector.name!r} belongs to another connection")
        self._handles[vector.name] = vector
        return vector.name

    def _note(self, operation: VectorOperation, name: str = "") -> VectorSpec:
        """Check and record an operation; return the declaration of its first vector. name: the method's, if different."""
        name = name or operation.name
        if self._has_run:
            raise RuntimeError(f"psd: {name}: this batch has run already; make another one")
        function = operation.function
        if isinstance(function, str) and ":" in function:
            if not is_rule_path(function):
                raise InvalidRequest(f"{name}: expected an import path, such as my_module:my_function, got {function[:80]!r}")
            operation = operation._replace(name="custom")
        try:
            self._operations.append(checked(operation, self._handles))
        except VectorError as error:
            raise InvalidRequest(f"{name}: {error}") from None
        return self._handles[operation.out or operation.x[0]].spec

    def _answer(self, name: str, take: Callable[[Iterator[Any]], Any], *vectors: str) -> BatchAnswer:
        self._answers.append(BatchAnswer(f"{name}({', '.join(vectors)})", take))
        return self._answers[-1]


def _method_of(row: Row[Any]) -> Any:
    """Make the method of Batch for a row of the table."""

    def method(self: Batch, y: VectorHandle, *args: Any, **kwargs: Any) -> BatchAnswer | None:
        operation = row.said(self._name, y, args, kwargs)
        spec = self._note(operation, row.name)
        if row.take is None:
            return None
        take, is_whole = row.take, spec.dtype == "int64"
        return self._answer(row.name, lambda found: take(next(found), is_whole), *operation.x)

    return row.as_method(Batch, method, "y", returns=None if row.take is None else "BatchAnswer")


for _row in ROWS.values():
    setattr(Batch, _row.name, _method_of(_row))


def _products(rows: int, cols: int, is_whole: bool, found: Iterator[Any]) -> NDArray[Any]:
    """The array of a gram's products; without `xs` it is symmetric, made from its lower triangle.

    Integers beyond int64 stay Python's: NumPy would round them if others are negative.
    """
    pairs = [[next(found).whole() if is_whole else next(found).round() for _ in range(cols or row + 1)] for row in range(rows)]
    if not cols:
        pairs = [[pairs[max(row, col)][min(row, col)] for col in range(rows)] for row in range(rows)]
    products = np.array(pairs, object)
    try:
        return products.astype(np.int64 if is_whole else np.float64)
    except OverflowError:
        return products
