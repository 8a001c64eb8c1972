"""The gradient of an embedding's handle: a number, the norm of the rows' gradients, that knows what may be done to it.

What multiplies it is done to the rows, too. What is no multiplication, such as clamp_, sign_ or added noise, would change the
rows in another way than a gradient of torch's own embedding, and a norm of another kind than 2 is not that of the rows; both
are refused by name. Must not know rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from typing_extensions import override

from psd.contract.errors import InvalidRequest
from psd_client.torch.uncompiled import uncompiled

_SCALES = {
    "mul",
    "multiply",
    "div",
    "divide",
    "true_divide",
    "imul",
    "itruediv",
    "truediv",
    "rmul",
    "foreach_mul",
    "foreach_div",
}
_SCALES |= {"zero", "foreach_zero", "amp_foreach_non_finite_check_and_unscale"}
"""Names of functions, without underscores around them, that multiply: by a number, by 0, or by a loss scale's inverse."""

_HARMLESS = {"detach", "requires_grad", "share_memory"}
"""Names of functions with an underscore at the end that change no number."""

_NORMS = {"norm", "vector_norm", "linalg_norm", "linalg_vector_norm", "foreach_norm"}
_TWO = (None, 2, 2.0, "fro")


class RowsNorm(torch.Tensor):
    """The norm of the gradients of an embedding's rows.

    Attributes:
        is_value: what it is if nothing but what is allowed was done to it; a list, shared by all tensors of its memory.
        table: name of the table, for errors.
    """

    is_value: list[float]
    table: str

    @classmethod
    def of(cls, number: torch.Tensor, table: str) -> torch.Tensor:
        """The norm `number`, in that memory. As it is, if it is of another subclass already: nothing is refused then."""
        if type(number) is not torch.Tensor:
            return number
        return cls._sharing(number, [number.item()], table)

    @classmethod
    def _sharing(cls, number: torch.Tensor, is_value: list[float], table: str) -> RowsNorm:
        norm: RowsNorm = number.as_subclass(cls)
        norm.is_value, norm.table = is_value, table
        return norm

    @torch.no_grad()
    def set(self, number: torch.Tensor) -> None:
        """Be another number from now on, in the same memory."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's own way
            self.copy_(number)
            self.is_value[0] = self.item()

    @classmethod
    @uncompiled
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch that was given one of these."""
        del types
        kwargs = kwargs or {}
        name = func.__name__
        plain = name.strip("_")
        changed = list(_norms(args[0] if args else ())) if _is_in_place(name) else []
        changed += _norms(kwargs.get("out", ()))
        for norm in changed:
            if plain not in _SCALES | _HARMLESS:
                raise InvalidRequest(
                    f"embedding {norm.table!r}: {name}: its rows are on the shards, and the gradient in the model is the "
                    "norm of theirs, which can only be multiplied (clip_grad_norm_, a GradScaler, mul_, zero_grad); leave it "
                    "out of what is done to each element, or use clip_norm= of distribute()"
                )
        if plain in _NORMS:
            for norm in _norms(args):
                kind = args[1] if len(args) > 1 else kwargs.get("p", kwargs.get("ord"))
                if kind not in _TWO:
                    raise InvalidRequest(
                        f"embedding {norm.table!r}: {name}: its rows are on the shards, and the gradient in the model is their "
                        f"norm of kind 2; that of kind {kind} is not known here"
                    )
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's own way
            result = func(*args, **kwargs)
            for norm in changed:
                norm.is_value[0] = norm.item()
        if isinstance(result, torch.Tensor) and not isinstance(result, cls) and args and isinstance(args[0], cls):
            return cls._related(args[0], result, is_scaled=plain in _SCALES)
        return result

    @classmethod
    def _related(cls, norm: RowsNorm, result: torch.Tensor, *, is_scaled: bool) -> torch.Tensor:
        """The result of a function of a norm: the same number in the same memory, a multiple, or something else."""
        if result.shape != norm.shape or result.dtype != norm.dtype:
            return result
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's own way
            if result.data_ptr() == norm.data_ptr():
                return cls._sharing(result, norm.is_value, norm.table)
        return cls.of(result, norm.table) if is_scaled else result


def _is_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in _AUGMENTED


_AUGMENTED = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__")


def _norms(values: Any) -> Iterator[RowsNorm]:
    """The norms among some arguments, and in lists of them."""
    if isinstance(values, RowsNorm):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _norms(value)
