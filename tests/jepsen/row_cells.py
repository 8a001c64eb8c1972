"""The same for rows of tables: by a gradient's cell it has ids, some on each shard, and by its digit a number of their rows.

Rows are float32 and have a number for each digit, so a row's numbers, negated, are how often each gradient has counted. Each
id comes twice in a gradient, with a half of it. Two tables, so that a shard may die between their parts of a push.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd_client import SGD, Table
from psd_core.distinct import shard_of

IDS_PER_SHARD = 2
_CANDIDATES = 128
"""Of each cell; among so many every shard has some."""

TABLES = ("rows", "tags")


def tables(digits: int) -> list[Table]:
    """As declare() takes them."""
    return [Table(name, digits, SGD(lr=1)) for name in TABLES]


class RowCells:
    """The ids of each cell.

    Attributes:
        ids: (cells, n) uint64. owners: likewise, the shards that have them.
    """

    def __init__(self, cells: int, digits: int, shards: int) -> None:
        candidates = np.arange(cells * _CANDIDATES, dtype=np.uint64).reshape(_CANDIDATES, cells).T
        owners = shard_of(candidates.reshape(-1), shards).reshape(candidates.shape)
        places = [np.argsort(owners != shard, axis=1, kind="stable")[:, :IDS_PER_SHARD] for shard in range(shards)]
        chosen = np.concatenate(places, axis=1)
        self.ids: NDArray[np.uint64] = np.ascontiguousarray(np.take_along_axis(candidates, chosen, axis=1))
        self.owners = np.take_along_axis(owners, chosen, axis=1)
        self._digits = digits
        assert (np.sort(self.owners, axis=1) == np.repeat(np.arange(shards), IDS_PER_SHARD)).all()

    def gradients(self, number: int, names: Sequence[str]) -> dict[str, tuple[NDArray[Any], NDArray[np.float32]]]:
        """Of the tables among the names."""
        cell, digit = divmod(number, self._digits)
        ids = np.concatenate([self.ids[cell], self.ids[cell]])
        values = np.zeros((len(ids), self._digits), np.float32)
        values[:, digit] = 0.5
        return {name: (ids, values) for name in names if name in TABLES}

    def least_and_most(self, rows: NDArray[np.float32], shard: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """By digit and cell, how often a gradient counts in the rows of a shard, of all ids' rows."""
        counts = -rows.reshape(*self.ids.shape, self._digits).astype(np.int64)
        there = (self.owners == shard)[:, :, None]
        big = np.iinfo(np.int64).max
        return np.where(there, counts, big).min(axis=1).T, np.where(there, counts, -1).max(axis=1).T
