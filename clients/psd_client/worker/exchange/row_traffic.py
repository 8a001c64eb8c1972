"""Rows that one worker sends and receives: their memory, and the rows that a push_pull brings ahead for the pull after it.

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
from psd_client.worker.exchange.riders import Rider
from psd_client.worker.rows import Batches, Gradients, RowGradients, RowPull


class PullAhead:
    """Rows that one push_pull fetches beside the parameters.

    Attributes:
        pull: all of these rows. at: what to ask each shard for; empty if that is too much for one round trip.
    """

    def __init__(self, pull: RowPull, shards: Sequence[int]) -> None:
        self.pull = pull
        portions = {shard: pull.at(shard) for shard in shards}
        is_much = any(len(of_shard) > 1 for of_shard in portions.values())
        self.at = {} if is_much else {shard: RowsAhead(of_shard[0]) for shard, of_shard in portions.items() if of_shard}

    def versions(self) -> dict[int, int]:
        """Versions of the tables by shard, if all rows have come; else nothing."""
        found = {shard: rows.version for shard, rows in self.at.items() if rows.version is not None}
        return found if len(found) == len(self.at) else {}


class RowTraffic(Rider):
    """The rows that one worker sends and receives.

    Args:
        segment: memory that shards can see, with room for rows; None: there is none.
        ids_max: returns the most ids that each shard takes in one pull now.

    Attributes:
        versions_read: by shard, the version of its tables at the last pull of rows. no_gradients: those of a push without rows.
    """

    def __init__(self, layout: Layout, segment: Segment | None, ids_max: Callable[[], int]) -> None:
        shared = segment if layout.spec.tables else None
        self._batches = Batches(layout)
        self._ids_max = ids_max
        self._pushed, self._pulled = RowsMemory(shared), RowsMemory(shared)
        self.no_gradients = RowGradients(self._batches, {}, self._pushed)
        self.versions_read: dict[int, int] = {}
        self._wanted: dict[int, NDArray[Any]] = {}
        self._ids: dict[int, bytes] = {}
        self._rows: dict[int, NDArray[np.float32]] = {}

    def gradients(self, gradients: Gradients) -> RowGradients:
        """Gradients of rows in the form in which the next push sends them. Drops rows that came ahead, because rows change."""
        self._ids, self._rows = {}, {}
        return RowGradients(self._batches, gradients, self._pushed) if gradients else self.no_gradients

    def pull(self, wanted: Mapping[int, NDArray[Any]]) -> RowPull:
        """A new pull of these rows."""
        return RowPull(self._batches, wanted, self._pulled, self._ids_max())

    def prefetch(self, wanted: Mapping[int, NDArray[Any]]) -> None:
        """Ask for rows with the next push_pull, for the `pull_rows` after it."""
        for table, ids in wanted.items():
            self._wanted[table] = ids.copy()

    def pull_ahead(self, shards: Sequence[int]) -> PullAhead | None:
        """The rows that the push_pull that begins now must fetch, too, from these shards; None if there are none."""
        return PullAhead(self.pull(self._wanted), shards) if self._wanted else None

    def came(self, ahead: PullAhead | None, counts: dict[str, int]) -> None:
        """Note that a push_pull has ended, and keep the rows that have come ahead, if all have. The next one does not ask for
        them again, even if they have not come. counts: of the worker."""
        if ahead is not None and (versions := ahead.versions()):
            self._ids = {table: ids.tobytes() for table, ids in self._wanted.items()}
            self._rows = ahead.pull.results()
            self.versions_read |= versions
            counts["rows_pulled"] += ahead.pull.rows
        self._wanted = {}

    def take(self, wanted: Mapping[int, NDArray[Any]]) -> dict[int, NDArray[np.float32]]:
        """Take these rows out, if all of them have come ahead; else return nothing."""
        for table, ids in wanted.items():
            if table not in self._ids or self._ids[table] != ids.tobytes():  # copies no ids if nothing has come
                return {}
        found = {}
        for table, ids in wanted.items():
            del self._ids[table]
            rows = self._rows.pop(table)
            found[table] = rows.reshape(*ids.shape, rows.shape[-1])
        return found

    def forget(self) -> None:
        """Drop rows that came ahead, because rows change."""
        self._ids, self._rows = {}, {}
