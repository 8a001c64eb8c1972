"""The operations of a batch on server-side vectors, and the part of a vector that a shard has.

Owns the words in which a batch is said. Every operation names vectors that exist, all of one size and one dtype. Operations
take place in their order: each sees what those before it have written. Must not know where vectors lie, nor who sends a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from numpy.typing import NDArray

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


class Fill(NamedTuple):
    """out = value."""

    out: str
    value: float


class Copy(NamedTuple):
    """out = x."""

    out: str
    x: str


class Scale(NamedTuple):
    """out = a * out."""

    out: str
    a: float


class Axpy(NamedTuple):
    """out = out + a * x; the product is rounded, then the sum."""

    out: str
    a: float
    x: str


class Combine(NamedTuple):
    """out = a[0] * x[0] + a[1] * x[1] + ..., from left to right, in one pass; out may be among x."""

    out: str
    a: Sequence[float]
    x: Sequence[str]


class Random(NamedTuple):
    """out = numbers from low to below high, evenly; whole ones for int64. A function of seed and index alone."""

    out: str
    seed: int
    low: float = 0.0
    high: float = 1.0


class Map(NamedTuple):
    """out = function(x), elementwise; one of MAP_FUNCTIONS, with its arguments."""

    out: str
    function: str
    x: str
    arguments: Sequence[float] = ()


class Zip(NamedTuple):
    """out = function(x, y), elementwise; one of ZIP_FUNCTIONS, with its arguments."""

    out: str
    function: str
    x: str
    y: str
    arguments: Sequence[float] = ()


class Apply(NamedTuple):
    """out = function(block of x[0], block of x[1], ...), for each stripe.

    The function gets read-only arrays of one stripe, and returns an array of that length, or what broadcasts to it, of the
    dtype, or of what NumPy casts to it safely. What it raises comes out of `run`, and nothing has changed.
    """

    out: str
    function: Callable[..., Any]
    x: Sequence[str]


class Put(NamedTuple):
    """out[start : start + len(values)] = values. The store takes the elements that it has."""

    out: str
    start: int
    values: NDArray[Any]


class Add(NamedTuple):
    """out[start : start + len(values)] += values, likewise."""

    out: str
    start: int
    values: NDArray[Any]


class AddAt(NamedTuple):
    """out[index] += value, for each; an index may come several times. (n,) int64|uint64, and (n,) values."""

    out: str
    indices: NDArray[Any]
    values: NDArray[Any]


class AddRows(NamedTuple):
    """Row of a matrix += row of values, for each; a row may come several times. (n,) int64|uint64, and (n, columns) values."""

    out: str
    rows: NDArray[Any]
    values: NDArray[Any]


class Dot(NamedTuple):
    """Answer an ExactSum of x * y."""

    x: str
    y: str


class Sum(NamedTuple):
    """Answer an ExactSum of x."""

    x: str


class Norm2(NamedTuple):
    """Answer an ExactSum of the squares of x; the norm is its `root`."""

    x: str


class Min(NamedTuple):
    """Answer the Extreme: the least element and the first index that has it. NaN, if there is one, wins."""

    x: str


class Max(NamedTuple):
    """Answer the Extreme: the greatest element and the first index that has it. NaN, if there is one, wins."""

    x: str


class Gram(NamedTuple):
    """Answer an ExactSum for each pair, row by row: x[i] * y[j]; without y, x[i] * x[j] for j <= i. Each is that of `Dot`."""

    x: Sequence[str]
    y: Sequence[str] = ()


Operation: TypeAlias = (
    Fill | Copy | Scale | Axpy | Combine | Random | Map | Zip | Apply | Put | Add | AddAt | AddRows
    | Dot | Sum | Norm2 | Min | Max | Gram
)  # fmt: skip
