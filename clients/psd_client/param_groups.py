"""Parameter groups of the dict face: which names share which scalars, like torch's param_groups. Groups of tables come last.

Owns the dicts that the user may change between pushes, and checks them at each push. Must not know shards or values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from psd.contract.errors import InvalidRequest
from psd.contract.jobspec import GroupSpec
from psd_client.optimizers import scalar_values, spec_of
from psd_core.optimizer import Optimizer


class ParamGroups:
    """The groups of a job.

    Args:
        names: names of all parameters.
        optimizer: the rule, and the scalars that a group does not set itself; None if there are no names.
        groups: dicts such as {"params": [names], "lr": ..., ...}; None: one group of all parameters, if there are any.
        rules_of_tables: optimizer of each table, by name. Tables with the same optimizer object share a group.

    Attributes:
        groups: a dict for each group: "params" or "tables" with the names, and the current scalars, which the user may change.
        specs: declarations of the groups. group_of, group_of_table: index of the group, by name of the parameter or table.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
    """

    def __init__(
        self,
        names: Sequence[str],
        optimizer: Optimizer | None,
        groups: Sequence[Mapping[str, Any]] | None,
        rules_of_tables: Mapping[str, Optimizer] = MappingProxyType({}),
    ) -> None:
        if not isinstance(optimizer, Optimizer) and (names or optimizer is not None):
            raise TypeError(f"optimizer: expected one of psd_client's, such as psd_client.SGD(lr=...), got {optimizer!r}")
        self.groups: list[dict[str, Any]] = []
        self._checked: tuple[list[dict[str, Any]], list[list[float]]] | None = None  # the groups' values, and what they mean
        self.specs: list[GroupSpec] = []
        self.group_of: dict[str, int] = {}
        unassigned = dict.fromkeys(names)
        if not isinstance(groups, (list, tuple, type(None))):
            raise TypeError(f"groups: expected a list of dicts, got {groups!r}")
        if groups is None:
            groups = [{"params": list(names)}] if names else []
        for index, group in enumerate(groups):
            assert optimizer is not None
            rule = _rule(optimizer, group, index)
            members = list(group["params"])
            for name in members:
                if not isinstance(name, str) or name not in unassigned:
                    is_twice = isinstance(name, str) and name in self.group_of
                    problem = "is in two groups" if is_twice else "is not among the parameters"
                    raise ValueError(f"groups[{index}]['params']: {name!r} {problem}")
                del unassigned[name]
                self.group_of[name] = index
            self.groups.append({"params": members} | rule.scalars())
            self.specs.append(spec_of(rule))
        if unassigned:
            raise ValueError(f"groups: {next(iter(unassigned))!r} is in no group")
        self.group_of_table: dict[str, int] = {}
        index_of: dict[int, int] = {}  # by the optimizer's identity
        for name, rule in rules_of_tables.items():
            if id(rule) not in index_of:
                index_of[id(rule)] = len(self.groups)
                self.groups.append({"tables": []} | rule.scalars())
                self.specs.append(spec_of(rule))
            self.group_of_table[name] = index_of[id(rule)]
            self.groups[index_of[id(rule)]]["tables"].append(name)

    def scalars(self) -> list[list[float]]:
        """The scalars of the next push, by group. Raises InvalidRequest, KeyError or TypeError for wrong values."""
        if self._checked is None or self._checked[0] != self.groups:
            values = [
                scalar_values(spec, group, i) for i, (spec, group) in enumerate(zip(self.specs, self.groups, strict=True))
            ]
            self._checked = [dict(group) for group in self.groups], values
        return self._checked[1]


def _rule(optimizer: Optimizer, group: Mapping[str, Any], index: int) -> Optimizer:
    if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple, set)):
        raise InvalidRequest(f"groups[{index}]: expected a dict with 'params', a list of names, got {group!r}")
    options = {name: value for name, value in group.items() if name != "params"}
    known = optimizer.option_values().keys()
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(f"groups[{index}]: no option {unknown[0]!r}; there are {', '.join(sorted(known))}")
    try:
        return optimizer.with_options(options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"groups[{index}]: {error}") from None
