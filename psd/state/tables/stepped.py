"""The core in C that the tables' block shares with armed steps (psd_core/steps.py).

Must not know rounds, sessions or stores' contents.
"""

from __future__ import annotations

from collections.abc import Sequence

from psd.contract.jobspec import JobSpec
from psd.contract.staleness import RATE
from psd.state.aggregation.consistency import Policy, Sync
from psd.state.tables.rounds import RowChecks, TableSums
from psd_core.steps import TablesCore
from psd_core.table import TableStore


def core_of(spec: JobSpec, stores: Sequence[TableStore], checks: RowChecks, policy: Policy, sums: TableSums) -> TablesCore:
    """The core of a shard's tables. sums: of the open round."""
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
    return TablesCore(
        of_stores,
        sums.tables,
        spec.world_size,
        before,
        policy.has_rounds,
        spec.reduction == "mean",
        policy.quorum if isinstance(policy, Sync) else 0,
        checks.shards,
        checks.shard,
        checks.step_ids_max,
    )
