"""The gradients of an embedding's rows, as back-propagation makes them; and the embedding's handle in the model.

The rows are on the shards, so the model has one parameter in their place, a single number: the handle. Its `.grad` is the norm
of the gradients collected so far. So whatever treats all gradients of a model alike treats these, too: `zero_grad`, a
GradScaler (infinity in a row's gradient is infinity in the norm) and torch.nn.utils.clip_grad_norm_ all act on the norm, and
what they multiply it by is what the rows' gradients are multiplied by. What does not multiply is refused (rows_norm.py).

Must not know shards, pulls or modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from psd.contract.errors import InvalidRequest
from psd_client.torch.rows_norm import RowsNorm
from psd_client.torch.uncompiled import uncompiled
from psd_core.distinct import distinct

Ids = NDArray[np.uint64]
Numbers = NDArray[np.float32]


_ROUNDING = 0.01
"""Share of a norm by which it may differ from what it should be, since a model that is moved to 16 bits rounds it."""


class CollectedGradients:
    """The gradients of one embedding's rows since the last `zero_grad`, of each distinct id one.

    Args:
        table: name of the table, for errors.
    """

    def __init__(self, table: str) -> None:
        self._table = table
        self._rows: tuple[Ids, Numbers] | None = None
        self._norm = 0.0
        self._is_watched = True
        self._asked: tuple[int, tuple[Ids, Numbers], float] | None = None  # of torch.autograd.grad: which call, and so far

    def add(self, handle: torch.nn.Parameter, ids: Ids, gradients: Numbers) -> None:
        """Add gradients (k, dim) of distinct ids (k,), which may be kept, to what is there."""
        before = self.take(handle)
        self._rows = (ids, gradients) if before is None else summed([before, (ids, gradients)])
        norm = torch.linalg.vector_norm(torch.from_numpy(self._rows[1])).double()
        if norm.isfinite():  # never 0, by which rows that are to be forgotten are told from rows whose gradients are zeros
            limits = torch.finfo(handle.dtype)
            norm.clamp_(limits.tiny, limits.max)
        found = handle.grad
        if not isinstance(found, RowsNorm):
            found = handle.grad = RowsNorm.of(torch.zeros_like(handle.detach()), self._table)
        self._is_watched = isinstance(found, RowsNorm)
        with torch.no_grad():
            found.set(norm) if isinstance(found, RowsNorm) else found.copy_(norm)
        self._norm = found.item()

    def take(self, handle: torch.nn.Parameter) -> tuple[Ids, Numbers] | None:
        """The gradients, after doing to them what the program has done to the handle's; None if there are none.

        Raises:
            InvalidRequest: the handle's is neither what back-propagation has made, nor a multiple that was seen.
        """
        found = handle.grad
        norm = 0.0 if found is None else found.item()
        if norm == 0:
            self._rows, self._norm = None, 0.0
            return None
        right = found.is_value[0] if isinstance(found, RowsNorm) else self._norm
        if self._rows is None or (not math.isclose(norm, right, rel_tol=_ROUNDING) and not (norm != norm and right != right)):
            self._refuse(norm)
        elif right != self._norm and math.isfinite(self._norm):
            ids, gradients = self._rows
            self._rows, self._norm = (ids, gradients * np.float32(right / self._norm)), right
        return self._rows

    def _refuse(self, norm: float) -> NoReturn:
        raise InvalidRequest(
            f"embedding {self._table!r}: the gradient of its handle was set to {norm:g} by the program; it is the norm of the "
            "rows' gradients, which backward() collects, and can be multiplied in place, or set to None"
        )

    def check_is_last(self, *, is_last: bool) -> None:
        """Raise InvalidRequest for a back-propagation that is to be differentiated itself, by create_graph=True."""
        if not is_last:
            raise InvalidRequest(
                f"embedding {self._table!r}: create_graph=True: the gradients of rows on the shards cannot be differentiated "
                "again; leave them out, by inputs= or requires_grad_(False)"
            )

    def refuse_others(self, gradient: torch.Tensor | None) -> None:
        """Raise InvalidRequest for a gradient of the handle's own, that is, of a loss that was computed with it.

        Called by back-propagation. What torch.autograd.grad is told of the rows comes by here, too.
        """
        call = torch._C._current_graph_task_id()  # noqa: SLF001 - torch has no public way to tell one from the next
        if gradient is not None and (self._asked is None or self._asked[0] != call):
            raise InvalidRequest(
                f"embedding {self._table!r}: the loss was computed with its handle, as by a penalty over all parameters of the "
                "model; it is 0, and has nothing of the rows, which are on the shards: leave it out, and give weight_decay to "
                "the rows' optimizer"
            )

    def asked(self, call: int, ids: Ids, gradients: Numbers) -> float:
        """The number to be returned for one lookup by torch.autograd.grad: all of a call together are the norm of the sum."""
        if self._asked is None or self._asked[0] != call:
            self._asked = call, (ids[:0], gradients[:0]), 0.0
        _, so_far, before = self._asked
        rows = summed([so_far, (ids, gradients)])
        norm = float(np.linalg.norm(rows[1]))
        self._asked = call, rows, norm
        return norm - before


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
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        ctx.kept.check_is_last(is_last=not torch.is_grad_enabled())
        ids, sums = ctx.sums(gradients[0].detach())
        if _is_accumulated(ctx.next_functions[0][0]):
            ctx.kept.add(ctx.handle, ids, sums)
            return None, None, None, None
        call = torch._C._current_graph_task_id()  # noqa: SLF001 - likewise
        return torch.full_like(ctx.handle, ctx.kept.asked(call, ids, sums)), None, None, None


def _is_accumulated(node: Any) -> bool:
    """True if the back-propagation under way adds to `.grad` there: neither by torch.autograd.grad nor for other inputs=."""
    try:
        return bool(torch._C._will_engine_execute_node(node))  # noqa: SLF001 - likewise
    except RuntimeError:  # which this is for a leaf that torch.autograd.grad was asked for
        return False


def in_numpy(gradient: torch.Tensor, dim: int) -> Numbers:
    """A gradient (n, dim) for NumPy; of other devices, dtypes and memory layouts a copy."""
    array: Numbers = gradient.to("cpu", torch.float32).contiguous().view(-1, dim).numpy()
    return array
