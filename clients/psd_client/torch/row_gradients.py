"""The gradients of an embedding's rows, as back-propagation makes them; and the embedding's handle in the model.

The rows are on the shards, so the model has one parameter in their place, a single number: the handle. Its `.grad` is the norm
of the gradients collected so far. So whatever treats all gradients of a model alike treats these, too: `zero_grad`, a
GradScaler (infinity in a row's gradient is infinity in the norm) and torch.nn.utils.clip_grad_norm_ all act on the norm, and
what they multiply it by is what the rows' gradients are multiplied by.

Must not know shards, pulls or modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from psd_client.torch.uncompiled import uncompiled
from psd_core.distinct import distinct

Ids = NDArray[np.uint64]
Numbers = NDArray[np.float32]


class CollectedGradients:
    """The gradients of one embedding's rows since the last `zero_grad`, of each distinct id one."""

    def __init__(self) -> None:
        self._rows: tuple[Ids, Numbers] | None = None
        self._norm = 0.0

    def add(self, handle: torch.nn.Parameter, ids: Ids, gradients: Numbers) -> None:
        """Add gradients (k, dim) of distinct ids (k,), which may be kept, to what is there."""
        before = self.take(handle)
        self._rows = (ids, gradients) if before is None else summed([before, (ids, gradients)])
        norm = torch.linalg.vector_norm(torch.from_numpy(self._rows[1])).double()
        if norm.isfinite():
            norm.clamp_(max=torch.finfo(handle.dtype).max)
        if handle.grad is None:
            handle.grad = torch.zeros_like(handle)
        with torch.no_grad():
            handle.grad.copy_(norm)
        self._norm = handle.grad.item()

    def take(self, handle: torch.nn.Parameter) -> tuple[Ids, Numbers] | None:
        """The gradients, after doing to them what the program has done to the handle's; None if there are none."""
        norm = 0.0 if handle.grad is None else handle.grad.item()
        if handle.grad is None or (norm == 0 and self._norm):
            self._rows, self._norm = None, 0.0
        elif norm != self._norm and self._rows is not None and self._norm and math.isfinite(self._norm):
            ids, gradients = self._rows
            self._rows, self._norm = (ids, gradients * np.float32(norm / self._norm)), norm
        return self._rows


def summed(parts: list[tuple[Ids, Numbers]]) -> tuple[Ids, Numbers]:
    """The sums of gradients of the same ids."""
    if len(parts) == 1:
        return parts[0]
    found = distinct(np.concatenate([ids for ids, _ in parts]))
    return found.ids, found.sum(np.concatenate([gradients for _, gradients in parts]))


class Tracked(torch.autograd.Function):
    """Rows that back-propagation gives gradients to.

    Args of `apply`: handle, whose requires_grad decides; rows, a tensor that is nobody else's, returned; collect, given the
    rows' gradient. The rows come in a tuple, because what is an argument itself would come out as a view, which the program
    could not change in place.
    """

    @staticmethod
    def forward(
        ctx: Any, handle: torch.Tensor, rows: tuple[torch.Tensor], collect: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        """See torch.autograd.Function."""
        del handle
        ctx.collect = collect
        return rows[0]

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        """See torch.autograd.Function."""
        ctx.collect(gradients[0].detach())
        return None, None, None


def in_numpy(gradient: torch.Tensor, dim: int) -> Numbers:
    """A gradient (n, dim) for NumPy; of other devices, dtypes and memory layouts a copy."""
    array: Numbers = gradient.to("cpu", torch.float32).contiguous().view(-1, dim).numpy()
    return array
