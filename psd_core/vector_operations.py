"""The table of the operations on server-side vectors, a row each; their limits; and the part of a vector that a shard has.

What an operation takes, its number in messages and in C, how it is checked, and the method that programs call follow from its
row. To add one, write its row, the last in `Operations`, and its loop in csrc/vector_elementwise.h, or csrc/vector_dots.h.
Vectors of one operation have one size and one dtype. Operations take place in their order: each sees what those before it have
written. Must not know where vectors lie, nor who sends a batch. Imports the standard library alone, because setup.py loads it
before psd_core can be imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psd_core._vector_rows import ANY, Notes, Operand, OperationKind, Row, VectorOperation, change, reduction

__all__ = ["ANY", "KINDS", "ROWS", "OperationKind", "Notes", "Operand", "VectorOperation", "Operations", "Row"]

STRIPE = 4096
"""Elements of a stripe, whatever the dtype: what is cut, computed and summed as one."""
NAME_BYTES_MAX = 256
"""Largest number of bytes of a vector's name, in UTF-8."""
SIZE_MAX = 1 << 40
"""Largest number of elements of a vector."""
VECTORS_MAX = 1 << 14
"""Largest number of vectors in a store."""
OPERATIONS_MAX = 1 << 16
"""Largest number of operations in a batch."""
OPERANDS_MAX = 64
"""Largest number of vectors that one operation reads; of a gram: on each side."""
NUMBERS_MAX = 64
"""Largest number of numbers of one operation."""
DTYPES = ("float64", "float32", "int64")
"""The dtypes of vectors."""
MAP_FUNCTIONS = {
    "abs": (), "neg": (), "sign": (), "square": (), "clip": ("low", "high"),
    "sqrt": (), "exp": (), "log": (), "reciprocal": (), "soft_threshold": ("by",),
}  # fmt: skip
"""Functions of one number that are built in, with their arguments. See NOT_FOR_WHOLE."""
ZIP_FUNCTIONS = {
    "add": (), "sub": (), "mul": (), "min": (), "max": (),
    "div": (), "project": (), "orthant": (), "pseudo_gradient": ("l1",),
}  # fmt: skip
"""Functions of two numbers that are built in, with their arguments. See NOT_FOR_WHOLE.

project(x, y): x where it has the sign of y, else 0. orthant(x, g): the sign of x, or of -g where x is 0.
pseudo_gradient(x, g): the subgradient of f(x) + l1 * |x| of least length, where g is the gradient of f (Andrew and Gao 2007).
"""


NOT_FOR_WHOLE = frozenset(
    ("sqrt", "exp", "log", "reciprocal", "soft_threshold", "div", "project", "orthant", "pseudo_gradient")
)
"""Functions that vectors of int64 do not have."""


