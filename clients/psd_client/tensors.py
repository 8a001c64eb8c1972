"""Copies between named NumPy arrays and flat buffers, for the dict face of the client.

Checks all names, shapes and dtypes before anything is written. Must not know shards, clocks or optimizers' arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.contract.arguments import refuse
from psd.contract.errors import InvalidTensor
from psd.contract.jobspec import DTYPES, TensorSpec
from psd_client.lanes.flat import FlatBuffers


def tensor_specs(params: Mapping[str, Any], groups: Mapping[str, int]) -> list[TensorSpec]:
    """Declarations of named arrays, in their order. groups: index of each array's group, by name."""
    check_params(params)
    specs = []
    for name, value in params.items():
        array = as_array(f"params[{name!r}]", value)
        if array.dtype.name not in DTYPES:
            raise InvalidTensor(f"params[{name!r}]: dtype must be one of {', '.join(DTYPES)}, got {array.dtype}")
        specs.append(TensorSpec(name, array.shape, array.dtype.name, groups[name]))
    return specs


def check_params(params: Any) -> None:
    """Raise InvalidTensor unless this is a mapping whose keys are strings."""
    check_named("params", params)
    for name in params:
        if not isinstance(name, str):
            raise InvalidTensor(f"params: names must be strings, got {name!r}")


def check_named(what: str, values: Any) -> None:
    """Raise InvalidTensor unless this is a mapping. what: name of the argument, for the message."""
    if not isinstance(values, (dict, Mapping)):  # which finds a dict ten times as fast
        refuse(InvalidTensor, what, 'arrays by name, such as {"w": array}', values)


def as_array(what: str, value: Any, dtype: Any = None) -> NDArray[Any]:
    """Convert a value to an array, or raise InvalidTensor. dtype: for values without one. what: name, for messages."""
    if value is None or isinstance(value, (dict, Mapping)):
        refuse(InvalidTensor, what, "an array", value)
    if isinstance(value, np.ma.MaskedArray):
        raise InvalidTensor(f"{what}: is a masked array, whose masked elements would count; fill them, by .filled(0) say")
    try:
        return np.asarray(value, None if hasattr(value, "dtype") else dtype)
    except (TypeError, ValueError, RuntimeError) as error:  # lists of different lengths; a tensor of torch that requires grad
        raise InvalidTensor(f"{what}: NumPy makes no array of it: {error}") from None


def fill(params: Mapping[str, Any]) -> Callable[[FlatBuffers], None]:
    """A function that writes named arrays, in their order, into buffers."""

    def initial(buffers: FlatBuffers) -> None:
        for view, value in zip(buffers.views, params.values(), strict=True):
            view[...] = value

    return initial


def check_gradient(what: str, spec: TensorSpec, declared: np.dtype[Any], gradient: Any) -> None:
    """Raise InvalidTensor unless a gradient has the tensor's shape and a dtype that converts to the declared one without loss.
    what: name of the argument, for messages."""
    shape, dtype = tuple(gradient.shape), gradient.dtype
    if shape != spec.shape:
        raise InvalidTensor(f"{what}[{spec.name!r}]: shape must be {spec.shape}, got {shape}")
    if dtype != declared and (dtype.kind != "f" or not np.can_cast(dtype, declared, "safe")):
        raise InvalidTensor(f"{what}[{spec.name!r}]: dtype must be {spec.dtype}, got {dtype}; convert it with .astype()")


def write_gradient(view: NDArray[Any], gradient: NDArray[Any]) -> None:
    """Write a checked gradient into its view of the buffers; of bfloat16, its bits as uint16."""
    if view.dtype == np.uint16:
        view[...] = gradient.astype(gradient.dtype.newbyteorder("="), copy=False).view(np.uint16)
    else:
        view[...] = gradient


