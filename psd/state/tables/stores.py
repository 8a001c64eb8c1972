"""The files of a shard's tables: one for each table, beside the arena, and how much memory each may take.

Makes the files when a job is declared, opens them again after the process has died, and removes them with the arena. Must not
know rounds, workers or what the notes in a file mean.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from psd.contract.config import Limits
from psd.contract.errors import InvalidRequest, OutOfSpace
from psd.contract.jobspec import JobSpec
from psd.contract.tables import SparseTableSpec
from psd_core.arena import StoreFull
from psd_core.table import OWN, PUSH_MAX, TableSpec, TableStore, bytes_max

logger = logging.getLogger(__name__)

_PREFIX = "table-"


def partition_specs(spec: JobSpec, shard: tuple[int, int], notes: int, limits: Limits, free_bytes: int) -> list[TableSpec]:
    """The specs of one shard's part of each of a job's tables.

    A table with a limit of rows gets this shard's share of that limit. The others get the same number of rows each, as many as
    fit into what is left of the shard's memory for tables. A table counts with the most that its file may ever take
    (psd_core.table.bytes_max).

    Args:
        shard: index and count. notes: words that each store keeps beside its rows. free_bytes: space where the files lie.

    Raises:
        OutOfSpace, InvalidRequest: the tables do not fit; names the table and the limit.
    """
    left = limits.table_bytes_max or free_bytes // 2
    whose = f"--max-table-bytes {left}" if limits.table_bytes_max else f"half of the free space, {left} bytes"
    push_max = min(PUSH_MAX, limits.push_ids_max * (spec.world_size if spec.consistency.has_rounds else 1))
    index, count = shard

    def partition(table: SparseTableSpec, rows: int) -> TableSpec:
        return _partition(spec, table, max_rows=rows, push_max=push_max, notes=notes)

    found: list[TableSpec] = []
    for table in spec.tables:
        rows = table.max_rows // count + (index < table.max_rows % count)  # adds up to max_rows over all shards
        if 0 < table.max_rows < count:
            raise InvalidRequest(f"table {table.name!r}: max_rows: {table.max_rows} rows are fewer than the {count} shards")
        if rows > limits.table_rows_max:
            raise InvalidRequest(
                f"table {table.name!r}: max_rows: {rows} rows on each shard are above the shard's --max-table-rows "
                f"{limits.table_rows_max}"
            )
        found.append(partition(table, rows or 1))
        nbytes = bytes_max(found[-1])
        if nbytes > left:
            what = f"max_rows: {rows} rows on each shard, which take up to {nbytes} bytes," if rows else f"{nbytes} bytes"
            raise OutOfSpace(
                f"table {table.name!r}: {what} do not fit: of the shard's memory for tables ({whose}), {left} are left"
            )
        left -= nbytes if rows else 0
    unlimited = [number for number, table in enumerate(spec.tables) if table.max_rows == 0]
    if unlimited:
        tables = [spec.tables[number] for number in unlimited]
        low, high = 1, limits.table_rows_max
        while low < high:  # the most rows that fit
            rows = (low + high + 1) // 2
            fits = all(rows * found[number].row_bytes <= left for number in unlimited)  # else there may be too many places
            if fits and sum(bytes_max(partition(table, rows)) for table in tables) <= left:
                low = rows
            else:
                high = rows - 1
        made = [partition(table, low) for table in tables]
        if sum(map(bytes_max, made)) > left:
            raise OutOfSpace(
                f"table {tables[-1].name!r}: does not fit: of the shard's memory for tables ({whose}), {left} bytes are left, "
                f"for {len(tables)} of them"
            )
        for number, store in zip(unlimited, made, strict=True):
            found[number] = store
    return found


def _partition(spec: JobSpec, table: SparseTableSpec, **sizes: int) -> TableSpec:
    group = spec.groups[table.group]
    try:
        return TableSpec.of(
            table,
            rule=OWN if group.info.is_custom else group.rule,
            flags=group.flags,
            constants=group.constants,
            **sizes,
        )
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def create_stores(directory: Path, specs: Sequence[TableSpec], crash_point: Callable[[str], None] | None) -> list[TableStore]:
    """Make an empty store for each spec; all or none.

    Raises:
        OutOfSpace: the directory has no room for them.
    """
    remove_stores(directory)
    stores: list[TableStore] = []
    try:
        for index, spec in enumerate(specs):
            stores.append(TableStore.create(directory / f"{_PREFIX}{index}", spec, crash_point=crash_point))
    except StoreFull as error:
        drop_stores(stores)
        raise OutOfSpace(f"{directory} has no room for table {specs[len(stores)].name!r}: {error.strerror}") from error
    except BaseException:
        drop_stores(stores)
        raise
    return stores


def open_stores(directory: Path, count: int, crash_point: Callable[[str], None] | None) -> list[TableStore]:
    """Open the stores that an earlier process has left.

    Raises:
        FileNotFoundError, ArenaBusy, ArenaCorrupt, StoreFull: one of them cannot be opened; none stays open.
    """
    stores: list[TableStore] = []
    try:
        stores.extend(TableStore.open(directory / f"{_PREFIX}{index}", crash_point=crash_point) for index in range(count))
    except BaseException:
        close_stores(stores, remove=False)
        raise
    return stores


def close_stores(stores: Sequence[TableStore], *, remove: bool) -> None:
    """Close all stores. remove: delete their files, too.

    Raises:
        OSError: a file cannot be deleted; all stores are closed, and the other files are deleted.
    """
    with contextlib.ExitStack() as closing:
        for store in stores:
            closing.callback(store.close, remove=remove)


def drop_stores(stores: Sequence[TableStore]) -> None:
    """Close all stores and delete their files. A file that cannot be deleted is replaced by the stores made next."""
    try:
        close_stores(stores, remove=True)
    except OSError as error:
        logger.warning("the file of a table that was given up cannot be deleted, and will be replaced: %s", error)


def store_paths(directory: Path) -> list[Path]:
    """The files of tables."""
    return sorted(directory.glob(f"{_PREFIX}*"))


def remove_stores(directory: Path) -> None:
    """Delete the files of tables that nobody has open."""
    for path in store_paths(directory):
        path.unlink(missing_ok=True)
