"""Server-side vectors on the wire: declarations and batches as messages, and what may be in them.

Both sides say operations in the words of psd_core/vector_operations.py. Owns their message form, how a batch is cut for a
shard, and the checks that need no vectors' values. Must not know sessions, files or connections.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from psd.contract.config import is_rule_path
from psd.contract.errors import InvalidRequest, SpecMismatch
from psd.contract.printable import is_printable, utf8_size
from psd.v1 import job_pb2, vectors_pb2
from psd_core import vector_operations as words
from psd_core.vector import VectorSpec
from psd_core.vector_operations import NAME_BYTES_MAX, SIZE_MAX


class ListedFunction(NamedTuple):
    """out = function(piece of x[0], ..., *arguments), by a user's function that the operator of the shards has allowed."""

    out: str
    function: str
    x: Sequence[str]
    arguments: Sequence[float] = ()


Operation: TypeAlias = words.Operation | ListedFunction

OPERANDS_MAX = 64
"""Limit of the vectors that one operation reads, on each side of a gram."""

VECTORS_OF_BATCH_MAX = 512
"""Limit of the vectors that one batch names."""

FETCH_BYTES_MAX = 64 << 20
"""Limit of what one Fetch answers, unless that is one row: the shard copies it, under the lock of its vectors."""

NUMBERS_MAX = 64
"""Limit of the numbers of one operation."""

_DTYPES = {
    "float64": job_pb2.DTYPE_FLOAT64,
    "float32": job_pb2.DTYPE_FLOAT32,
    "int64": job_pb2.DTYPE_INT64,
}
_DTYPE_NAMES = {number: name for name, number in _DTYPES.items()}


def check_spec(spec: VectorSpec) -> VectorSpec:
    """The declaration; raises InvalidRequest if there can be no such vector."""
    name_bytes = utf8_size(spec.name)
    if not 1 <= name_bytes <= NAME_BYTES_MAX:
        raise InvalidRequest(f"vector.name: must have 1 to {NAME_BYTES_MAX} bytes, got {name_bytes}: {spec.name[:40]!r}")
    if not is_printable(spec.name):
        raise InvalidRequest(f"vector.name: {spec.name!r} has control characters")
    where = f"vector {spec.name!r}"
    if not 1 <= spec.size <= SIZE_MAX:
        raise InvalidRequest(f"{where}: size: must be 1 to {SIZE_MAX}, got {spec.size}")
    if spec.dtype not in _DTYPES:
        raise InvalidRequest(f"{where}: dtype: must be one of {', '.join(_DTYPES)}, got {spec.dtype!r}")
    if spec.columns and (spec.columns < 0 or spec.size % spec.columns):
        raise InvalidRequest(f"{where}: columns: {spec.columns} does not divide the size, {spec.size}")
    return spec


def spec_message(spec: VectorSpec) -> vectors_pb2.VectorSpec:
    """The protobuf form of a declaration."""
    return vectors_pb2.VectorSpec(name=spec.name, size=spec.size, dtype=_DTYPES[spec.dtype], columns=spec.columns)


def spec_of(message: vectors_pb2.VectorSpec) -> VectorSpec:
    """The declaration of a message; raises what `check_spec` does."""
    dtype = _DTYPE_NAMES.get(message.dtype, f"number {message.dtype}")
    return check_spec(VectorSpec(message.name, message.size, dtype, message.columns))


def check_same(asked: VectorSpec, found: VectorSpec) -> None:
    """Raise SpecMismatch unless a vector is the one that was asked for."""
    if asked != found:
        raise SpecMismatch(f"vector {asked.name!r} is {shown(found)}, not {shown(asked)}", vector=asked.name)


def shown(spec: VectorSpec) -> str:
    """Description of a vector, in words."""
    if spec.columns:
        return f"a matrix of {spec.size // spec.columns} x {spec.columns} {spec.dtype}"
    return f"a vector of {spec.size} {spec.dtype}"


def is_custom(function: str) -> bool:
    """True for the import path of a user's function, which no built-in one looks like."""
    return isinstance(function, str) and ":" in function


def check_function(kind: str, function: str, arguments: int, dtype: str) -> None:
    """Raise InvalidRequest unless a function of that name may be asked for, with so many arguments, for vectors of a dtype.

    kind: "map" or "zip".
    """
    if not isinstance(function, str):
        raise InvalidRequest(f"{kind}: expected the name of a function, got {function!r}")
    if is_custom(function):
        if not is_rule_path(function):
            raise InvalidRequest(f"{kind}: expected an import path, such as my_module:my_function, got {function[:80]!r}")
        return
    known = words.MAP_FUNCTIONS if kind == "map" else words.ZIP_FUNCTIONS
    if function not in known:
        raise InvalidRequest(f"{kind}: no function {function[:80]!r}; there are {', '.join(known)}, and import paths")
    if arguments != len(known[function]):
        expected = ", ".join(known[function]) or "none"
        raise InvalidRequest(f"{kind}: {function} takes the arguments: {expected}; got {arguments}")
    if dtype == "int64" and function in words.NOT_FOR_WHOLE:
        raise InvalidRequest(f"{kind}: {function} is not for int64")


def check_alike(kind: str, specs: Sequence[VectorSpec]) -> None:
    """Raise InvalidRequest unless these vectors have one size and one dtype."""
    first = specs[0]
    for spec in specs[1:]:
        if (spec.size, spec.dtype) != (first.size, first.dtype):
            raise InvalidRequest(
                f"{kind}: {first.name!r} has {first.size} {first.dtype}, and {spec.name!r} {spec.size} {spec.dtype}; they must "
                "have the same size and dtype"
            )
