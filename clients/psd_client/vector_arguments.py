"""Checks arrays, indices and ranges that programs pass to server-side vectors, and converts them to the form that is sent.

Each function returns the converted value, or raises InvalidRequest or InvalidTensor, which names the argument. Must not know
batches, shards or messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.contract.arguments import whole_number
from psd.contract.errors import InvalidRequest, InvalidTensor
from psd_client.tensors import as_array
from psd_core.vector import VectorError, VectorSpec
from psd_core.vector_checks import as_places, rows_of

_INT64 = np.iinfo(np.int64)


def as_values(values: Any, shape: tuple[int, ...], spec: VectorSpec) -> NDArray[Any]:
    """Numbers of this shape, or broadcast to it, in the vector's dtype."""
    array = _array("values", values, spec)
    try:
        return np.ascontiguousarray(np.broadcast_to(array, shape))
    except ValueError:
        raise InvalidTensor(f"values: shape must be {shape}, got {array.shape} (vector {spec.name!r})") from None


def as_stretch(values: Any, start: Any, spec: VectorSpec) -> tuple[int, NDArray[Any]]:
    """The first element to set, and the values in one dimension. Without `start` the array must cover all elements."""
    array = _array("values", values, spec)
    if start is None:
        shape = (spec.size // spec.columns, spec.columns) if spec.columns else (spec.size,)
        if array.shape not in (shape, (spec.size,)):
            raise InvalidTensor(f"values: shape must be {shape}, that of {spec.name!r}, got {array.shape}")
        return 0, np.ascontiguousarray(array).reshape(-1)
    return whole_number(InvalidRequest, "start", start), np.ascontiguousarray(array).reshape(-1)


def as_indices(indices: Any, spec: VectorSpec) -> NDArray[np.int64]:
    """Indices of elements, of any shape; for a matrix also given as a pair (rows, cols)."""
    if isinstance(indices, tuple):
        if not spec.columns or len(indices) != 2:
            raise InvalidRequest(f"indices: a pair (rows, cols) is for matrices; {spec.name!r} is none, or it is no pair")
        rows, cols = as_row_numbers(indices[0], spec), _within("cols", indices[1], spec.columns, spec)
        try:
            return rows * spec.columns + cols
        except ValueError:
            raise InvalidRequest(f"indices: rows {rows.shape} and cols {cols.shape} do not go together") from None
    return _within("indices", indices, spec.size, spec)


def as_row_numbers(rows: Any, spec: VectorSpec) -> NDArray[np.int64]:
    """Row numbers, in an array of any shape."""
    with _refused():
        limit = rows_of("rows", spec)
    return _within("rows", rows, limit, spec)


def stretch(start: Any, stop: Any, size: int) -> tuple[int, int]:
    """The first index of a range and the one after its last, as in a slice."""
    whole = [
        None if value is None else whole_number(InvalidRequest, name, value)
        for name, value in (("start", start), ("stop", stop))
    ]
    first, last, _ = slice(*whole).indices(size)
    return first, max(first, last)


def _array(name: str, values: Any, spec: VectorSpec) -> NDArray[Any]:
    array = as_array(name, values)
    kinds = "iu" if spec.dtype == "int64" else "iuf"
    if array.dtype.kind not in kinds and array.size:
        raise InvalidTensor(f"{name}: dtype {array.dtype} does not go into vector {spec.name!r}, which is {spec.dtype}")
    if array.dtype == np.uint64 and spec.dtype == "int64" and array.size and array.max() > _INT64.max:
        raise InvalidTensor(f"{name}: {array.max()} does not fit int64")
    return array.astype(spec.dtype, copy=False)


def _within(name: str, values: Any, limit: int, spec: VectorSpec) -> NDArray[np.int64]:
    with _refused():
        return as_places(name, as_array(name, values), limit, spec.name)


@contextmanager
def _refused() -> Iterator[None]:
    """Raise errors of psd_core's checks as the client's errors."""
    try:
        yield
    except VectorError as error:
        raise InvalidRequest(str(error)) from None
