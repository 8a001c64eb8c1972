"""Rows of one worker on their way: the memory that they lie in, and those that a push_pull brings for the pull after it.

Must not know sessions, rounds or how anything travels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.contract.layout import Layout
from psd_client.lanes.rows_memory import RowsMemory
from psd_client.lanes.segment import Segment
from psd_client.lanes.transport import RowsAhead
from psd_client.worker.exchange.rider import Rider
from psd_client.worker.rows import Batches, Gradients, RowGradients, RowPull


class PullAhead:
    """Rows that one push_pull is to fetch besides.

    Attributes:
        pull: all of them. at: what to ask of each shard; nothing if it is too much for one round trip.
    """

    def __init__(self, pull: RowPull, shards: Sequence[int]) -> None:
        self.pull = pull
        portions = {shard: pull.at(shard) for shard in shards}
        is_much = any(len(of_shard) > 1 for of_shard in portions.values())
        self.at = {} if is_much else {shard: RowsAhead(of_shard[0]) for shard, of_shard in portions.items() if of_shard}

    def versions(self) -> dict[int, int]:
        """Versions of the shards' tables, if all of it has come; else nothing."""
        found = {shard: rows.version for shard, rows in self.at.items() if rows.version is not None}
        return found if len(found) == len(self.at) else {}


class RowTraffic(Rider):
    """Rows of one worker.

    Args:
        segment: memory that shards see, with room for rows; None: there is none.
        ids_max: the most ids that each shard takes in one pull, as they say now.
    """

    def __init__(self, layout: Layout, segment: Segment | None, ids_max: Callable[[], int]) -> None:
        shared = segment if layout.spec.tables else None
        self._batches = Batches(layout)
        self._ids_max = ids_max
        self._pushed, self._pulled = RowsMemory(shared), RowsMemory(shared)
        self._no_gradients = RowGradients(self._batches, {}, self._pushed)
        self._wanted: dict[int, NDArray[Any]] = {}
        self._ids: dict[int, bytes] = {}
        self._rows: dict[int, NDArray[np.float32]] = {}

    def gradients(self, gradients: Gradients) -> RowGradients:
        """Gradients of rows as the next push sends them; what has come ahead is dropped, since rows change."""
        self._ids, self._rows = {}, {}
        return RowGradients(self._batches, gradients, self._pushed) if gradients else self._no_gradients

    def pull(self, wanted: Mapping[int, NDArray[Any]]) -> RowPull:
        """A pull that is to be made."""
        return RowPull(self._batches, wanted, self._pulled, self._ids_max())

    def prefetch(self, wanted: Mapping[int, NDArray[Any]]) -> None:
        """Have rows come with the next push_pull, for the `pull_rows` after it."""
        for table, ids in wanted.items():
            self._wanted[table] = ids.copy()

    def pull_ahead(self, shards: Sequence[int]) -> PullAhead | None:
        """Rows that the push_pull that begins now is to fetch besides, from these shards; None: none."""
        return PullAhead(self.pull(self._wanted), shards) if self._wanted else None

    def came(self, ahead: PullAhead) -> None:
        """Keep what has come of it, which is all."""
        self._ids = {table: ids.tobytes() for table, ids in self._wanted.items()}
        self._rows = ahead.pull.results()

    def want_nothing(self) -> None:
        """Note that a push_pull has ended: the next one is asked for no rows of this one's, whether they have come or not."""
        self._wanted = {}

    def take(self, wanted: Mapping[int, NDArray[Any]]) -> dict[int, NDArray[np.float32]]:
        """These rows, once, if all of them have come; else nothing."""
        for table, ids in wanted.items():
            if table not in self._ids or self._ids[table] != ids.tobytes():  # where nothing has come no ids are copied
                return {}
        found = {}
        for table, ids in wanted.items():
            del self._ids[table]
            rows = self._rows.pop(table)
            found[table] = rows.reshape(*ids.shape, rows.shape[-1])
        return found

    def forget(self) -> None:
        """Drop what has come: rows change."""
        self._ids, self._rows = {}, {}
