"""The files of a shard's tables: one for each table, beside the arena, and how much memory each may take.

Makes them when a job is declared, opens them again after the process has died, and removes them with the arena. Must not know
rounds, workers or what the notes in a file mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from psd.contract.config import Limits
from psd.contract.errors import InvalidRequest, OutOfSpace
from psd.contract.jobspec import JobSpec
from psd.contract.tables import SparseTableSpec
from psd_core.arena import ArenaFull
from psd_core.table import OWN, PUSH_MAX, TableSpec, TableStore

_PREFIX = "table-"


def partition_specs(spec: JobSpec, shard_count: int, notes: int, limits: Limits, free_bytes: int) -> list[TableSpec]:
    """The declarations of what one shard holds of each of a job's tables.

    A table with a limit of rows has its share of that limit. The others divide what is left of the shard's memory for tables,
    with the same number of rows each.

    Args:
        notes: words that are kept beside the rows of each. free_bytes: space where the files lie.

    Raises:
        OutOfSpace, InvalidRequest: they do not fit; names the table and the limit.
    """
    left = limits.table_bytes_max or free_bytes // 2
    whose = f"--max-table-bytes {left}" if limits.table_bytes_max else f"half of the free space, {left} bytes"
    push_max = min(PUSH_MAX, limits.push_ids_max * (spec.world_size if spec.consistency.has_rounds else 1))
    unlimited = 0
    found: list[TableSpec] = []
    for table in spec.tables:
        row_bytes = _partition(spec, table, notes, push_max, 1 << 60).row_bytes
        rows = -(-table.rows_max // shard_count)
        if rows > limits.table_rows_max:
            raise InvalidRequest(
                f"table {table.name!r}: max_rows: {rows} rows on each shard are above the shard's --max-table-rows "
                f"{limits.table_rows_max}"
            )
        if rows * row_bytes > left:
            raise OutOfSpace(
                f"table {table.name!r}: max_rows: {rows} rows of {row_bytes} bytes on each shard do not fit: of the shard's "
                f"memory for tables ({whose}), {left} are left"
            )
        left -= rows * row_bytes
        unlimited += 0 if rows else row_bytes
        found.append(_partition(spec, table, notes, push_max, (rows or 1) * row_bytes))
    if not unlimited:
        return found
    rows = min(left // unlimited, limits.table_rows_max)
    for index, table in enumerate(spec.tables):
        if table.rows_max == 0:
            if rows == 0:
                raise OutOfSpace(
                    f"table {table.name!r}: does not fit: of the shard's memory for tables ({whose}), {left} bytes are left"
                )
            found[index] = _partition(spec, table, notes, push_max, rows * found[index].row_bytes)
    return found


def _partition(spec: JobSpec, table: SparseTableSpec, notes: int, push_max: int, max_bytes: int) -> TableSpec:
    group = spec.groups[table.group]
    is_own = group.info.is_custom
    try:
        return TableSpec(
            table.name,
            table.dim,
            OWN if is_own else group.rule,
            tuple(group.flags),
            {} if is_own else dict(zip(group.info.constants, group.constants, strict=True)),
            table.init,
            table.seed,
            max_bytes,
            table.admit_after,
            table.admit_probability,
            table.at_limit,
            push_max,
            notes,
            table.updates,
            table.dtype,
            tuple(group.constants) if is_own else (),
        )
    except ValueError as error:
        raise InvalidRequest(f"table {table.name!r}: {error}") from error


def create_stores(directory: Path, specs: Sequence[TableSpec], crash_point: Callable[[str], None] | None) -> list[TableStore]:
    """Make an empty store for each; all or none.

    Raises:
        OutOfSpace: the directory has no room for them.
    """
    remove_stores(directory)
    stores: list[TableStore] = []
    try:
        for index, spec in enumerate(specs):
            stores.append(TableStore.create(directory / f"{_PREFIX}{index}", spec, crash_point=crash_point))
    except ArenaFull as error:
        close_stores(stores, remove=True)
        raise OutOfSpace(f"{directory} has no room for table {specs[len(stores)].name!r}: {error.strerror}") from error
    except BaseException:
        close_stores(stores, remove=True)
        raise
    return stores


def open_stores(directory: Path, count: int, crash_point: Callable[[str], None] | None) -> list[TableStore]:
    """Take over what another process has left.

    Raises:
        FileNotFoundError, ArenaBusy, ArenaCorrupt, ArenaFull: one of them cannot be; none stays open.
    """
    stores: list[TableStore] = []
    try:
        stores.extend(TableStore.open(directory / f"{_PREFIX}{index}", crash_point=crash_point) for index in range(count))
    except BaseException:
        close_stores(stores, remove=False)
        raise
    return stores


def close_stores(stores: Sequence[TableStore], *, remove: bool) -> None:
    """Close all of them. remove: delete their files, too."""
    for store in stores:
        store.close(remove=remove)


def store_paths(directory: Path) -> list[Path]:
    """The files of tables."""
    return sorted(directory.glob(f"{_PREFIX}*"))


def remove_stores(directory: Path) -> None:
    """Delete the files of tables that nobody has open."""
    for path in store_paths(directory):
        path.unlink(missing_ok=True)
