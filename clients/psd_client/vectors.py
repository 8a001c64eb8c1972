"""Server-side vectors and matrices: numbers that lie on the shards, and operations that the shards carry out on them.

    w = ps.vector("w", size=1_000_000)              # float64, zeros; the same on every worker
    g = ps.vector("g", size=1_000_000)
    g.put(gradient)                                 # an array travels
    w.axpy(-0.1, g)                                 # nothing travels but the order to do it
    with ps.batch() as b:                           # several operations, one round trip per shard
        b.axpy(w, -0.1, g)
        d = b.dot(w, g)
    print(float(d), w.pull(0, 10))

Each method is a batch of one operation (vector_batch.py). Must not know shards or messages.
"""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

from psd.contract.arguments import ByName, choice, whole_number, word
from psd.contract.errors import InvalidRequest, SpecMismatch, UnknownVector
from psd.contract.vectors import shown
from psd_client.vector_arguments import as_indices, as_row_numbers, stretch
from psd_client.vector_batch import Batch, BatchAnswer, Calls, VectorHandle
from psd_core.vector import VectorSpec
from psd_core.vector_operations import DTYPES, ROWS, SIZE_MAX, Operations, Row


class Vector(VectorHandle, Operations):
    """A vector on the shards: `size` numbers of one dtype, in stripes over all shards. Made by `ParameterServer.vector`.

    Each method makes one round trip to every shard; `ParameterServer.batch` sends many operations in one. Vectors in one
    operation must have the same size and dtype. NaN and infinity are allowed values. int64 elements wrap around, as NumPy's do,
    but sums and dot products of int64 vectors are exact, however large. float32 vectors are reduced in float64.

    Every operation counts once, even if it is retried or a shard is killed. Several workers may use one vector at once: on each
    shard an operation is seen whole or not at all, but the order of operations may differ from shard to shard, unless barriers
    fix it.

    Attributes:
        name, size, dtype: as declared. dtype is a string.
    """

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, size={self.size}, dtype={self.dtype!r})"

    def drop(self) -> None:
        """Remove the vector from the shards, for all workers. Later uses raise UnknownVector."""
        self.calls.drop(self.spec)

    # -- what is done with arrays; the methods for vectors and numbers are made of the rows below ------------------------

    def put(self, values: Any, start: int | None = None) -> None:
        """Set the elements, all or those from `start` on, to the values of an array.

        Args:
            values: an array of the vector's shape; with `start`, of as many elements as it sets. Converted to the vector's
                dtype.
        """
        _run("put", self, values, start)

    def add(self, values: Any, indices: Any = None) -> None:
        """Add numbers to all elements, or to those at indices.

        Args:
            values: an array of the vector's shape, or of the shape of `indices`; or one number for all. For int64, whole
                numbers.
            indices: whole numbers from 0 to size - 1, of any shape; a repeated index is added to each time. For a matrix also a
                pair (rows, cols), as in NumPy.
        """
        _run("add", self, values, indices)

    def pull(self, start: int | None = None, stop: int | None = None, *, indices: Any = None) -> NDArray[Any]:
        """Fetch elements: all, a range, or those at indices.

        Args:
            start, stop: the range, as in a NumPy slice; negative numbers count from the end.
            indices: as in `add`; instead of a range.

        Returns:
            A new array of the vector's dtype: the range, or an array of the shape of the indices. Each shard reads its part at
            one moment.
        """
        if indices is None:
            return self.calls.pull(self.spec, *stretch(start, stop, self.size))
        if start is not None or stop is not None:
            raise InvalidRequest("indices: are given, and a range, too; give one of them")
        places = as_indices(indices, self.spec)
        return self.calls.pull_at(self.spec, places.reshape(-1), of_rows=False).reshape(places.shape)


def _run(name: str, vector: Vector, *args: Any, **kwargs: Any) -> Any:
    """Run a batch of one operation, and return its answer."""
    batch = Batch(vector.calls)
    answer: BatchAnswer | None = getattr(batch, name)(vector, *args, **kwargs)
    batch.run()
    return None if answer is None else answer.value


def _method_of(row: Row[Any]) -> Any:
    """Make the method of Vector for a row of the table."""
    return row.as_method(Vector, lambda self, *args, **kwargs: _run(row.name, self, *args, **kwargs))


