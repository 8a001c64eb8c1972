"""The values of a table in a checkpoint, without its slots: for other programs, and for jobs that begin with them.

In a table that catches up, rows are stored as they were when last touched. Here they become what a worker would have read: they
pass through a small table in ordinary memory, whose kernel brings them to the table's step. Must not know files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from typing_extensions import override

from psd.checkpoint.manifest import Manifest
from psd.checkpoint.plain import ValueRows, ValueTable
from psd.checkpoint.row_reading import StoredTable
from psd.checkpoint.storage import FileStore
from psd.checkpoint.tables import StoredRows
from psd_core.table import TableSpec, TableStore


class StoredValues(ValueTable):
    """The values of a table in a checkpoint; see ValueTable."""

    def __init__(self, storage: FileStore, manifest: Manifest, table: int) -> None:
        self._stored = StoredTable(storage, manifest, table)
        self._spec = manifest.spec.tables[table]
        self._group = manifest.spec.groups[self._spec.group]
        self.location = f"checkpoint {manifest.name}"
        self.count = self._stored.count
        self.dim = self._spec.dim

    @override
    def rows(self) -> Iterator[ValueRows]:
        if self._spec.updates != "catch_up":
            for batch in self._stored:
                yield ValueRows(batch.ids, batch.rows[:, : self.dim])
            return
        with tempfile.TemporaryDirectory(prefix="psd-values-") as place:
            for batch in self._stored:
                yield self._caught_up(Path(place) / "table", batch)

    def _caught_up(self, path: Path, batch: StoredRows) -> ValueRows:
        group, n = self._group, len(batch.ids)
        spec = TableSpec.of(self._spec, rule=group.rule, flags=group.flags, constants=group.constants, push_max=n, max_rows=n)
        store = TableStore.create(path, spec)
        try:
            none = np.empty((0, self._stored.width), np.float32)
            history = self._stored.history if self._stored.history.size else None
            store.write(np.empty(0, np.uint64), none, step=self._stored.step, history=history)
            store.write(batch.ids, batch.rows)
            return ValueRows(batch.ids, store.read(batch.ids))
        finally:
            store.close(remove=True)
