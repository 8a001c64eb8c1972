"""Batches of operations on server-side vectors: what a program notes, and what it finds out.

Checks names, numbers and shapes while the batch is written, before anything is sent. Must not know shards or messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from psd.contract.arguments import refuse, whole_number
from psd.contract.errors import InvalidRequest
from psd.contract.vectors import ListedFunction, Operation, check_alike, check_function, is_custom
from psd_client.vector_arguments import as_indices, as_number, as_row_numbers, as_stretch, as_values
from psd_core import vector_operations as words
from psd_core.reductions import Answer as Found
from psd_core.vector import VectorSpec


class Calls(Protocol):
    """The part of a connection that vectors need: VectorCalls, of a worker; a reader's only pulls."""

    def run(self, operations: list[Operation], vectors: Mapping[str, VectorSpec]) -> list[Found]:
        """Have all shards run a batch on these vectors; what its reductions have found in all shards together, in order."""

    def drop(self, spec: VectorSpec) -> None:
        """Remove a vector."""

    def pull(self, spec: VectorSpec, first: int, last: int) -> NDArray[Any]:
        """Elements of a range."""

    def pull_at(self, spec: VectorSpec, indices: NDArray[np.int64], *, of_rows: bool) -> NDArray[Any]:
        """Elements at indices (n,), or rows of a matrix by number, end to end."""


class VectorHandle:
    """The name of a vector of a connection.

    Attributes:
        name, size, dtype: as declared. dtype is a string.
        spec, calls: what psd has of it; not for programs.
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
        """Take a description of the operation, and what makes its value of what is found; not for programs."""
        self._what = what
        self._take = take
        self._value: Any = None

    @property
    def value(self) -> Any:
        """A float; an int for argmax, and of int64 vectors for all but norm2; an array (n, m) for gram.

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


