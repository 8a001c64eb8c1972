"""A table's partition as its declaration has it: the C object, what its file takes at most, the hash of ids, initial values.

Must not open, map or lock anything.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd_core import _table
from psd_core import _table_format as form
from psd_core._store_format import align
from psd_core._table_arguments import as_ids
from psd_core._table_format import ROWWISE_ADAGRAD, TableSpec
from psd_core.initial import Initial

GROWTH_BYTES_MAX = 1 << 20
"""Largest number of bytes that a region takes, or gives back, at a time."""
_PAGE_BYTES = 4096
_MOVING_BYTES_MAX = GROWTH_BYTES_MAX + (1 << 19)
"""Bytes that two indexes take beside those of one, while entries go from one to the other."""


def mixed(ids: NDArray[Any]) -> NDArray[np.uint64]:
    """Return 64-bit hashes of ids, a bijection and part of every format: SplitMix64's finalizer.

    Args:
        ids: any shape of int64|uint64.
    """
    flat = as_ids(np.asarray(ids).reshape(-1))
    out = np.empty_like(flat)
    _table.mixed(flat, out)
    return out.reshape(np.shape(ids))


def initial_rows(name: str, dim: int, init: Initial, seed: int, ids: NDArray[Any]) -> NDArray[np.float32]:
    """Return the values (n, dim) of rows that nobody has trained, as a table of this name has them.

    Args:
        ids: (n,) int64|uint64.

    Raises:
        InvalidArray: the ids are something else.
    """
    keys = as_ids(ids)
    out = np.empty((len(keys), dim), np.float32)
    _table.initial(keys, out, _seed_of(name, seed), init.number, *init.numbers)
    return out


def bytes_max(spec: TableSpec) -> int:
    """Bytes that a partition's file takes at most: rows, heads, indexes, spare places for the largest push, records, rings.

    Large pages do not add to it. Where the file system cannot have holes, the index that is left takes its part twice.
    """
    sizes = [align(size, _PAGE_BYTES) for _, size in partition_of(spec, None).regions]
    other = sizes[_table.OTHER_INDEX]
    return form.SUPERBLOCK.nbytes + sum(sizes) - other + min(other, _MOVING_BYTES_MAX)


def partition_of(spec: TableSpec, crash_point: Any) -> _table.Partition:
    """The C object of a declaration, which has no mapping yet."""
    facts = spec.facts
    low, high = spec.init.numbers
    return _table.Partition(
        dim=spec.dim,
        width=spec.layout.width,
        rows_max=spec.max_rows,
        push_max=spec.push_max,
        notes=spec.notes,
        seed=_seed_of(spec.name, spec.seed),
        rule=facts.number,
        rowwise=spec.rule == ROWWISE_ADAGRAD,
        init=spec.init.number,
        a=low,
        b=high,
        admit_after=spec.admit_after,
        admit_below=max(1, round(spec.admit_probability * 2**32)),
        evicts=spec.at_limit == "evict",
        flags=tuple(flag in spec.flags for flag in facts.flags),
        slot_at=spec.layout.slots,
        slot_start=spec.layout.starts,
        is_half=spec.dtype == "bfloat16",
        catches_up=spec.catches_up,
        settles=facts.row.settles,
        rest_without=tuple(name in facts.row.rests_without for name in facts.scalars),
        decay_at=facts.scalars.index("weight_decay") if "weight_decay" in facts.scalars else -1,
        on_store=crash_point,
    )


def _seed_of(name: str, seed: int) -> int:
    """The seed of a table, its name included: FNV-1a of the name, on the seed's hash."""
    value = int(mixed(np.array([seed], np.uint64))[0])
    for byte in name.encode():
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value