for _row in ROWS.values():
    setattr(Vector, _row.name, _method_of(_row))


class Matrix(Vector):
    """A vector with a row length: rows * cols numbers, row after row. Made by `ParameterServer.matrix`.

    All operations of Vector work on all of its elements.
    """

    @property
    def cols(self) -> int:
        """Length of a row."""
        return self.spec.columns

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.size // self.cols

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and length of each."""
        return self.rows, self.cols

    def pull(self, start: int | None = None, stop: int | None = None, *, indices: Any = None) -> NDArray[Any]:
        """Fetch the matrix, a range of its rows, or elements at indices.

        Args:
            start, stop: the range of rows, as in a NumPy slice.
            indices: as in `add`.

        Returns:
            A new array: `(rows, cols)`, or of the shape of the indices.
        """
        if indices is not None:
            return super().pull(start, stop, indices=indices)
        first, last = stretch(start, stop, self.rows)
        return super().pull(first * self.cols, last * self.cols).reshape(last - first, self.cols)

    def pull_rows(self, rows: Any) -> NDArray[Any]:
        """Fetch rows by number: a new array `(*rows.shape, cols)`. A repeated row is sent each time.

        Args:
            rows: whole numbers from 0 to rows - 1, of any shape.
        """
        numbers = as_row_numbers(rows, self.spec)
        return self.calls.pull_at(self.spec, numbers.reshape(-1), of_rows=True).reshape(*numbers.shape, self.cols)

    def add_rows(self, values: Any, rows: Any) -> None:
        """Add to rows by number.

        Args:
            values: `(*rows.shape, cols)`, or what broadcasts to it.
            rows: as in `pull_rows`; a repeated row is added to each time.
        """
        _run("add_rows", self, values, rows)


class MakingCalls(Calls, Protocol):
    """The calls of a connection that can also make and list vectors."""

    def make(self, spec: VectorSpec) -> None:
        """Make a vector, unless it exists."""

    def listed(self) -> list[VectorSpec]:
        """Declarations of all vectors of the job, by name."""


def as_vector(spec: VectorSpec, calls: Calls) -> Vector:
    """The Vector or Matrix for a declaration."""
    return Matrix(spec, calls) if spec.columns else Vector(spec, calls)


def by_name(calls: MakingCalls) -> dict[str, Vector]:
    """All vectors of the job, by name."""
    return ByName("vector", {spec.name: as_vector(spec, calls) for spec in calls.listed()})


def vector_of(calls: MakingCalls, name: Any, size: Any, dtype: Any) -> Vector:
    """Make or find a vector, as ParameterServer.vector describes."""
    word(InvalidRequest, "name", name)
    if size is None:
        return _found(calls, name)
    spec = VectorSpec(name, whole_number(InvalidRequest, "size", size), choice(InvalidRequest, "dtype", dtype, DTYPES))
    calls.make(spec)
    return Vector(spec, calls)


def matrix_of(calls: MakingCalls, name: Any, rows: Any, cols: Any, dtype: Any) -> Matrix:
    """Make or find a matrix, as ParameterServer.matrix describes."""
    word(InvalidRequest, "name", name)
    if rows is None or cols is None:
        if rows is not cols:
            raise InvalidRequest(f"rows, cols: expected both or neither, got {rows} and {cols}")
        found = _found(calls, name)
        if not isinstance(found, Matrix):
            raise SpecMismatch(f"vector {name!r} is {shown(found.spec)}, no matrix", vector=name)
        return found
    shape = [whole_number(InvalidRequest, what, value) for what, value in (("rows", rows), ("cols", cols))]
    if min(shape) < 1 or max(shape) > SIZE_MAX:
        raise InvalidRequest(f"rows, cols: must be 1 to {SIZE_MAX}, got {rows} and {cols}")
    spec = VectorSpec(name, shape[0] * shape[1], choice(InvalidRequest, "dtype", dtype, DTYPES), shape[1])
    calls.make(spec)
    return Matrix(spec, calls)


def _found(calls: MakingCalls, name: str) -> Vector:
    found = by_name(calls).get(name)
    if found is None:
        raise UnknownVector(f"name: there is no vector {name!r}, and no size is given to make one", vector=name)
    return found