class Batch:
    """Operations that travel together, made by `ParameterServer.batch`: one round trip per shard, and only scalars come back.

    ::

        with ps.batch() as b:
            b.axpy(y, 0.5, x)
            d = b.dot(x, y)        # sees the y that the axpy has made
        print(float(d))

    The methods are those of Vector, with the vector that they are called on as the first argument. They only take notes; the
    batch runs at the end of the `with` block, in order, as one transaction on each shard: all of it or nothing, once, and seen
    whole by others. If the block raises, nothing runs. Arrays that are given must not be changed before it has run.

    Raises:
        InvalidRequest: at the end of the block, as all of these: it has more operations or bytes than the shards take, or they
            refuse one; nothing was changed.
        UnknownVector: a vector was dropped.
        ShardUnavailable, SessionFenced, ShardRestarted, RolledBack: as `ParameterServer.push`. The same batch may be run again,
            with `run`, and counts once; another batch that follows a failure first completes the one that failed.
    """

    def __init__(self, calls: Calls) -> None:
        """Take the connection; not for programs."""
        self._calls = calls
        self._operations: list[Operation] = []
        self._vectors: dict[str, VectorSpec] = {}
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
        """Run the batch, unless it has run: for use without `with`, or after an error. An empty one does nothing."""
        if not self._has_run and self._operations:
            found = iter(self._calls.run(self._operations, self._vectors))
            for answer in self._answers:
                answer.resolve(found)
        self._has_run = True

    # -- what changes vectors: y is the one that is written --------------------------------------------------------------

    def fill(self, y: VectorHandle, value: float) -> None:
        """Set all elements of y to one value."""
        self._note("fill", words.Fill(_name(y), as_number("value", value, y.spec)), y)

    def copy(self, y: VectorHandle, x: VectorHandle) -> None:
        """Copy: y = x."""
        self._note("copy", words.Copy(_name(y), _name(x)), y, x)

    def scale(self, y: VectorHandle, alpha: float) -> None:
        """Multiply: y = alpha * y."""
        self._note("scale", words.Scale(_name(y), as_number("alpha", alpha, y.spec)), y)

    def axpy(self, y: VectorHandle, alpha: float, x: VectorHandle) -> None:
        """Add: y = y + alpha * x."""
        self._note("axpy", words.Axpy(_name(y), as_number("alpha", alpha, y.spec), _name(x)), y, x)

    def combine(self, y: VectorHandle, coefficients: Sequence[float], vectors: Sequence[VectorHandle]) -> None:
        """Sum: y = coefficients[0] * vectors[0] + coefficients[1] * vectors[1] + ..., from left to right, in one pass.

        y may be among the vectors.
        """
        if len(coefficients) != len(vectors) or not vectors:
            raise InvalidRequest(f"coefficients: expected one for each of {len(vectors)} vectors, got {len(coefficients)}")
        numbers = [as_number(f"coefficients[{place}]", value, y.spec) for place, value in enumerate(coefficients)]
        self._note("combine", words.Combine(_name(y), numbers, [_name(x) for x in vectors]), y, *vectors)

    def random(self, y: VectorHandle, seed: int, low: float = 0, high: float = 1) -> None:
        """Fill y with random numbers from `low` to below `high`; see Vector.random."""
        name, numbers = _name(y), (as_number("low", low, y.spec), as_number("high", high, y.spec))
        if not numbers[0] < numbers[1]:
            raise InvalidRequest(f"high: must be above low, {low}, got {high}")
        if not 0 <= whole_number(InvalidRequest, "seed", seed) < 1 << 64:
            raise InvalidRequest(f"seed: must be from 0 to 2**64 - 1, got {seed}")
        self._note("random", words.Random(name, int(seed), *numbers), y)

    def map(self, y: VectorHandle, name: str, *arguments: float, of: VectorHandle | None = None) -> None:
        """Apply a function to each element: y = f(y), or y = f(of); see Vector.map."""
        self._apply("map", y, name, [y if of is None else of], arguments)

    def zip(self, y: VectorHandle, name: str, x: VectorHandle, *arguments: float, of: VectorHandle | None = None) -> None:
        """Combine two vectors, element by element: y = f(y, x), or y = f(of, x); see Vector.zip."""
        self._apply("zip", y, name, [y if of is None else of, x], arguments)

    def put(self, y: VectorHandle, values: Any, start: int | None = None) -> None:
        """Set all elements of y, or those from `start` on, to an array's; see Vector.put."""
        name = _name(y)
        self._note("put", words.Put(name, *as_stretch(values, start, y.spec)), y)

    def add(self, y: VectorHandle, values: Any, indices: Any = None) -> None:
        """Add an array's numbers to y, to all elements or to those at indices; see Vector.add."""
        name = _name(y)
        if indices is None:
            self._note("add", words.Add(name, *as_stretch(values, None, y.spec)), y)
        else:
            places = as_indices(indices, y.spec)
            self._note("add", words.AddAt(name, places.reshape(-1), as_values(values, places.shape, y.spec).reshape(-1)), y)

    def add_rows(self, y: VectorHandle, values: Any, rows: Any) -> None:
        """Add an array's rows to rows of y; see Matrix.add_rows."""
        name, numbers, columns = _name(y), as_row_numbers(rows, y.spec), y.spec.columns
        array = as_values(values, (*numbers.shape, columns), y.spec).reshape(-1, columns)
        self._note("add_rows", words.AddRows(name, numbers.reshape(-1), array), y)

    # -- what finds something out about vectors --------------------------------------------------------------------------

    def dot(self, y: VectorHandle, x: VectorHandle) -> BatchAnswer:
        """Take the sum of products of x and y."""
        return self._reduce("dot", words.Dot(_name(y), _name(x)), _sum(y), y, x)

    def gram(self, ys: Sequence[VectorHandle], xs: Sequence[VectorHandle] | None = None) -> BatchAnswer:
        """Take all dot products of several vectors, in one pass: an array of `ys[i].dot(xs[j])`, or of `ys[i].dot(ys[j])`.

        Of int64 vectors it has Python's whole numbers (dtype object) if one of them does not fit int64.
        """
        if not ys or (xs is not None and not xs):
            raise InvalidRequest("gram: expected at least one vector, got none")
        others = [] if xs is None else [_name(x) for x in xs]
        operation = words.Gram([_name(y) for y in ys], others)
        return self._reduce("gram", operation, partial(_products, len(ys), len(others), _sum(ys[0])), *ys, *(xs or ()))

    def norm2(self, y: VectorHandle) -> BatchAnswer:
        """Take the Euclidean norm, the root of the sum of squares."""
        return self._reduce("norm2", words.Norm2(_name(y)), lambda found: next(found).root(), y)

    def sum(self, y: VectorHandle) -> BatchAnswer:
        """Take the sum of the elements."""
        return self._reduce("sum", words.Sum(_name(y)), _sum(y), y)

    def min(self, y: VectorHandle) -> BatchAnswer:
        """Take the smallest element; NaN if there is one."""
        return self._reduce("min", words.Min(_name(y)), lambda found: next(found).value, y)

    def max(self, y: VectorHandle) -> BatchAnswer:
        """Take the largest element; NaN if there is one."""
        return self._reduce("max", words.Max(_name(y)), lambda found: next(found).value, y)

    def argmax(self, y: VectorHandle) -> BatchAnswer:
        """Take the index of the largest element, the lowest of several, or of the first NaN."""
        return self._reduce("argmax", words.Max(_name(y)), lambda found: next(found).index, y)

    def _note(self, kind: str, operation: Operation, *vectors: VectorHandle) -> None:
        if self._has_run:
            raise RuntimeError(f"psd: {kind}: this batch has run already; make another one")
        for vector in vectors:
            if vector.calls is not self._calls:
                raise InvalidRequest(f"{kind}: vector {vector.name!r} belongs to another connection")
        check_alike(kind, [vector.spec for vector in vectors])
        self._operations.append(operation)
        self._vectors.update((vector.name, vector.spec) for vector in vectors)

    def _reduce(
        self, kind: str, operation: Operation, take: Callable[[Iterator[Any]], Any], *vectors: VectorHandle
    ) -> BatchAnswer:
        self._note(kind, operation, *vectors)
        self._answers.append(BatchAnswer(f"{kind}({', '.join(vector.name for vector in vectors)})", take))
        return self._answers[-1]

    def _apply(self, kind: str, y: VectorHandle, name: str, of: Sequence[VectorHandle], arguments: Sequence[float]) -> None:
        names = [_name(x) for x in of]
        check_function(kind, name, len(arguments), _spec(y).dtype)
        numbers = [as_number(f"arguments[{place}]", value, y.spec) for place, value in enumerate(arguments)]
        if is_custom(name):
            operation: Operation = ListedFunction(y.name, name, names, numbers)
        elif kind == "map":
            operation = words.Map(y.name, name, names[0], numbers)
        else:
            operation = words.Zip(y.name, name, names[0], names[1], numbers)
        self._note(kind, operation, y, *of)


