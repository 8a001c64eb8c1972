"""The tables that a model's embeddings declare, and the groups with their rules.

A table has its own rule, or that of the param_group that contains the embedding's handle. A group has either tensors or tables,
so tables have separate groups, which come last. Must not know connections or lookups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from psd.contract.errors import InvalidRequest
from psd.contract.jobspec import GroupSpec
from psd.contract.tables import SparseTableSpec
from psd_client.optimizers import spec_of
from psd_client.torch.embedding import TableModule


@dataclass(frozen=True)
class TableDeclaration:
    """The tables of one model.

    Attributes:
        members: the embeddings that look up rows in each table, by name of the table, in the job's order.
        specs: declarations of the tables. groups: declarations of their groups. options: each group's dict of options, which
            has its scalars; the program may change it.
        by_name: the options, by name of the table.
    """

    members: dict[str, list[TableModule]] = field(default_factory=dict)
    specs: list[SparseTableSpec] = field(default_factory=list)
    groups: list[GroupSpec] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)
    by_name: dict[str, dict[str, Any]] = field(default_factory=dict)


def declare_tables(
    embeddings: Iterable[tuple[str, TableModule]],
    given: Sequence[dict[str, Any]],
    group_of: Mapping[int, int],
    before: Sequence[GroupSpec],
) -> TableDeclaration:
    """Declare the tables of some embeddings.

    Args:
        embeddings: each with its name in the model, once for each name; "" is the model itself.
        given: the optimizer's param_groups. group_of: index of a parameter's param_group, by id() of the parameter.
        before: the groups of the job that come before those of tables; they begin with those of `given`.

    Raises:
        InvalidRequest: two embeddings declare a table differently, or a table has no rule: no param_group contains the handle.
    """
    declared = TableDeclaration()
    names: dict[str, list[str]] = {}
    for name, embedding in embeddings:
        members = declared.members.setdefault(embedding.spec.name, [])
        if embedding not in members:
            members.append(embedding)
        names.setdefault(embedding.spec.name, []).append(name)
    numbers: dict[int, int] = {}
    for name, members in declared.members.items():
        rule = members[0].optimizer
        if any((other.spec, other.optimizer) != (members[0].spec, rule) for other in members):
            raise InvalidRequest(
                f"embedding {name!r}: two modules declare the table of this name differently; give both the same dim, "
                "optimizer, init, seed and options, or another name to one"
            )
        if rule is None:
            index = _given_group(name, members, group_of)
            spec, options = before[index], given[index]
        else:
            spec, options = spec_of(rule), rule.scalars()
        key = id(rule if rule is not None else options)
        if key not in numbers:
            numbers[key] = len(declared.groups)
            declared.groups.append(spec)
            declared.options.append(options)
        declared.by_name[name] = declared.options[numbers[key]]
        modules = tuple(filter(None, names[name]))
        declared.specs.append(replace(members[0].spec, group=len(before) + numbers[key], modules=modules))
    return declared


def _given_group(name: str, members: Sequence[TableModule], group_of: Mapping[int, int]) -> int:
    """The index of the param_group that contains the handles of these embeddings."""
    found = {group_of.get(id(member.handle), -1) for member in members}
    if -1 in found:
        raise InvalidRequest(
            f"embedding {name!r}: has no optimizer, and its parameter is in none of the given optimizer's param_groups; pass "
            "optimizer= to it, or model.parameters() to torch's optimizer"
        )
    if len(found) > 1:
        raise InvalidRequest(f"embedding {name!r}: the modules that share this table are in several param_groups")
    return found.pop()
