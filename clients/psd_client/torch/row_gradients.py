"""The gradients of an embedding's rows, as back-propagation makes them; and the embedding's handle in the model.

The rows are on the shards, so the model has one parameter in their place, the handle: zeros, with a row for each of those that
have a gradient now. Its `.grad` is their gradient. So whatever is done to all gradients of a model is done to these, too. A few
rows more, of zeros, give the gradients of different ids different shapes: torch then refuses to add one to another, as programs
do that put gradients aside. Must not know shards, pulls or modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from psd.contract.errors import InvalidRequest
from psd_client.torch.uncompiled import uncompiled
from psd_core.distinct import distinct

Ids = NDArray[np.uint64]
Numbers = NDArray[np.float32]

REMEMBERED = 8
"""Latest gradients that must differ in shape if they differ in ids."""


class CollectedGradients:
    """The gradients of one embedding's rows since the last `zero_grad`, of each distinct id one; they lie in the handle's.

    Args:
        table: name of the table, for errors.
    """

    def __init__(self, table: str) -> None:
        self._table = table
        self._ids: dict[int, Ids] = {}  # of the latest gradients, by their number of rows
        self._zeros: int | None = None  # torch's count of changes of the gradient, if it was made of nothing but zeros

    def add(self, handle: torch.nn.Parameter, ids: Ids, gradients: Numbers) -> None:
        """Add gradients (k, dim) of distinct ids (k,), which may be kept and changed, to what is there."""
        before = self.take(handle)
        if before is not None:
            ids, gradients = summed([before, (ids, gradients)])
        more = self._rows_for(ids) - len(ids)
        values = torch.from_numpy(np.pad(gradients, ((0, more), (0, 0))) if more else gradients)
        handle.grad = None
        handle.data = handle.data.new_zeros(()).expand(values.shape)
        handle.grad = values.to(handle)
        self._zeros = None if _has_numbers(handle.grad) else handle.grad._version  # noqa: SLF001 - torch's own count

    def _rows_for(self, ids: Ids) -> int:
        """The number of rows of these ids' gradient; at least 2, since torch repeats a single row."""
        count = max(2, len(ids))
        while not np.array_equal(self._ids.get(count, ids), ids):
            count += 1
        self._ids.pop(count, None)
        self._ids[count] = ids
        if len(self._ids) > REMEMBERED:
            del self._ids[next(iter(self._ids))]
        return count

    def take(self, handle: torch.nn.Parameter) -> tuple[Ids, Numbers] | None:
        """The gradients, with whatever the program has done to the handle's; None if there are none.

        Raises:
            InvalidRequest: the handle has a gradient that no back-propagation has made.
        """
        found = handle.grad
        if found is not None and not _has_numbers(found) and found._version != self._zeros:  # noqa: SLF001
            found = None  # by zero_grad(set_to_none=False): rows without a gradient are not pushed at each step
        if found is None:
            return None
        ids = self._ids.get(len(found))
        if ids is None:
            self.refuse(
                "the gradient of its handle was set by the program, and belongs to no rows; what backward() has collected "
                "there may be changed, or set to None"
            )
        return ids, in_numpy(found.detach(), found.shape[1])[: len(ids)]

    def refuse(self, what: str) -> NoReturn:
        """Raise InvalidRequest for a back-propagation whose gradients cannot be those of rows."""
        raise InvalidRequest(f"embedding {self._table!r}: {what}")

    def refuse_others(self, gradient: torch.Tensor | None) -> None:
        """Raise InvalidRequest for a gradient of the handle's own, that is, of a loss that was computed with it."""
        if gradient is not None:
            self.refuse(
                "the loss was computed with its handle, as by a penalty over all parameters of the model; it is 0, and has "
                "nothing of the rows, which are on the shards: leave it out, and give weight_decay to the rows' optimizer"
            )


def _has_numbers(gradient: torch.Tensor) -> bool:
    """True if it has another number than 0; the first row mostly says so."""
    return bool(gradient[:1].any()) or bool(gradient.any())


def summed(parts: list[tuple[Ids, Numbers]]) -> tuple[Ids, Numbers]:
    """The sums of gradients of the same ids."""
    if len(parts) == 1:
        return parts[0]
    found = distinct(np.concatenate([ids for ids, _ in parts]))
    return found.ids, found.sum(np.concatenate([gradients for _, gradients in parts]))


class Tracked(torch.autograd.Function):
    """Rows that back-propagation gives gradients to.

    Args of `apply`: handle, whose requires_grad decides; rows, a tensor that is nobody else's, returned; kept; and sums, which
    makes ids and gradients of the rows' gradient. The rows come in a tuple, because what is an argument itself would come out
    as a view, which the program could not change in place.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any,
        handle: torch.nn.Parameter,
        rows: tuple[torch.Tensor],
        kept: CollectedGradients,
        sums: Callable[[torch.Tensor], tuple[Ids, Numbers]],
    ) -> torch.Tensor:
        ctx.handle, ctx.kept, ctx.sums = handle, kept, sums
        return rows[0]

    @staticmethod
    @uncompiled
    @override
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None, None]:
        if torch.is_grad_enabled():
            ctx.kept.refuse(
                "create_graph=True: the gradients of rows on the shards cannot be differentiated again; leave them out, by "
                "inputs= or requires_grad_(False)"
            )
        try:
            is_accumulated = torch._C._will_engine_execute_node(ctx.next_functions[0][0])  # noqa: SLF001 - torch has no public way
        except RuntimeError:  # which this is for a leaf that torch.autograd.grad was asked for
            ctx.kept.refuse("torch.autograd.grad: has no gradient to return for rows on the shards; call backward() instead")
        if is_accumulated:  # else by torch.autograd.grad, or for other inputs=
            ctx.kept.add(ctx.handle, *ctx.sums(gradients[0].detach()))
        return None, None, None, None


def in_numpy(gradient: torch.Tensor, dim: int) -> Numbers:
    """A gradient (n, dim) for NumPy; of other devices, dtypes and memory layouts a copy."""
    array: Numbers = gradient.to("cpu", torch.float32).contiguous().view(-1, dim).numpy()
    return array
