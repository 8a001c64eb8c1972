"""Limits of a shard on a job spec: first on the counts in its message, then on the job.

Must not know what a shard does with the job.
"""

from __future__ import annotations

from psd.contract.config import Limits
from psd.contract.errors import InvalidRequest, InvalidTensor
from psd.contract.jobspec import GROUP_ENTRIES_MAX, GROUPS_MAX, JobSpec
from psd.v1 import job_pb2


def check_limits(spec: JobSpec, limits: Limits) -> None:
    """Raise InvalidRequest or InvalidTensor if the job is larger than a shard accepts."""
    if spec.world_size > limits.workers_max:
        raise InvalidRequest(
            f"world_size: {spec.world_size} is above the shard's --max-workers {limits.workers_max}; "
            f"restart the shards with --max-workers {spec.world_size}"
        )
    longest = max((len(name.encode()) for t in spec.tensors for name in (t.name, *t.aliases)), default=0)
    if longest > limits.name_bytes_max:
        raise InvalidTensor(f"tensors.name: has {longest} bytes, the shard's --max-name-bytes is {limits.name_bytes_max}")
    if len(spec.tables) > limits.tables_max:
        raise InvalidRequest(f"tables: {len(spec.tables)} are above the shard's --max-tables {limits.tables_max}")
    for table in spec.tables:
        if table.dim > limits.table_dim_max:
            raise InvalidRequest(
                f"table {table.name!r}: dim: {table.dim} is above the shard's --max-table-dim {limits.table_dim_max}"
            )
        longest = max((len(name.encode()) for name in table.modules), default=0)
        if longest > limits.name_bytes_max:
            raise InvalidRequest(
                f"table {table.name!r}: modules: one has {longest} bytes, the shard's --max-name-bytes is "
                f"{limits.name_bytes_max}"
            )
    elements = sum(t.size for t in spec.tensors)
    if elements > limits.elements_max:
        raise InvalidTensor(f"tensors: {elements} elements are above the shard's --max-elements {limits.elements_max}")


def check_counts(message: job_pb2.JobSpec, limits: Limits) -> None:
    """Check the counts in a message before Python objects are made from it."""
    if len(message.tensors) > limits.tensors_max:
        raise InvalidTensor(f"tensors: {len(message.tensors)} are above the shard's --max-tensors {limits.tensors_max}")
    aliases = sum(len(tensor.aliases) for tensor in message.tensors)
    if aliases > limits.tensors_max:
        raise InvalidTensor(f"tensors.aliases: {aliases} are above the shard's --max-tensors {limits.tensors_max}")
    if len(message.tables) > limits.tables_max:
        raise InvalidRequest(f"tables: {len(message.tables)} are above the shard's --max-tables {limits.tables_max}")
    modules = sum(len(table.modules) for table in message.tables)
    if modules > limits.tensors_max:
        raise InvalidRequest(f"tables.modules: {modules} are above the shard's --max-tensors {limits.tensors_max}")
    if len(message.groups) > GROUPS_MAX:
        raise InvalidRequest(f"groups: there must be 1 to {GROUPS_MAX}, got {len(message.groups)}")
    for group in message.groups:
        for field in ("flags", "constants", "slots", "scalars"):
            if len(getattr(group, field)) > GROUP_ENTRIES_MAX:
                raise InvalidRequest(f"groups.{field}: {len(getattr(group, field))} are above the limit of {GROUP_ENTRIES_MAX}")
