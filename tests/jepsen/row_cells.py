"""The same for rows of tables: by a gradient's cell it has ids, some on each shard, and by its digit a number of their rows.

Rows are float32 and have a number for each digit, so a row's numbers, negated, are how often each gradient has counted. Each
id comes twice in a gradient, with a half of it. Two tables, so that a shard may die between their parts of a push.

Two more have rows that go: each gradient brings new ids there, one for each shard, and must find their rows when it looks soon.
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
PASSING = ("evicted", "expired")
ROWS_PER_SHARD, EXPIRE_STEPS = 64, 40
SOON = 20
"""So many gradients later, of whomever, a row is still there."""

_NEW_IDS = 1 << 40
"""No cell has ids above it."""


def tables(digits: int, shards: int) -> list[Table]:
    """As declare() takes them."""
    return [
        *(Table(name, digits, SGD(lr=1)) for name in TABLES),
        Table("evicted", 1, SGD(lr=1), max_rows=ROWS_PER_SHARD * shards),
        Table("expired", 1, SGD(lr=1), expire_steps=EXPIRE_STEPS),
    ]


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
        self._digits, self._shards = digits, shards
        assert (np.sort(self.owners, axis=1) == np.repeat(np.arange(shards), IDS_PER_SHARD)).all()

    def gradients(self, number: int, names: Sequence[str]) -> dict[str, tuple[NDArray[Any], NDArray[np.float32]]]:
        """Of the tables among the names, and of those whose rows go."""
        cell, digit = divmod(number, self._digits)
        ids = np.concatenate([self.ids[cell], self.ids[cell]])
        values = np.zeros((len(ids), self._digits), np.float32)
        values[:, digit] = 0.5
        new = self.new_ids(number)
        ones = np.ones((len(new), 1), np.float32)
        return {name: (ids, values) for name in names if name in TABLES} | dict.fromkeys(PASSING, (new, ones))

    def new_ids(self, number: int) -> NDArray[np.uint64]:
        """Those that a gradient alone has, one on each shard."""
        candidates = np.arange(_CANDIDATES, dtype=np.uint64) + np.uint64(_NEW_IDS + number * _CANDIDATES)
        owners = shard_of(candidates, self._shards)
        return np.array([candidates[owners == shard][0] for shard in range(self._shards)])

    def least_and_most(self, rows: NDArray[np.float32], shard: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """By digit and cell, how often a gradient counts in the rows of a shard, of all ids' rows."""
        counts = -rows.reshape(*self.ids.shape, self._digits).astype(np.int64)
        there = (self.owners == shard)[:, :, None]
        big = np.iinfo(np.int64).max
        return np.where(there, counts, big).min(axis=1).T, np.where(there, counts, -1).max(axis=1).T
