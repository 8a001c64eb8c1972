"""Server-side vectors on the wire: their declarations as messages, and the limits of these.

Batches are in vector_batches.py, operations in psd_core/vector_operations.py. Must not know sessions, files or connections.
"""

from __future__ import annotations

from psd.contract.errors import InvalidRequest, SpecMismatch
from psd.contract.printable import is_printable, utf8_size
from psd.v1 import job_pb2, vectors_pb2
from psd_core.vector import VectorSpec
from psd_core.vector_operations import NAME_BYTES_MAX, SIZE_MAX

VECTORS_OF_BATCH_MAX = 512
"""Limit of the vectors that one batch names."""

FETCH_BYTES_MAX = 64 << 20
"""Limit of one Fetch's answer, unless that is one row: the shard copies it while it holds the lock of its vectors."""

_DTYPES = {
    "float64": job_pb2.DTYPE_FLOAT64,
    "float32": job_pb2.DTYPE_FLOAT32,
    "int64": job_pb2.DTYPE_INT64,
}
_DTYPE_NAMES = {number: name for name, number in _DTYPES.items()}


def check_spec(spec: VectorSpec) -> VectorSpec:
    """The declaration itself; InvalidRequest if no vector can have it."""
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
    """The declaration in a message; raises what `check_spec` raises."""
    dtype = _DTYPE_NAMES.get(message.dtype, f"number {message.dtype}")
    return check_spec(VectorSpec(message.name, message.size, dtype, message.columns))


def check_same(asked: VectorSpec, found: VectorSpec) -> None:
    """Raise SpecMismatch unless the vector that exists is declared as asked."""
    if asked != found:
        raise SpecMismatch(f"vector {asked.name!r} is {shown(found)}, not {shown(asked)}", vector=asked.name)


def shown(spec: VectorSpec) -> str:
    """Description of a vector, in words."""
    if spec.columns:
        return f"a matrix of {spec.size // spec.columns} x {spec.columns} {spec.dtype}"
    return f"a vector of {spec.size} {spec.dtype}"
