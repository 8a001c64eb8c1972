"""The checkpoint that later ones of tables build on: the last whole one, as long as not too much has changed since.

A checkpoint is *whole* if it has all rows of all tables on all shards. Once one is valid, what follows has only the rows that
have changed since; once one of those has more than half as many changed rows as there are rows, the next one is whole
again. All shards see the same manifests, so they mostly decide alike; a shard that does not, because it has been restarted or
was slow to look, writes all of its rows, which is right beside anything. Must not know how snapshots are taken.
"""

from __future__ import annotations

from psd.checkpoint import CheckpointDirectory, Manifest
from psd.contract.errors import PsdError
from psd.state.durability.cuts import Snapshot
from psd_core.table import Mark


class TableBases:
    """Decides by `TablesBlock.marks` what the next snapshots of a job's tables have. Used by the thread that writes them."""

    def __init__(self, directory: CheckpointDirectory) -> None:
        self._directory = directory
        self._names: dict[tuple[Mark | None, ...], str] = {}
        self._latest: tuple[Snapshot, str, tuple[Mark | None, ...]] | None = None

    def base_of(self, snapshot: Snapshot) -> str:
        """Name of the checkpoint that a snapshot builds on; empty if it has all rows."""
        since = tuple(table.since for table in snapshot.tables)
        return self._names.get(since, "") if any(since) else ""

    def on_written(self, snapshot: Snapshot, name: str) -> None:
        """Note that this shard's part of a checkpoint is stored."""
        if snapshot.tables:
            is_full = all(table.is_full for table in snapshot.tables)
            self._latest = snapshot, name, tuple(table.mark if is_full else None for table in snapshot.tables)

    def on_failed(self, snapshot: Snapshot) -> None:
        """Let the next one be whole: what this one builds on may be the reason."""
        self._set(snapshot, (None,) * len(snapshot.tables))
        self._latest = None

    def is_settled(self) -> bool:
        """Look whether the latest checkpoint is valid by now, and decide about the next; False if that is not known yet."""
        if self._latest is None:
            return True
        snapshot, name, marks = self._latest
        try:
            manifest = self._directory.load(name)
        except PsdError:  # other shards are still writing
            return False
        self._latest = None
        if manifest.base is None and all(marks):
            self._names = {marks: name}
            self._set(snapshot, marks)
        elif manifest.base is not None and _changed(manifest) * 2 > manifest.row_count:
            self._set(snapshot, (None,) * len(marks))
        return True

    @staticmethod
    def _set(snapshot: Snapshot, marks: tuple[Mark | None, ...]) -> None:
        if snapshot.job.tables is not None:
            snapshot.job.tables.marks = list(marks)


def _changed(manifest: Manifest) -> int:
    return sum(chunk.rows for part in manifest.parts for chunk in part.chunks if chunk.kind in ("rows", "removed"))
