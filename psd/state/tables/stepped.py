"""The core in C that the tables' block shares with armed steps (psd_core/steps.py).

Must not know rounds, sessions or stores' contents.
"""

from __future__ import annotations

from collections.abc import Sequence

from psd.contract.jobspec import JobSpec
from psd.contract.staleness import RATE
from psd.state.tables.rounds import RowChecks
from psd_core.steps import TablesCore
from psd_core.table import TableStore


def core_of(spec: JobSpec, stores: Sequence[TableStore], checks: RowChecks) -> TablesCore:
    """The core of a shard's tables."""
    first, before = [], 0
    for group in spec.groups:
        first.append(before)
        before += len(group.info.scalars)
    of_stores = []
    for table, store in zip(spec.tables, stores, strict=True):
        group, names = spec.groups[table.group], store.spec.facts.scalars
        places = [first[table.group] + group.info.scalars.index(name) for name in names]
        rate = names.index("lr") if group.staleness == RATE and "lr" in names else -1
        of_stores.append((store, places, rate))
    has_rounds = spec.consistency.has_rounds
    return TablesCore(of_stores, spec.world_size, has_rounds, checks.shards, checks.shard, checks.step_ids_max)
