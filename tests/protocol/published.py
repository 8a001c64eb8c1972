"""What has really happened to a shard's blocks and tables, as somebody sees who misses nothing: which gradients are in which
update. The tables are one block more, which has an update when all of them have it.

Survives the shard's process, and is what the invariants are held against. Must not know calls or workers' books.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from residuals import Payload, may_have_sent, payloads_of
from setting import GRADIENTS_MAX, Setting, counts_in, counts_in_row, value_of

from psd.state.shard import Shard
from psd_core.arena import BlockCore
from psd_core.table import TableStore


def notes_of(store: TableStore) -> NDArray[np.uint64]:
    """A store's notes without its lock, which a commit holds."""
    notes = np.empty(store.spec.notes, np.uint64)
    store._partition.notes(notes)
    return notes


class History:
    """Of the blocks of one shard.

    Attributes:
        updates: by block, the gradients of each update, in their order. of_tables: likewise by table.
        payloads: by block, the compressed gradients that its updates have. wrong: broken invariants that were seen.
        waited_in: returns the mask of the ranks that a round waits for, by what the shard knows of its workers now.
    """

    def __init__(self, setting: Setting, shard: int) -> None:
        self._setting = setting
        self._tables_block = setting.blocks + shard
        self._ranks = [rank for rank, _ in setting.processes]
        self.updates: dict[int, list[tuple[int, ...]]] = {}
        self.of_tables: dict[int, list[tuple[int, ...]]] = {}
        self.payloads: dict[int, list[Payload]] = {}
        self._values: dict[int, list[NDArray[Any]]] = {}  # of a block's versions, where gradients are compressed
        self._rows: dict[int, Any] = {}
        self._begun: dict[int, set[int]] = {}  # by table, what it had at version 0, from a checkpoint
        self.wrong: list[str] = []
        self.waited_in: Callable[[int], int] = lambda _: 0

    def seed(self, shard: Shard) -> None:
        """A shard goes on from a checkpoint, with what is in its blocks and its tables."""
        job, blocks = shard.declared(), {}
        for index, block in job.blocks.items():
            page = block._page
            assert page is not None
            blocks[index] = _as_updates(page.version, counts_in(float(-page.parameter[0])))
        self.updates = blocks
        for table, store in enumerate(shard._core.storage.tables):
            shard_index = self._tables_block - self._setting.blocks
            row = store.read(self._setting.ids[shard_index : shard_index + 1])[0]
            version, counted = int(notes_of(store)[0]), counts_in_row(-row)
            self.of_tables[table], self._rows[table] = _as_updates(version, counted), row
            # Without rounds a table begins at the step of the slowest worker, who may have made none.
            self._begun[table] = set() if version else set(counted)
        if self._setting.tables:
            self._put_together()
        self.wrong = []

    def on_publish(self, block: int, before: Any, page: Any, version: int) -> None:
        """A block has another page."""
        if before is None:
            self.updates[block], self.payloads[block], self._values[block] = [], [], [page.parameter.copy()]
            return
        updates = self.updates.setdefault(block, [])
        if self._setting.is_published:
            self._put(block, updates, page, version)
            return
        if version != before.version + 1:
            self.wrong.append(f"block {block} went from version {before.version} to {version}")
        change = before.parameter - page.parameter
        if self._setting.has_residuals:
            self._values[block].append(page.parameter.copy())
            self._add(f"block {block}", updates, version, lambda change: self._pushed(block, change), change)
        else:
            self._add(f"block {block}", updates, version, counts_in, float(change[0]))

    def _put(self, block: int, updates: list[tuple[int, ...]], page: Any, version: int) -> None:
        """A block is set to what was put; versions that it has left out were lost, and nobody may read them."""
        if version <= len(updates):
            self.wrong.append(f"block {block} went back from version {len(updates)} to {version}")
        found = tuple(counts_in(float(page.parameter[0])))
        if len(found) != 1:
            self.wrong.append(f"block {block}, version {version} is of puts {found}")
        updates += [()] * (version - 1 - len(updates))
        updates.append(found)

    def _pushed(self, block: int, change: NDArray[Any]) -> dict[int, int]:
        """The pushes that have changed a block; raises AssertionError if their workers' residuals are not as they must be."""
        found = {payload.gradient: 1 for payload in payloads_of(change)}
        known = self.payloads[block]
        known += payloads_of(change)
        for process in {payload.process for payload in payloads_of(change)}:
            own = [payload for payload in known if payload.process == process]
            assert may_have_sent(own), f"the pushes of process {process} are not what error feedback leads to: {own}"
        return found

    def on_commit(self, table: int, version: int, row: Any) -> None:
        """A table has a version, and in it this row: after a transaction, and when its file is opened."""
        updates = self.of_tables.setdefault(table, [])
        before = self._rows.get(table, np.zeros_like(row))
        self._rows[table] = row
        if version == len(updates) + 1:
            what = f"table {table} of block {self._tables_block}"
            self._add(what, updates, version, counts_in_row, before - row, self._begun.get(table, set()))
        elif version != len(updates) or not np.array_equal(before, row):
            self.wrong.append(f"table {table}: {before} of version {len(updates)} became {row} of version {version}")
        self._put_together()

    def _put_together(self) -> None:
        """Say what all tables have as the updates of their block."""
        found = [self.of_tables.get(each, []) for each in range(self._setting.tables)]
        if self._setting.has_rounds:
            common = [set(of_round) for of_round in zip(*found, strict=False)]
            for number, of_round in enumerate(common):
                if len(of_round) > 1:
                    self.wrong.append(f"block {self._tables_block}, update {number + 1}: its tables differ: {sorted(of_round)}")
            self.updates[self._tables_block] = [min(of_round) for of_round in common]
        else:
            counted = [
                {gradient for update in of_table for gradient in update} | self._begun.get(table, set())
                for table, of_table in enumerate(found)
            ]
            self.updates[self._tables_block] = [(gradient,) for gradient in sorted(set.intersection(*counted))]

    def _add(
        self,
        what: str,
        updates: list[tuple[int, ...]],
        version: int,
        decode: Callable[[Any], dict[int, int]],
        total: Any,
        begun: Collection[int] = (),
    ) -> None:
        """Note an update that has changed a sum by `total`; `begun`: what is in the sum beside earlier updates."""
        try:
            counts = decode(total)
        except AssertionError as error:
            self.wrong.append(f"{what}, update {version}: {error}")
            return
        earlier = {gradient for update in updates for gradient in update}.union(begun)
        for gradient, count in counts.items():
            if count > 1 or gradient in earlier:
                self.wrong.append(f"{what}, update {version}: gradient {gradient} counts twice")
        ranks = [self._ranks[gradient // GRADIENTS_MAX] for gradient in counts]
        if self._setting.has_rounds and len(set(ranks)) < len(ranks):
            self.wrong.append(f"{what}, update {version}: one worker has two gradients in it, of {sorted(counts)}")
        # A round of one part has nobody's gradient in blocks of others.
        if self._setting.has_rounds and self._setting.aggregation == "fast" and not self._setting.parts:
            self._check_closed(what, version, set(ranks))
        updates.append(tuple(sorted(counts)))

    def _check_closed(self, what: str, version: int, ranks: set[int]) -> None:
        """A round has closed with everybody for whom it waits, or with the quorum."""
        waited = {rank for rank in range(len(self._setting.programs)) if self.waited_in(version - 1) >> rank & 1}
        needed = len(waited | ranks)
        if len(ranks) < min(self._setting.quorum or needed, needed):
            self.wrong.append(f"{what}, update {version}: it has closed with {sorted(ranks)}, and waits for {sorted(waited)}")

    def on_read(self, block: int, version: int, values: Any, clock: int) -> None:
        """A worker at `clock` is sent a version of a block."""
        updates = self.updates.get(block, [])
        if self._setting.is_published:
            self._read_put(block, updates[:version], version, values)  # it is older than asked for where a version was lost
            return
        found = -sum(value_of(gradient) for update in updates[:version] for gradient in update)
        if block == self._tables_block:
            if version > len(updates):
                self.wrong.append(f"block {block}: a worker is told version {version}, and its tables have {len(updates)}")
        elif self._setting.has_residuals:
            if not np.array_equal(values, self._values[block][version]):
                self.wrong.append(f"block {block}: version {version} is read as {values}")
        elif float(values[0]) != found:
            self.wrong.append(f"block {block}: version {version} is read as {values[0]}, and is {found}")
        if self._setting.has_rounds and version < clock:
            self.wrong.append(f"block {block}: a worker at clock {clock} is sent version {version}")

    def _read_put(self, block: int, updates: list[tuple[int, ...]], version: int, values: Any) -> None:
        expected = value_of(updates[-1][0]) if updates and updates[-1] else 0.0
        if float(values[0]) != expected:
            self.wrong.append(f"block {block}: version {version} is read as {values[0]}, and is {expected}")

    def on_blank(self) -> None:
        """The disk is gone."""
        self.updates, self.of_tables, self._rows, self._begun = {}, {}, {}, {}
        self.payloads, self._values = {}, {}

    def summary(self) -> tuple[Any, ...]:
        """By block, what has been counted; with rounds, in which. See `ahead`, too."""
        if self._setting.has_rounds:
            return tuple((block, tuple(updates)) for block, updates in sorted(self.updates.items()))
        return tuple(
            (block, (tuple(sorted(g for u in updates for g in u)),)) for block, updates in sorted(self.updates.items())
        )

    def carried(self) -> tuple[tuple[int, tuple[Payload, ...]], ...]:
        """By block, what compressed gradients have brought."""
        found = sorted(self.payloads.items()) if self._setting.has_residuals else []
        return tuple((block, tuple(sorted(payloads))) for block, payloads in found)

    def ahead(self) -> tuple[Any, ...]:
        """What each table has counted, where one is ahead of another."""
        found = [tuple(updates) for _, updates in sorted(self.of_tables.items())]
        return tuple(found) if len(set(found)) > 1 else ()

    def take_wrong(self) -> tuple[str, ...]:
        """What has been seen since it was asked last."""
        wrong, self.wrong = tuple(self.wrong), []
        return wrong


def _as_updates(version: int, counted: dict[int, int]) -> list[tuple[int, ...]]:
    """Updates that lead to a version and to what it has, whichever they were."""
    assert set(counted.values()) <= {1}, f"a checkpoint has gradients twice: {counted}"
    return [(), *[()] * (version - 2), tuple(sorted(counted))][-version:] if version else []


def watch_cores(arena: Any, on_publish: Callable[..., None]) -> None:
    """Call `on_publish` with slot, page before, page and version for what the cores of small blocks publish by themselves."""
    lend = arena.lend

    def lent(slot: int, terms: Any) -> Any:
        found = lend(slot, terms)
        found.core = WatchedCore(found.core, arena, slot, partial(on_publish, slot))
        return found

    arena.lend = lent


class WatchedCore:
    """The core of a small block, which tells what it publishes by itself. watched: the core."""

    def __init__(self, core: BlockCore, arena: Any, slot: int, on_publish: Callable[[Any, Any, int], None]) -> None:
        self.watched = core
        self._arena = arena
        self._slot = slot
        self._on_publish = on_publish

    def __getattr__(self, name: str) -> Any:
        return getattr(self.watched, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("watched", "_arena", "_slot", "_on_publish"):
            super().__setattr__(name, value)
        else:
            setattr(self.watched, name, value)

    def contribute(self, *arguments: Any) -> int:
        return self.watching(lambda: self.watched.contribute(*arguments))

    def close_round(self) -> int:
        return self.watching(self.watched.close_round)

    def watching(self, call: Callable[[], int]) -> int:
        """The outcome of a call that may publish."""
        before = self._arena.current(self._slot)
        try:
            return call()
        finally:
            page = self._arena.current(self._slot)
            if page is not before:  # also if the process dies at once
                self._on_publish(before, page, page.version)
