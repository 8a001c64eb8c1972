"""The checkpoint of tables on which later ones build: the last whole one, as long as not too much has changed since.

A checkpoint is *whole* if it has all rows of all tables on all shards. Once one is valid, the checkpoints after it have only
the rows that have changed since. If one of those has more than half as many changed rows as there are rows, the next one is
whole again. The shard that announces a cut decides for all shards: the cut names its base. A shard that does not remember the
base, because it was restarted, writes all its rows, which is always right. Must not know how snapshots are taken.
"""

from __future__ import annotations

from itertools import islice

from psd.checkpoint import CheckpointDirectory, Manifest
from psd.contract.errors import PsdError
from psd.state.cuts.snapshots import Snapshot

REMEMBERED = 3
"""Whole checkpoints that a shard remembers: the one on which others build, and those that may take its place."""


class TableBases:
    """Sets `TablesBlock.base`, and so which rows the next snapshots of tables have. Used by the thread that writes them."""

    def __init__(self, directory: CheckpointDirectory) -> None:
        self._directory = directory
        self._latest: tuple[Snapshot, str] | None = None

    def on_written(self, snapshot: Snapshot, name: str) -> None:
        """Note that this shard's part of a checkpoint is stored."""
        tables = snapshot.job.tables
        if tables is not None and snapshot.tables:
            self._latest = snapshot, name
            if all(table.is_full for table in snapshot.tables):
                newest = dict(islice(tables.bases.items(), max(0, len(tables.bases) + 1 - REMEMBERED), None))
                tables.bases = {**newest, name: [table.mark for table in snapshot.tables]}

    def on_failed(self, snapshot: Snapshot) -> None:
        """Let the next checkpoint be whole: the base of this one may be the reason why it failed."""
        self._latest = None
        if snapshot.job.tables is not None:
            snapshot.job.tables.base = ""
            snapshot.job.tables.bases = {}

    def is_settled(self) -> bool:
        """Decide about the next checkpoint if the latest one is valid by now; False if that is not known yet."""
        if self._latest is None:
            return True
        snapshot, name = self._latest
        try:
            manifest = self._directory.load(name)
        except PsdError:  # other shards are still writing
            return False
        self._latest = None
        assert snapshot.job.tables is not None
        if manifest.base is None:
            snapshot.job.tables.base = name
        elif _changed(manifest) * 2 > manifest.row_count:
            snapshot.job.tables.base = ""
        return True


def _changed(manifest: Manifest) -> int:
    return sum(chunk.length for part in manifest.parts for chunk in part.chunks if chunk.kind in ("rows", "removed"))