def extent(size: int, shard: int, shards: int) -> tuple[int, int]:
    """First element that a shard has of a vector, and the one after the last: whole stripes, but for the vector's last one."""
    stripes = -(-size // STRIPE)
    return min(shard * stripes // shards * STRIPE, size), min((shard + 1) * stripes // shards * STRIPE, size)


def _total(found: Any, is_whole: bool) -> float:
    total: float = found.whole() if is_whole else found.round()
    return total


def _root(found: Any, _: bool) -> float:
    root: float = found.root()
    return root


def _value(found: Any, _: bool) -> float:
    value: float = found.value
    return value


def _index(found: Any, _: bool) -> int:
    index: int = found.index
    return index


class Operations:
    """The operations on vectors and numbers: the vector that a method is called on is y. Rows only; nothing runs here."""

    @change(1)
    def fill(self, value: float) -> None:
        """Set all elements of y to one value."""

    @change(2)
    def copy(self, x: Operand) -> None:
        """Take the elements of x: y = x."""

    @change(3, reads_out=True)
    def scale(self, alpha: float) -> None:
        """Multiply all elements of y by alpha."""

    @change(4, reads_out=True)
    def axpy(self, alpha: float, x: Operand) -> None:
        """Add alpha times x: y = y + alpha * x; the product is rounded, then the sum."""

    @change(5)
    def combine(self, coefficients: Sequence[float], vectors: Sequence[Operand]) -> None:
        """Take a sum: y = coefficients[0] * vectors[0] + coefficients[1] * vectors[1] + ..., from left to right, in one pass.

        y may be among the vectors.
        """

    @change(6)
    def random(self, seed: int, low: float = 0, high: float = 1) -> None:
        """Fill y with random numbers, uniform from `low` to below `high`.

        An element is a function of the seed and its index alone: the same for any number of shards, and in every vector.

        Args:
            seed: from 0 to 2**64 - 1.
            low, high: whole numbers for int64.
        """

    @change(7, functions=MAP_FUNCTIONS)
    def map(self, name: str, *arguments: float, of: Operand | None = None) -> None:
        """Apply a function to each element: y = f(y), or y = f(of).

        Args:
            name: one that is built in (see docs/vectors.md), such as "sqrt" or "clip"; or the import path of your own,
                "my_module:function", which the operator must have allowed (`--rule`). Yours is called with a piece of the
                vector, a read-only array, and the arguments, and returns an array of that length and dtype.
            arguments: numbers that the function takes.
            of: the vector that it is applied to.
        """

    @change(8, functions=ZIP_FUNCTIONS)
    def zip(self, name: str, x: Operand, *arguments: float, of: Operand | None = None) -> None:
        """Combine two vectors, element by element: y = f(y, x), or y = f(of, x).

        Args:
            name: as in `map`, such as "mul" or "max"; your own function gets pieces of both vectors, and the arguments.
            arguments: numbers that the function takes.
            of: the first vector.
        """

    @reduction(14, _total)
    def dot(self, x: Operand) -> float:  # type: ignore[empty-body]
        """The sum of products of both vectors' elements; its bits do not depend on the number of shards."""

    @reduction(15, _total)
    def sum(self) -> float:  # type: ignore[empty-body]
        """The sum of the elements; its bits do not depend on the number of shards."""

    @reduction(16, _root)
    def norm2(self) -> float:  # type: ignore[empty-body]
        """The Euclidean norm, the root of the sum of squares."""

    @reduction(17, _value)
    def min(self) -> float:  # type: ignore[empty-body]
        """The smallest element; NaN if there is one."""

    @reduction(18, _value)
    def max(self) -> float:  # type: ignore[empty-body]
        """The largest element; NaN if there is one."""

    @reduction(18, _index, of="max")
    def argmax(self) -> int:  # type: ignore[empty-body]
        """The index of the largest element, the lowest of several, or of the first NaN."""


ROWS: dict[str, Row[Any]] = {name: row for name, row in vars(Operations).items() if isinstance(row, Row)}
"""The rows, by the names of their methods."""

_APART = (
    OperationKind("custom", 9, "custom", x=ANY),
    OperationKind("put", 10, "put", brings="range"),
    OperationKind("add", 11, "add", brings="range", reads_out=True),
    OperationKind("add_at", 12, "add_rows", brings="indices", reads_out=True),
    OperationKind("add_rows", 13, "add_rows", brings="rows", reads_out=True),
    OperationKind("gram", 19, "gram", x=ANY, y=ANY, writes=False),
)
"""Kinds that are no row: their methods are not only of vectors and numbers (psd_client/vector_batch.py).

custom: out = function(block of x[0], ..., *numbers), a user's, which gets read-only arrays of one stripe each, and returns an
array of that length, or what broadcasts to it, of the dtype, or of what NumPy casts to it safely. What it raises comes out of
`VectorStore.run`, and nothing has changed. put, add: out[start : start + len(values)] = or += values. add_at, add_rows:
out[place] += value, or row, for each; a place may come several times. gram: an ExactSum for each pair, row by row: x[i] * y[j];
without y, x[i] * x[j] for j <= i.
"""

KINDS = {kind.name: kind for kind in (*(row.kind for row in ROWS.values()), *_APART)}
"""All kinds of operations, by name."""
