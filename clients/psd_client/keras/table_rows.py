"""The rows of one embedding layer of a job: pulled as NumPy arrays, and their gradients until the step.

A layer looks its rows up in a LayerRowSource: this one, or outside of a job what fixed_rows.py has. Must not know a framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import InvalidRequest
from psd_client.worker.flat_calls import FlatCalls
from psd_core.distinct import distinct

DIRECTION = np.array([-0.96, 0.28], np.float32)
"""Direction of a handle's gradient: this vector times the norm of the rows' gradients. So it has the same norm, and operations
on single elements, such as clipping by value, change its direction."""

_ROUNDING = 0.01
"""Share of the norm by which rounding to 16 bits may change the direction."""

Gradients = tuple[NDArray[np.uint64], NDArray[np.float32]]


class LayerRowSource(Protocol):
    """The place at which a layer looks up its rows.

    Attributes:
        is_trained: the rows are those of a job, in which this process is a worker.
    """

    is_trained: bool

    def pull(self, ids: NDArray[np.int64], *, counts_no_use: bool) -> NDArray[np.float32]:
        """The rows (..., dim) of ids (...)."""

    def collect(self, ids: NDArray[Any], gradients: NDArray[Any]) -> NDArray[np.float32]:
        """The gradient of the layer's handle, for the gradients of one lookup's rows."""


class LayerRows:
    """The rows of one layer in its job.

    Args:
        table: index of the table in the job. name: name of the table. dim: length of a row.
        pulling: makes the context of a pull, in which no other call of the model is under way.
    """

    is_trained = True

    def __init__(
        self, worker: FlatCalls, table: int, name: str, dim: int, pulling: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.name = name
        self.table = table
        self.dim = dim
        self._worker = worker
        self._pulling = pulling
        self._parts: list[Gradients] = []
        self._norm = 0.0

    def pull(self, ids: NDArray[np.int64], *, counts_no_use: bool) -> NDArray[np.float32]:
        """The rows (..., dim) of ids (...); waits for other calls of this model that are under way."""
        with self._pulling():
            return self._worker.pull_rows({self.table: ids}, counts_no_use=counts_no_use)[self.table]

    def collect(self, ids: NDArray[Any], gradients: NDArray[Any]) -> NDArray[np.float32]:
        """Keep the gradients of one lookup until the step; return the gradient of the handle, which represents them."""
        found = distinct(np.ascontiguousarray(ids).reshape(-1))
        sums = found.sum(np.array(gradients, np.float32).reshape(-1, self.dim))
        norm = np.float32(np.linalg.norm(sums))
        self._parts.append((found.ids, sums))
        self._norm += float(norm)
        stands: NDArray[np.float32] = norm * DIRECTION
        return stands

    def take(self, handle: NDArray[Any]) -> Gradients | None:
        """Return the gradients collected so far, and forget them; None if there are none. They are scaled as the handle's
        gradient was.

        Raises:
            InvalidRequest: the handle's gradient was changed in another way than by a factor, which cannot be done to the rows.
        """
        parts, before = self._parts, self._norm
        self._parts, self._norm = [], 0.0
        norm = float(handle @ DIRECTION)
        off = np.abs(handle - norm * DIRECTION).max()
        if (not parts and handle.any()) or (math.isfinite(norm) and off > _ROUNDING * abs(norm)):
            raise InvalidRequest(
                f"embedding {self.name!r}: the gradient of its handle is {handle.tolist()}, and is no multiple of what "
                "back-propagation has made of the rows' gradients; multiply it, as clipping by the norm of all does, and leave "
                "it out of what is done to each element, such as clipping by value"
            )
        if not parts:
            return None
        ids, gradients = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        is_scaled = before and norm != before and math.isfinite(before) and math.isfinite(norm)
        return ids, gradients * np.float32(norm / before) if is_scaled else gradients
