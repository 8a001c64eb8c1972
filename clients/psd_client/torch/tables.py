"""The tables of one job as a model's embeddings use them: pulls, prefetches, and the gradients of a step.

A prefetch runs in a separate thread, which takes turns with the program's calls. Prefetched rows serve one lookup of the same
ids by the same module, at the clock at which they were requested; in async also one step later. Must not know autograd.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from psd_client.torch.row_gradients import CollectedGradients, Ids, Numbers, summed
from psd_client.worker.background_call import BackgroundCall
from psd_client.worker.flat_calls import FlatCalls
from psd_client.worker.worker import Turn
from psd_core.distinct import Distinct, distinct

Rows = NDArray[np.float32]


class Wanted(NamedTuple):
    """The rows that one lookup needs.

    Attributes:
        table: index of the table in the job. dim: length of its rows.
        ids: the given ids, flat. distinct: the distinct ones among them.
        padding: index of the padding among the distinct ids; None if it is not among them.
    """

    table: int
    dim: int
    ids: NDArray[np.int64]
    distinct: Distinct
    padding: int | None

    def without_padding(self, gradients: Numbers) -> tuple[Ids, Numbers]:
        """The distinct ids and their gradients, without the padding."""
        if self.padding is None:
            return self.distinct.ids, gradients
        return np.delete(self.distinct.ids, self.padding), np.delete(gradients, self.padding, axis=0)

    @property
    def on_shards(self) -> Ids:
        """The distinct ids, without the padding."""
        return self.distinct.ids if self.padding is None else np.delete(self.distinct.ids, self.padding)

    def with_padding(self, rows: Rows) -> Rows:
        """The rows of all distinct ids, with zeros for the padding."""
        return rows if self.padding is None else np.insert(rows, self.padding, 0.0, axis=0)


def wanted(table: int, dim: int, ids: NDArray[np.int64], padding: int | None) -> Wanted:
    """The rows that a lookup of these ids needs. padding: id of the padding, or None."""
    found = distinct(ids)
    if padding is None:
        return Wanted(table, dim, ids, found, None)
    places = np.flatnonzero(found.ids == np.int64(padding).astype(np.uint64))
    return Wanted(table, dim, ids, found, int(places[0]) if len(places) else None)


class Learner(Protocol):
    """An embedding, as this module sees it."""

    gradients: CollectedGradients
    handle: torch.nn.Parameter

    @property
    def is_learning(self) -> bool:
        """True if a lookup counts as a use of its rows."""

    def join(self, source: RowSource) -> None:
        """Look up rows there from now on."""

    def leave(self, source: RowSource) -> None:
        """Look up no more rows there."""


Lookup = tuple[Learner, Wanted]


class RowSource(Protocol):
    """A place at which embeddings look up rows: a job's tables, a reader's, or the rows that the model itself has.

    Attributes:
        index_of: index of each table, by name. is_trained: True if rows have gradients; else they are fixed.
    """

    index_of: dict[str, int]
    is_trained: bool

    def pull(self, lookups: Sequence[Lookup]) -> Sequence[Rows | torch.Tensor]:
        """The distinct rows of some lookups."""

    def prefetch(self, lookups: Sequence[Lookup]) -> None:
        """Prefetch the rows for lookups of the next step, if there is anything to fetch."""


class PullsRows(Protocol):
    """A connection, as `pull_rows` sees it."""

    def pull_rows(self, wanted: dict[int, Ids], *, counts_no_use: bool, turn: Turn | None) -> Mapping[int, Rows]:
        """The rows of ids, by index of the table."""


class Tables:
    """The tables of one job.

    Args:
        members: the embeddings that look up rows in each table, by name of the table, in the job's order. They are joined to
            the job here.
        has_feeds: pushes begin before their step; nothing can then be requested in between.

    Attributes:
        index_of, is_trained: see RowSource.
    """

    is_trained = True

    def __init__(self, worker: FlatCalls, members: Mapping[str, Sequence[Learner]], *, has_feeds: bool = False) -> None:
        self.index_of = {name: index for index, name in enumerate(members)}
        self._members = list(members.values())
        self._worker = worker
        self._is_async = worker.parameters.layout.spec.consistency.mode == "async"
        self._next: list[Lookup] = []  # to be asked for when a step has ended
        self._fetches: list[_Fetch] = []
        self._has_feeds = has_feeds
        for embeddings in self._members:
            for embedding in embeddings:
                embedding.join(self)

    def pull(self, lookups: Sequence[Lookup]) -> list[Rows]:
        """The distinct rows of some lookups; those that were not prefetched are pulled in one round trip.

        Raises:
            PsdError: what the shards or the connection refuse.
        """
        found = [self._fetched(learner, place) if learner.is_learning else None for learner, place in lookups]
        for is_learning in (True, False):
            lacking = [
                index
                for index, (learner, _) in enumerate(lookups)
                if found[index] is None and learner.is_learning == is_learning
            ]
            pulled = pull_rows(self._worker, [lookups[index][1] for index in lacking], counts_no_use=not is_learning)
            for index, rows in zip(lacking, pulled, strict=True):
                found[index] = rows
        return [rows for rows in found if rows is not None]

    def prefetch(self, lookups: Sequence[Lookup]) -> None:
        """Prefetch the rows for lookups of the next step."""
        self._next += [(learner, place._replace(ids=place.ids.copy())) for learner, place in lookups]  # it may reuse them
        if self._is_async and not self._has_feeds:
            self._fetch()

    def leave(self) -> None:
        """Let the embeddings go: they look up nothing here any more."""
        for embeddings in self._members:
            for embedding in embeddings:
                embedding.leave(self)

    def gradients(self, tables: Collection[int] | None = None) -> dict[int, tuple[Ids, Numbers]]:
        """The gradients that the embeddings have collected: for each table, distinct ids and their gradients.

        tables: indices of the tables to take; None: all.
        """
        found = {}
        for index, members in enumerate(self._members):
            if tables is not None and index not in tables:
                continue
            parts = [part for member in members if (part := member.gradients.take(member.handle)) is not None]
            if parts:
                found[index] = summed(parts)
        return found

    def on_step(self) -> None:
        """Drop rows that were prefetched for the step that has ended, and begin the prefetches for the next one."""
        self._fetches = [fetch for fetch in self._fetches if self._is_of_now(fetch)]
        self._fetch()

    def settle(self) -> None:
        """Wait until no prefetch is running; raise the error of one that has failed, once."""
        for fetch in list(self._fetches):
            self._wait(fetch)

    def _fetch(self) -> None:
        lookups, self._next = self._next, []
        if lookups:
            self._fetches.append(_Fetch(self._worker, lookups))

    def _fetched(self, learner: Learner, place: Wanted) -> Rows | None:
        """The rows that were prefetched for exactly this lookup; None if there are none."""
        self._next = [lookup for lookup in self._next if not _is_same(lookup, (learner, place))]
        for fetch in self._fetches:
            for index, lookup in enumerate(fetch.lookups):
                if _is_same(lookup, (learner, place)) and self._is_of_now(fetch):
                    self._wait(fetch)
                    del fetch.lookups[index]
                    return fetch.rows.pop(index)
        return None

    def _is_of_now(self, fetch: _Fetch) -> bool:
        worker = self._worker
        oldest = worker.clock - self._is_async
        return fetch.clock >= oldest and fetch.times_gone_back == worker.times_gone_back

    def _wait(self, fetch: _Fetch) -> None:
        try:
            fetch.wait()
        except BaseException:
            if fetch.error is not None:
                self._fetches.remove(fetch)
            raise


class _Fetch(BackgroundCall):
    """A prefetch.

    Attributes:
        lookups: the lookups to prefetch for. rows: the rows of each.
        clock, times_gone_back: those of the worker when the rows were requested.
    """

    def __init__(self, worker: FlatCalls, lookups: list[Lookup]) -> None:
        self.lookups = lookups
        self.rows: list[Rows] = []
        self.clock, self.times_gone_back = worker.clock, worker.times_gone_back

        def call(turn: Turn) -> None:
            self.rows = pull_rows(worker, [place for _, place in self.lookups], turn=turn)

        super().__init__(worker, call)


def pull_rows(
    worker: PullsRows, places: Sequence[Wanted], *, counts_no_use: bool = False, turn: Turn | None = None
) -> list[Rows]:
    """Pull the distinct rows that some lookups need, in one round trip; with zeros for the padding."""
    asked: dict[int, list[Ids]] = {}
    for place in places:
        asked.setdefault(place.table, []).append(place.on_shards)
    joined = {table: np.concatenate(ids) if len(ids) > 1 else ids[0] for table, ids in asked.items()}
    if not any(map(len, joined.values())):
        return [np.zeros((len(place.distinct.ids), place.dim), np.float32) for place in places]
    pulled = worker.pull_rows(joined, counts_no_use=counts_no_use, turn=turn)
    begins = dict.fromkeys(asked, 0)
    found = []
    for place in places:
        begin = begins[place.table]
        begins[place.table] += len(place.on_shards)
        found.append(place.with_padding(pulled[place.table][begin : begins[place.table]]))
    return found


def _is_same(lookup: Lookup, other: Lookup) -> bool:
    return lookup[0] is other[0] and np.array_equal(lookup[1].ids, other[1].ids)
