"""Reads the rows of a checkpoint's tables: for the shards of any layout, and for other programs.

A shard has the ids whose hash is in its run, for any number of shards; so it reads the parts whose runs overlap its own, and
skips the rows of other shards in them. Chunks are read a few ahead, and checked before a row is used. If a checkpoint builds on
another, the changed rows come first, then the other's rows that were neither changed nor removed: each row once. Only a few
chunks and the ids of changed rows are in memory. Must not know where the rows go.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from psd.checkpoint.chunks import Chunk, ChunkKind
from psd.checkpoint.manifest import Manifest, Part
from psd.checkpoint.reading import read_ahead, read_chunk
from psd.checkpoint.storage import FileStore
from psd.checkpoint.tables import HISTORY, REMOVED, ROWS, StoredRows, decode_rows
from psd.contract.errors import CheckpointCorrupt, SpecMismatch
from psd.contract.layout import Layout
from psd_core.distinct import shard_of


class StoredTable:
    """One shard's rows of a table in a checkpoint. Iterating it reads the files, and yields StoredRows, none of them empty.

    Attributes:
        step: the table's step. If parts differ, the largest, because with it no rule takes a larger step than it would have.
        clock: clock of the last push, by which rows are marked as used; the largest, since no row is used after it.
        count: number of rows; an estimate if the shard shares stored parts with other shards.
        width: numbers in a row, value and slots. history: that of the part with the step above.
    """

    def __init__(self, storage: FileStore, manifest: Manifest, table: int, shard_index: int = 0, shard_count: int = 1) -> None:
        self._storage = storage
        self._manifest = manifest
        self._table = table
        self._shard = (shard_index, shard_count)
        stored = manifest.shard_count
        self._parts = [
            part
            for part in manifest.parts
            if part.shard_index * shard_count < (shard_index + 1) * stored
            and (part.shard_index + 1) * shard_count > shard_index * stored
        ]
        self._is_all_ours = all(
            part.shard_index * shard_count >= shard_index * stored
            and (part.shard_index + 1) * shard_count <= (shard_index + 1) * stored
            for part in self._parts
        )
        latest = max(manifest.parts, key=lambda part: part.tables[table].step)
        self.step = latest.tables[table].step
        self.clock = max(part.tables[table].clock for part in manifest.parts)
        self.count = int(sum(part.tables[table].rows * self._share(part.shard_index) for part in self._parts))
        self.width = latest.tables[table].width
        self.history = self._history(latest)

    def _share(self, stored_index: int) -> float:
        """Fraction of a stored part's run of hashes that belongs to this shard."""
        index, count = self._shard
        stored = self._manifest.shard_count
        low, high = max(stored_index / stored, index / count), min((stored_index + 1) / stored, (index + 1) / count)
        return (high - low) * stored if not self._is_all_ours else 1.0

    def _history(self, part: Part) -> NDArray[np.float64]:
        for chunk in _chunks(part, self._table, HISTORY):
            return np.frombuffer(read_chunk(self._storage, self._manifest, chunk), "<f8").reshape(chunk.length, -1)
        return np.empty((0, 0))

    def __iter__(self) -> Iterator[StoredRows]:
        for part in self._parts:
            found = 0
            for batch in self._all_of(part):
                found += len(batch.ids)
                if not self._is_all_ours:
                    index, count = self._shard
                    batch = _where(batch, shard_of(batch.ids, count) == index)
                if len(batch.ids):  # empty if all were changed later, or belong to other shards
                    yield batch
            if found != part.tables[self._table].rows:
                raise CheckpointCorrupt(
                    f"{self._manifest.name}: part {part.shard_index} has {found} rows of table {self._table}, and its document "
                    f"says {part.tables[self._table].rows}"
                )

    def _all_of(self, part: Part) -> Iterator[StoredRows]:
        manifest = self._manifest
        if part.tables[self._table].is_full:
            yield from self._rows_in(manifest, part)
            return
        assert manifest.base is not None
        removed = _chunks(part, self._table, REMOVED)
        gone = [np.frombuffer(read_chunk(self._storage, manifest, chunk), "<u8") for chunk in removed]
        for batch in self._rows_in(manifest, part):
            gone.append(batch.ids)
            yield batch
        stale = np.unique(np.concatenate([np.empty(0, np.uint64), *gone]))
        del gone
        for batch in self._rows_in(manifest.base, manifest.base.parts[part.shard_index]):
            if len(stale):
                at = np.minimum(np.searchsorted(stale, batch.ids), len(stale) - 1)
                batch = _where(batch, stale[at] != batch.ids)
            yield batch

    def _rows_in(self, manifest: Manifest, part: Part) -> Iterator[StoredRows]:
        chunks = _chunks(part, self._table, ROWS)
        with closing(read_ahead(self._storage, manifest, chunks)) as coming:
            for chunk, data in zip(chunks, coming, strict=True):
                yield decode_rows(chunk, data)


def restored_table(storage: FileStore, manifest: Manifest, layout: Layout, shard_index: int, table: int) -> StoredTable:
    """Rows of a table for one shard, as `CheckpointDirectory.read_table` says."""
    if difference := manifest.spec.difference_from_stored(layout.spec, manifest.name):
        raise SpecMismatch(difference)
    return StoredTable(storage, manifest, table, shard_index, layout.shard_count)


def _where(batch: StoredRows, mask: NDArray[np.bool_]) -> StoredRows:
    return StoredRows(batch.ids[mask], batch.used[mask], batch.rows[mask])


def _chunks(part: Part, table: int, kind: ChunkKind) -> list[Chunk]:
    return [chunk for chunk in part.chunks if (chunk.of, chunk.kind) == (table, kind.name)]
