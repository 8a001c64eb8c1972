"""Jobs with tables: the stores of their shards, stored at a cut and compared with what was read."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
from helpers_checkpoint import cut_of, parts

from psd.checkpoint import CheckpointDirectory, Cut
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.contract.layout import Layout
from psd.contract.tables import SparseTableSpec
from psd_core.distinct import shard_of
from psd_core.table import Mark, TableSpec, TableStore

DIMS = (3, 1)


def tables_spec(**fields: Any) -> JobSpec:
    """A tensor and two tables: "user" under Adagrad, "item" under SGD."""
    return JobSpec(
        1,
        (TensorSpec("w", (9000,)),),
        (GroupSpec("sgd"), GroupSpec("adagrad", (), (0.0,)), GroupSpec("sgd")),
        tables=(SparseTableSpec("user", 3, 1), SparseTableSpec("item", 1, 2)),
        **fields,
    )


class ShardTables:
    """The tables of a job's shards."""

    def __init__(self, path: Path, shard_count: int) -> None:
        self.shard_count = shard_count
        self.spec = tables_spec()
        self.step = 0
        path.mkdir()
        self.stores = [
            [
                TableStore.create(path / f"user-{index}", TableSpec("user", 3, "adagrad", max_rows=20_000)),
                TableStore.create(path / f"item-{index}", TableSpec("item", 1, "sgd", max_rows=20_000)),
            ]
            for index in range(shard_count)
        ]

    def write(self, table: int, ids: Any, value: float) -> None:
        """Store rows, which differ by id, last used at the step, which is the next."""
        self.step += 1
        keys = np.asarray(ids, np.uint64)
        rows = np.float32(value) + keys[:, None].astype(np.float32) * np.ones(2 * DIMS[0] if table == 0 else 1, np.float32)
        for index, where in enumerate(self._shares(keys)):
            self.stores[index][table].write(keys[where], rows[where], step=self.step)

    def remove(self, table: int, ids: Any) -> None:
        keys = np.asarray(ids, np.uint64)
        for index, where in enumerate(self._shares(keys)):
            self.stores[index][table].remove(keys[where])

    def _shares(self, keys: Any) -> list[Any]:
        owners = shard_of(keys, self.shard_count)
        return [owners == index for index in range(self.shard_count)]

    def contents(self, table: int) -> dict[int, tuple[int, bytes]]:
        """Last use and row of each id."""
        return {
            int(head["id"]): (int(head["used"]), row.tobytes())
            for stores in self.stores
            for batch in stores[table].walk()
            for head, row in zip(batch.heads, batch.rows, strict=True)
        }

    def store(
        self,
        directory: CheckpointDirectory,
        step: int,
        *,
        base: str = "",
        since: list[list[Mark]] | None = None,
        shards: Any = None,
    ) -> tuple[Cut, list[list[Mark]]]:
        """Store a cut, or what has changed since the marks of another one; return it and its marks."""
        cut = cut_of(self.spec, self.shard_count, step, cut_id=f"a{step}")
        marks = []
        for index in range(self.shard_count) if shards is None else shards:
            with contextlib.ExitStack() as stack:
                snapshots = [
                    stack.enter_context(store.snapshot(since[index][table] if since else None))
                    for table, store in enumerate(self.stores[index])
                ]
                marks.append([snapshot.mark for snapshot in snapshots])
                directory.write_part(cut, index, parts(cut, index), tables=snapshots, base=base)
        if shards is None:
            assert directory.complete(cut)
        return cut, marks


def stored(directory: CheckpointDirectory, name: str, shard_count: int, table: int) -> dict[int, tuple[int, bytes]]:
    """Last use and row of each id in a checkpoint, read by that many shards; each has its own."""
    manifest = directory.load(name)
    found: dict[int, tuple[int, bytes]] = {}
    for index in range(shard_count):
        for batch in directory.read_table(manifest, Layout(manifest.spec, shard_count), index, table):
            assert (shard_of(batch.ids, shard_count) == index).all()
            for key, used, row in zip(batch.ids.tolist(), batch.used.tolist(), batch.rows, strict=True):
                assert key not in found
                found[key] = (used, row.tobytes())
    return found