class NamedTensors:
    """The tensors of a declared job by name.

    Args:
        dtypes: dtypes of the declared arrays; `results` returns arrays of these.
        copy: False: `results` lends the buffers' memory where it has the declared dtype.
    """

    def __init__(self, specs: Sequence[TensorSpec], dtypes: Sequence[np.dtype[Any]], *, copy: bool = True) -> None:
        self._specs = specs
        self._dtypes = dtypes
        self._copy = copy
        self._has_half = np.dtype(np.float16) in dtypes
        self._index = {spec.name: index for index, spec in enumerate(specs)}

    def write_gradients(self, grads: Mapping[str, Any], buffers: FlatBuffers) -> NDArray[np.bool_] | None:
        """Write gradients into the buffers; return which tensors have one, or None if all have.

        Raises:
            InvalidTensor: an unknown name, a wrong shape or a wrong dtype; the buffers are unchanged.
        """
        check_named("grads", grads)
        arrays: dict[int, NDArray[Any]] = {}
        for name, value in grads.items():
            index = self._find(name)
            arrays[index] = _checked(self._specs[index], self._dtypes[index], value)
        for index, array in arrays.items():
            write_gradient(buffers.views[index], array)
        if len(arrays) == len(self._specs):
            return None
        present = np.zeros(len(self._specs), dtype=np.bool_)
        present[list(arrays)] = True
        return present

    def whole(self, params: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Check that all tensors are given; return them in the order of the declaration.

        Raises:
            InvalidTensor: a tensor is missing, unknown, or has another shape.
        """
        check_named("params", params)
        found = {}
        for spec, dtype in zip(self._specs, self._dtypes, strict=True):
            if spec.name not in params:
                raise InvalidTensor(f"params[{spec.name!r}]: is missing; all that were declared are set")
            array = found[spec.name] = as_array(f"params[{spec.name!r}]", params[spec.name], dtype)
            if array.shape != spec.shape:
                raise InvalidTensor(f"params[{spec.name!r}]: shape must be {spec.shape}, got {array.shape}")
        for name in params:
            self._find(name, "params")
        return found

    def _find(self, name: str, what: str = "grads") -> int:
        index = self._index.get(name)
        if index is None:
            known = ", ".join(list(self._index)[:8]) + (", ..." if len(self._index) > 8 else "")
            raise InvalidTensor(f"{what}: no parameter {name!r} was declared; there are {known or 'none'}")
        return index

    def results(self, buffers: FlatBuffers, lent: Sequence[NDArray[Any] | None] | None) -> dict[str, NDArray[Any]]:
        """The buffers' contents in the declared dtypes: lent arrays, new arrays, or read-only views.

        lent: the array lent for each tensor; None: not lent; None for all of it: none is.
        """
        named = zip(self._specs, self._dtypes, buffers.views, lent or [None] * len(self._specs), strict=True)
        if not self._has_half:
            return {spec.name: self._result(view, dtype, own) for spec, dtype, view, own in named}
        with np.errstate(over="ignore"):  # a float32 master beyond float16's range becomes infinity, as in any cast
            return {spec.name: self._result(view, dtype, own) for spec, dtype, view, own in named}

    def _result(self, view: NDArray[Any], dtype: np.dtype[Any], lent: NDArray[Any] | None) -> NDArray[Any]:
        if lent is not None and lent.dtype == dtype:
            return lent
        if self._copy or view.dtype != dtype:
            copied: NDArray[Any] = view.astype(dtype)
            return copied
        read_only: NDArray[Any] = view.view()
        read_only.flags.writeable = False
        return read_only


def _checked(spec: TensorSpec, declared: np.dtype[Any], value: Any) -> NDArray[Any]:
    array = (
        _of_number(spec, declared, value)
        if isinstance(value, (int, float))
        else as_array(f"grads[{spec.name!r}]", value, declared)
    )
    check_gradient("grads", spec, declared, array)
    return array


def _of_number(spec: TensorSpec, declared: np.dtype[Any], value: float) -> NDArray[Any]:
    """The array of a Python number, in the declared dtype."""
    try:
        with np.errstate(over="ignore"):
            array = np.asarray(float(value), declared)
        is_beyond = math.isfinite(value) and not np.isfinite(array)
    except OverflowError:
        is_beyond = True
    if is_beyond:
        raise InvalidTensor(f"grads[{spec.name!r}]: {value} is beyond the range of {spec.dtype}")
    return array