def _spec(vector: VectorHandle) -> VectorSpec:
    """The declaration of what a program has passed as a vector. Raises InvalidRequest if it is none."""
    if not isinstance(vector, VectorHandle):
        refuse(InvalidRequest, "vector", "one of ParameterServer.vector or matrix", vector)
    return vector.spec


def _name(vector: VectorHandle) -> str:
    return _spec(vector).name


def _sum(y: VectorHandle) -> Callable[[Iterator[Any]], float]:
    """Function that makes a number of an exact sum: as it is for int64, else rounded once."""
    return (lambda found: next(found).whole()) if y.dtype == "int64" else (lambda found: next(found).round())


def _products(rows: int, cols: int, take: Callable[[Iterator[Any]], float], found: Iterator[Any]) -> NDArray[Any]:
    """The array of a gram: all pairs, or, without other vectors, those of the lower triangle.

    Whole numbers that int64 does not hold stay Python's: NumPy would round them where others are negative.
    """
    pairs = [[take(found) for _ in range(cols or row + 1)] for row in range(rows)]
    if not cols:
        pairs = [[pairs[max(row, col)][min(row, col)] for col in range(rows)] for row in range(rows)]
    products = np.array(pairs, object)
    try:
        return products.astype(np.int64 if isinstance(pairs[0][0], int) else np.float64)
    except OverflowError:
        return products
