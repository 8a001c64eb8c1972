"""Named values of any framework, as a store takes them: what each is, and its copy into flat buffers.

NumPy's arrays, torch's tensors on any device, and what NumPy makes an array of. Values of bfloat16 are their bits. Must not
know shards, versions or who puts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import InvalidTensor
from psd.contract.jobspec import BUFFER_DTYPES, TensorSpec
from psd.contract.publications import META_TENSOR
from psd_client.tensors import as_array, check_named

BFLOAT16 = "bfloat16"


def published_specs(values: Mapping[str, Any], group: int, what: str) -> list[TensorSpec]:
    """Declarations of named values, in their order. what: name of the argument, for messages.

    Raises:
        InvalidTensor: a name is no string, or psd's own; or a value has a dtype that cannot be published, or no values.
    """
    check_named(what, values)
    if not values:
        raise InvalidTensor(f"{what}: is empty; there must be at least one tensor")
    specs = []
    for name, value in values.items():
        if not isinstance(name, str):
            raise InvalidTensor(f"{what}: names must be strings, got {name!r}")
        if name == META_TENSOR:
            raise InvalidTensor(f"{what}[{name!r}]: is psd's own name; choose another one")
        dtype, shape = kind_of(f"{what}[{name!r}]", value)
        specs.append(TensorSpec(name, shape, dtype, group))
    return specs


def kind_of(what: str, value: Any) -> tuple[str, tuple[int, ...]]:
    """Name of the dtype, and the shape, of a value; InvalidTensor if it cannot be published. what: name, for messages."""
    if is_of_torch(value):
        from psd_client.torch.values import dtype_of

        dtype, shape = dtype_of(value), tuple(value.shape)
    else:
        array = as_array(what, value)
        dtype, shape = array.dtype.name, array.shape
    if dtype not in BUFFER_DTYPES:
        raise InvalidTensor(f"{what}: dtype must be one of {', '.join(BUFFER_DTYPES)}, got {dtype}")
    return dtype, shape


def values_of(spec: TensorSpec, value: Any, what: str) -> NDArray[Any]:
    """The values of a declared tensor, in C order or not: of bfloat16 the bits, as uint16.

    Raises:
        InvalidTensor: it has another shape or dtype than was declared, or no values.
    """
    dtype, shape = kind_of(what, value)
    if shape != spec.shape:
        raise InvalidTensor(f"{what}: shape must be {spec.shape}, as declared, got {shape}")
    if dtype != spec.dtype:
        raise InvalidTensor(f"{what}: dtype must be {spec.dtype}, as declared, got {dtype}")
    if is_of_torch(value):
        from psd_client.torch.values import array_of, problem_of

        problem = problem_of(value)
        if problem is not None:
            raise InvalidTensor(f"{what}: {problem}")
        return array_of(value)
    array = as_array(what, value)
    if dtype == BFLOAT16:
        return np.ascontiguousarray(array).view(np.uint16).reshape(shape)
    return array


def is_of_torch(value: Any) -> bool:
    """True if this is a tensor of torch, which then has been imported."""
    return any(kind.__module__ == "torch" and kind.__name__ == "Tensor" for kind in type(value).__mro__)
