"""psdctl status as text: one complete snapshot of a job. The numbers are those of the catalogue, in columns like psdctl top's.

Pure functions on a snapshot. Must not know how it was taken, nor where the text goes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TypeVar

from psd.watch.snapshot import JobSnapshot, RelaySnapshot, ShardSnapshot
from psd.watch.top.columns import (
    LEARNER_COLUMNS,
    READER_COLUMNS,
    TABLE_COLUMNS,
    Column,
    grid,
    learners_of,
    status_columns,
    status_worker_columns,
)
from psd.watch.words import aligned, count_text, duration, progress_text, size

T = TypeVar("T")


def as_text(now: JobSnapshot) -> str:
    """Tables for people, without a final line end."""
    shards = [shard for shard in now.shards if shard.state != "no answer"]
    stored = [shard for shard in shards if shard.checkpoint_dir]
    with_vectors = [shard for shard in shards if shard.vectors]
    parts = [
        "\n".join([_job_line(now), *(f"order: {order}" for order in now.orders)]),
        "\n".join(_relay_line(shard.address, shard.relay) for shard in shards if shard.relay is not None),
        _table(status_columns("shards"), now.shards),
        _table(status_worker_columns(now.workers), now.workers),
        _table(LEARNER_COLUMNS, learners_of(now.workers)),
        "\n".join(wait.text for wait in now.waits),
        _table(status_columns("traffic"), shards),
        _table(TABLE_COLUMNS, now.tables),
        "\n".join(filter(None, [_table(READER_COLUMNS, now.readers), *now.lagging])),
        _table(status_columns("vectors"), with_vectors),
        _age_table(shards) if any(shard.ages for shard in shards) else "",
        "\n".join(filter(None, [_table(status_columns("checkpoints"), stored), *_errors(stored)])),
        "\n".join(f"problem: {text}" for text in now.problems),
    ]
    return "\n\n".join(filter(None, parts))


def _table(columns: Sequence[Column[T]], items: Sequence[T]) -> str:
    return "\n".join(grid(columns, items, sys.maxsize).lines()) if items else ""


def _job_line(now: JobSnapshot) -> str:
    if now.state == "unreachable":
        return "no shard answered"
    if not now.consistency and any(shard.relay is not None for shard in now.shards):
        return f"run {now.run_id or '-'}, as relays have it"
    if not now.consistency:
        return f"run {now.run_id or '-'}: nothing declared yet"
    declared = next(shard for shard in now.shards if shard.numbers)
    quorum = f", quorum {now.quorum}" if 0 < now.quorum < now.world_size else ""
    compression = f", compressed as {now.compression}" if now.compression else ""
    restored = f", gone on from checkpoint {now.restored_from}" if now.restored_from else ""
    tables = f"{count_text(len(now.tables), 'table')}, " if now.tables else ""
    end = f" ({progress_text(now.clock, now.total_steps, now.numbers.get('time_left_s'))})" if now.total_steps else ""
    return (
        f"run {now.run_id}: {now.consistency}, {now.reduction}{compression}, {count_text(now.world_size, 'worker')}{quorum}, "
        f"clock {now.clock}{end}, {count_text(declared.tensors, 'tensor')}, {tables}{size(now.parameter_bytes)} parameters, "
        f"{size(now.slot_bytes)} slots{restored}"
    )


def _relay_line(address: str, relay: RelaySnapshot) -> str:
    version = "no version yet"
    if "version" in relay.numbers:
        version = f"version {relay.version}, {relay.behind} behind, for {duration(relay.age_s)}"
    heard = "has not heard from them" if relay.heard_s < 0 else f"heard from them {duration(relay.heard_s)} ago"
    fetched, readers = count_text(relay.versions, "version"), count_text(relay.readers, "reader")
    return f"relay {address} of {relay.of}: {version}; {heard}; {readers}; {fetched} fetched"


def _age_table(shards: Sequence[ShardSnapshot]) -> str:
    """Numbers of gradients by the age at which they were applied."""
    columns = max(len(shard.ages) for shard in shards)
    names = [f"{index}" if index < 3 else f"{(1 << index - 2) + 1}-{1 << index - 1}" for index in range(columns)]
    rows = [("SHARD", "AGE", *names)]
    for shard in shards:
        counts = [f"{count}" for count in shard.ages] + ["0"] * (columns - len(shard.ages))
        rows.append((f"{shard.index}", "", *counts))
    return table(rows, left={0, 1})


def _errors(shards: Sequence[ShardSnapshot]) -> list[str]:
    """The last errors of checkpoints; an error that several shards report is shown once."""
    errors: dict[str, list[str]] = {}
    for shard in shards:
        if shard.checkpoint_error:
            errors.setdefault(shard.checkpoint_error, []).append(f"{shard.index}")
    return [f"checkpoint error of shard {', '.join(indexes)}: {error}" for error, indexes in errors.items()]


def table(rows: Sequence[tuple[str, ...]], left: set[int]) -> str:
    """Rows in aligned columns; the first row has the headings. left: indices of columns aligned on the left."""
    return "\n".join(aligned(rows, [index in left for index in range(len(rows[0]))]))
