"""The tensors that a reader's pull fetches: all, some by name or pattern, or those for which the program gives arrays.

Finds the blocks that hold them, and hands the values over. Must not know connections or versions.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psd.contract.arguments import choice, refuse
from psd.contract.errors import InvalidRequest, InvalidTensor
from psd.contract.layout import Layout
from psd_client.lanes.flat import FlatBuffers

_CODECS = {"float32": "", "bfloat16": "bf16", "float16": "fp16"}


class WantedTensors:
    """The tensors of one pull.

    Args:
        names: names, or patterns as in fnmatch. out: arrays to fill, by name. Both None: all tensors.
        dtype: precision of those of float32, and the form in which they travel; None: all of it.

    Attributes:
        codec: as in ReadRequest.

    Raises:
        InvalidRequest: names and out are both given; or names is a string, or has none; or there is no such dtype.
    """

    def __init__(self, names: Sequence[str] | None, out: Mapping[str, NDArray[Any]] | None, dtype: str | None = None) -> None:
        if names is not None and out is not None:
            raise InvalidRequest("names: the arrays in `out` say already what is fetched")
        if isinstance(names, str) or (names is not None and not all(isinstance(name, str) for name in names)):
            refuse(InvalidRequest, "names", "a list of names or patterns", names)
        if out is not None and not isinstance(out, Mapping):
            refuse(InvalidRequest, "out", "a dict of arrays by name", out)
        self.codec = "" if dtype is None else _CODECS[choice(InvalidRequest, "dtype", dtype, _CODECS)]
        self._patterns = list(out) if out is not None else names
        self._out = out
        if self._patterns is not None and not self._patterns:
            raise InvalidRequest(f"{'names' if out is None else 'out'}: is empty, so there is nothing to fetch")

    def tensors(self, layout: Layout) -> list[int]:
        """Indices of the tensors in the job's spec, ascending.

        Raises:
            InvalidRequest: no tensor has such a name.
            InvalidTensor: an array in `out` has another shape or dtype than its tensor.
        """
        names = [tensor.name for tensor in layout.spec.tensors[: meta_of(layout)]]
        if self._patterns is None:
            return list(range(len(names)))
        found = matching(self._patterns, names, are_patterns=self._out is None)
        for index in found if self._out is not None else ():
            self._check(names[index], layout.spec.tensors[index].shape, _dtype_of(layout, index))
        return sorted(found)

    def _check(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        assert self._out is not None
        array = self._out[name]
        if not isinstance(array, np.ndarray):
            refuse(InvalidTensor, f"out[{name!r}]", "an array", array)
        if (array.shape, array.dtype) != (tuple(shape), dtype):
            raise InvalidTensor(f"out[{name!r}]: expected {dtype} of shape {tuple(shape)}, got {array.dtype} of {array.shape}")
        if not array.flags.writeable:
            raise InvalidTensor(f"out[{name!r}]: the array is read-only")

    def lent(self, tensors: Sequence[int]) -> Collection[int]:
        """Those that the program may get as they were received."""
        return frozenset(tensors) if self._out is None else ()

    def results(
        self, layout: Layout, tensors: Sequence[int], buffers: FlatBuffers, lent: Sequence[NDArray[Any] | None]
    ) -> dict[str, NDArray[Any]]:
        """The values of these tensors by name: in the arrays given, those that are lent, or in new ones.

        Args:
            lent: for each tensor of the job, what was received as the program's own; None: it is copied.
        """
        results: dict[str, NDArray[Any]] = {}
        for index in tensors:
            name, view = layout.spec.tensors[index].name, buffers.views[index]
            if self._out is None:
                own, dtype = lent[index], _dtype_of(layout, index)
                results[name] = own if own is not None and own.dtype == dtype else np.array(view, dtype)
            else:
                results[name] = self._out[name]
                np.copyto(results[name], view, casting="unsafe")  # only a bool's bytes are of another dtype
        return results


def meta_of(layout: Layout) -> int | None:
    """Index of the tensor with the meta, the last one; None if nothing is published."""
    return len(layout.spec.tensors) - 1 if layout.spec.is_publication else None


def matching(wanted: Sequence[str], names: Sequence[str], *, are_patterns: bool = True) -> set[int]:
    """Indices of the tensors that are wanted, by name or, if no tensor is called so, by pattern.

    Raises:
        InvalidRequest: no tensor has such a name.
    """
    found: set[int] = set()
    for pattern in wanted:
        matches = {index for index, name in enumerate(names) if name == pattern}
        if are_patterns:
            matches = matches or {index for index, name in enumerate(names) if fnmatchcase(name, pattern)}
        if not matches:
            field = "names" if are_patterns else "out"
            raise InvalidRequest(f"{field}: no tensor is called {pattern!r}; there are {reprlib.repr(names)}")
        found |= matches
    return found


class Nothing(WantedTensors):
    """All tensors, of which no arrays are made: the buffers are what is wanted."""

    def __init__(self) -> None:
        super().__init__(None, None)

    @override
    def results(
        self, layout: Layout, tensors: Sequence[int], buffers: FlatBuffers, lent: Sequence[NDArray[Any] | None]
    ) -> dict[str, NDArray[Any]]:
        return {}


def blocks_with(layout: Layout, tensors: Sequence[int]) -> set[int]:
    """Indices of the blocks that hold elements of these tensors."""
    wanted = set(tensors)
    return {block.index for block in layout.blocks if not wanted.isdisjoint(block.segment_tensors.tolist())}


def _dtype_of(layout: Layout, tensor: int) -> np.dtype[Any]:
    """The dtype of a tensor's values for the program: float32 for 16 bits."""
    spec = layout.spec.tensors[tensor]
    return np.dtype(np.bool_) if spec.dtype == "bool" else np.dtype(spec.master_dtype)
