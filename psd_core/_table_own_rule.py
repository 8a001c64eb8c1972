"""A caller's own rule on the rows of a push: the memory that it works in, some rows at a time.

csrc/table_own_rule.c gathers rows there and writes them to the file. Must not know files, nor where a rule comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from psd_core import _table
from psd_core._table_format import TableSpec

RowRule: TypeAlias = "Callable[[NDArray[np.float32], NDArray[np.float32], list[NDArray[np.float32]], int], object]"
"""Takes values and gradients, (m, dim) each, a list of slots alike, and the step. It changes values and slots in place. What it
raises, the push raises, and nothing has changed."""

_BATCH_BYTES = 1 << 20


def bound(own: RowRule, spec: TableSpec, step: int, most: int) -> _table.OwnRule:
    """A rule as a push of so many ids at most calls it. The memory is of this push alone: a rule may keep what it is given."""
    batch = max(1, min(most, _BATCH_BYTES // (4 * spec.layout.width)))
    pieces = np.empty((1 + len(spec.constants), batch, spec.dim), np.float32)
    gradients = np.empty((batch, spec.dim), np.float32)

    def apply(count: int) -> None:
        value, *slots = pieces[:, :count]
        own(value, gradients[:count], slots, step)

    return _table.OwnRule(apply, pieces, gradients, np.empty((2, batch), np.uint64))
