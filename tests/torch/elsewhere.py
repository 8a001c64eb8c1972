"""A device that is not the CPU, on machines that have none other.

No operation takes its tensors together with those of the CPU, except copies; behind each is a tensor of the CPU that has its
numbers. It is torch's device `lazy`, of which CPU builds have all but the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("lazy", 0)

_aten = torch.ops.aten
_COPIES = (_aten.copy_.default, _aten._to_copy.default, _aten._foreach_copy_.default)
_FACTORIES = (_aten.empty.memory_format, _aten.empty_strided.default)


class Elsewhere(torch.Tensor):
    """A tensor on the device. `behind`: what holds its numbers."""

    behind: torch.Tensor

    @staticmethod
    def __new__(cls, behind: torch.Tensor) -> Elsewhere:
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(
            cls,
            behind.shape,
            strides=behind.stride(),
            storage_offset=behind.storage_offset(),
            dtype=behind.dtype,
            device=DEVICE,
        )
        made.behind = behind
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operation, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.behind.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.behind.untyped_storage()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {DEVICE} device type tensor to numpy")


def _run(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on what is behind its arguments."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    here = [tensor for tensor in tensors if not isinstance(tensor, Elsewhere)]
    if operation not in _COPIES and any(tensor.dim() for tensor in here):
        raise RuntimeError(f"Expected all tensors to be on the same device, but got {operation} of {DEVICE} and cpu")
    is_elsewhere = len(here) < len(tensors)
    if kwargs.get("device") is not None:
        is_elsewhere = torch.device(kwargs["device"]).type == DEVICE.type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    known = {id(tensor.behind if isinstance(tensor, Elsewhere) else tensor): tensor for tensor in tensors}

    def wrapped(result: Any) -> Any:
        """A result: an argument itself, which was changed in place, or a new one on the device."""
        if not isinstance(result, torch.Tensor):
            return result
        return known[id(result)] if id(result) in known else Elsewhere(result) if is_elsewhere else result

    args, kwargs = tree_map(lambda leaf: leaf.behind if isinstance(leaf, Elsewhere) else leaf, (args, kwargs))
    return tree_map(wrapped, operation(*args, **kwargs))


@contextmanager
def device() -> Iterator[torch.device]:
    """The device, while it is there."""
    library = torch.library.Library("aten", "IMPL")
    for factory in _FACTORIES:
        library.impl(factory, lambda *args, f=factory, **kwargs: _run(f, args, kwargs), "Lazy")
    try:
        yield DEVICE
    finally:
        library._destroy()
