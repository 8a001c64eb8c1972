"""The distinct ids of a batch, grouped by shard: sums the gradients of each id before they are sent, and expands received rows.

Must not know stores, jobs or messages.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import psd_core
from psd_core import _distinct
from psd_core._table_arguments import as_ids, as_out, as_values

IDS_MAX = (1 << 31) - 1
SHARDS_MAX = 1 << 16

_SEED = int.from_bytes(os.urandom(8), "little")
"""Seed of the hash table, so that nobody can choose ids that collide. No result depends on it."""


def shard_of(ids: NDArray[Any], shards: int) -> NDArray[np.int64]:
    """Return the shard that has the row of each id: ``(mixed(id) >> 32) * shards >> 32``, part of every format.

    So each shard has an equal run of hashes. `mixed` is that of `psd_core.table`.

    Args:
        ids: (n,) int64|uint64.
        shards: number of shards, from 1 to SHARDS_MAX.
    """
    keys = as_ids(ids)
    out = np.empty(len(keys), np.int64)
    _distinct.shards_of(keys, _checked(shards), out)
    return out


class Distinct:
    """The distinct ids of a batch; made by `distinct`. Immutable.

    Attributes:
        ids: (k,) uint64, grouped by shard; in a group in the order of their first places in the batch.
        starts: shards + 1 numbers: the ids of shard s are ``ids[starts[s]:starts[s + 1]]``.
        inverse: (n,) int32: the place of each id of the batch, so that ``ids[inverse]`` is the batch.
    """

    def __init__(self, ids: NDArray[np.uint64], starts: list[int], inverse: NDArray[np.int32]) -> None:
        """Keep arrays that match; only `distinct` calls this."""
        self.ids = ids
        self.starts = starts
        self.inverse = inverse
        self._is_batch = len(ids) == len(inverse) and len(starts) == 2

    def sum(self, grads: NDArray[Any], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Return the sum of the gradients of each distinct id (k, dim), in float32, added in the order of the batch.

        Args:
            grads: (n, dim) float32|float16|uint16 (bfloat16), one row for each id of the batch. Without `out`, it is itself
                returned if it is float32 and there is nothing to add or to sort.
            out: (k, dim) float32, C-contiguous. Overwritten; a new array by default.

        Raises:
            InvalidArray: naming the argument.
        """
        values = as_values("grads", grads, len(self.inverse))
        if self._is_batch and out is None:
            return values
        sums = as_out(out, len(self.ids), values.shape[1])
        _distinct.sum_rows([values], [self.inverse], [sums])
        return sums

    def expand(self, rows: NDArray[Any], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Return the row of each id of the batch (n, dim), from the rows of the distinct ids: ``rows[inverse]``.

        Args:
            rows: (k, dim) float32|float16|uint16 (bfloat16).
            out: (n, dim) float32, C-contiguous. Overwritten; a new array by default.

        Raises:
            InvalidArray: naming the argument.
        """
        values = as_values("rows", rows, len(self.ids))
        out = as_out(out, len(self.inverse), values.shape[1])
        _distinct.expand_rows([values], [self.inverse], [out])
        return out


def distinct(ids: NDArray[Any], shards: int = 1) -> Distinct:
    """Return the distinct ids of a batch, grouped by shard.

    Args:
        ids: (n,) int64|uint64, at most IDS_MAX.
        shards: number of shards, from 1 to SHARDS_MAX; `shard_of` says which one has an id.

    Raises:
        InvalidArray: naming the argument.

    Cost: O(n) for any ids; GIL released.
    """
    return distinct_of_each([ids], shards)[0]


def distinct_of_each(batches: Sequence[NDArray[Any]], shards: int = 1) -> list[Distinct]:
    """Return the distinct ids of each of several batches, such as those of the tables of one step; IDS_MAX ids in all."""
    keys = [as_ids(ids) for ids in batches]
    n = sum([len(ids) for ids in keys])
    if n > IDS_MAX:
        raise psd_core.InvalidArray(f"ids: expected at most {IDS_MAX}, got {n}")
    all_ids, all_inverse = np.empty(n, np.uint64), np.empty(n, np.int32)
    all_starts = np.empty((len(keys), _checked(shards) + 1), np.int64)
    _distinct.distinct(keys, _SEED, all_ids, all_starts, all_inverse)
    found, at, first = [], 0, 0
    for ids, starts in zip(keys, all_starts.tolist(), strict=True):
        end, last = at + starts[-1], first + len(ids)
        found.append(Distinct(all_ids[at:end], starts, all_inverse[first:last]))
        at, first = end, last
    return found


def sum_each(found: Sequence[Distinct], grads: Sequence[NDArray[Any]], out: Sequence[NDArray[np.float32]]) -> None:
    """Set each array of `out` to the sums of the gradients of one batch: see Distinct.sum. The arrays must match."""
    given = [as_values("grads", rows, len(batch.inverse)) for batch, rows in zip(found, grads, strict=True)]
    _distinct.sum_rows(given, [batch.inverse for batch in found], list(out))


def expand_each(found: Sequence[Distinct], rows: Sequence[NDArray[Any]]) -> list[NDArray[np.float32]]:
    """Return the rows of the ids of each batch: see Distinct.expand."""
    given = [as_values("rows", values, len(batch.ids)) for batch, values in zip(found, rows, strict=True)]
    out = [np.empty((len(batch.inverse), values.shape[1]), np.float32) for batch, values in zip(found, given, strict=True)]
    _distinct.expand_rows(given, [batch.inverse for batch in found], out)
    return out


def offsets(arrays: Sequence[NDArray[Any]], address: int, nbytes: int) -> list[int] | None:
    """Return the offsets of C-contiguous arrays from an address; None if one is not wholly within so many bytes of it."""
    return _distinct.offsets(list(arrays), address, nbytes)


def first_elsewhere(batches: Sequence[NDArray[np.uint64]], shards: int, shard: int) -> tuple[int, int] | None:
    """Return the batch, and the place in it, of the first id that belongs to another shard (see shard_of); else None."""
    return _distinct.first_elsewhere(list(batches), _checked(shards), shard)


def _checked(shards: int) -> int:
    if not 1 <= shards <= SHARDS_MAX:
        raise ValueError(f"shards: expected a whole number from 1 to {SHARDS_MAX}, got {shards!r}")
    return shards
