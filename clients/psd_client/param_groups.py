"""Parameter groups of the dict face: which names share which scalars, like torch's param_groups. Groups of tables come last.

Owns the dicts that the user may change between pushes, and checks them at each push. Must not know shards or values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from psd.contract.arguments import identifier
from psd.contract.errors import InvalidRequest, InvalidTensor
from psd.contract.jobspec import GroupSpec
from psd_client.optimizers import scalar_values, spec_of
from psd_client.worker.exchange.sent_push import JobPart
from psd_core.optimizer import Optimizer


class ParamGroups:
    """The groups of a job.

    Args:
        names: names of all parameters.
        optimizer: the rule, and the scalars that a group does not set itself; None if there are no names. Or several, by name
            of the part of the job that each steps.
        groups: dicts such as {"params": [names], "lr": ..., ...}; None: one group of all parameters, if there are any. With
            several optimizers each has its "part", too.
        rules_of_tables: optimizer of each table, by name. Tables with the same optimizer object share a group.

    Attributes:
        groups: a dict for each group: "params" or "tables" with the names, and the current scalars, which the user may change.
        parts: the parts of the job by name, if there are several optimizers; else None.
        specs: declarations of the groups. group_of, group_of_table: index of the group, by name of the parameter or table.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
    """

    def __init__(
        self,
        names: Sequence[str],
        optimizer: Optimizer | Mapping[str, Optimizer] | None,
        groups: Sequence[Mapping[str, Any]] | None,
        rules_of_tables: Mapping[str, Optimizer] = MappingProxyType({}),
    ) -> None:
        rules = optimizer if isinstance(optimizer, Mapping) else {"": optimizer}
        for one in rules.values():
            if not isinstance(one, Optimizer) and (names or optimizer is not None):
                raise TypeError(f"optimizer: expected one of psd_client's, such as psd_client.SGD(lr=...), got {one!r}")
        self.parts: dict[str, JobPart] | None = None
        if isinstance(optimizer, Mapping):
            _check_parts(rules, groups, rules_of_tables)
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
            rule, part = _rule(rules, group, index)
            members = list(group["params"])
            for name in members:
                if not isinstance(name, str) or name not in unassigned:
                    is_twice = isinstance(name, str) and name in self.group_of
                    problem = "is in two groups" if is_twice else "is not among the parameters"
                    raise ValueError(f"groups[{index}]['params']: {name!r} {problem}")
                del unassigned[name]
                self.group_of[name] = index
            self.groups.append({"params": members} | part | rule.scalars())
            self.specs.append(spec_of(rule))
        if unassigned:
            raise ValueError(f"groups: {next(iter(unassigned))!r} is in no group")
        if isinstance(optimizer, Mapping):
            of_part = {name: [i for i, group in enumerate(self.groups) if group["part"] == name] for name in rules}
            self.parts = {name: JobPart(number, frozenset(of_part[name])) for number, name in enumerate(rules, 1)}
            for name, indices in of_part.items():
                if not indices:
                    raise InvalidRequest(f"groups: none is of the part {name!r}, for which there is an optimizer")
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

    def part(self, name: str | None, grads: Mapping[str, Any]) -> JobPart | None:
        """The part of a push; None if the job is one.

        Raises:
            InvalidRequest: the job has no such part, or no parts. InvalidTensor: a gradient is of another part.
        """
        parts = self.parts or {}
        if name is None and not parts:
            return None
        if name is None or name not in parts:
            there = f"must be one of {', '.join(parts)}" if parts else "this job has one optimizer, and no parts"
            raise InvalidRequest(f"part: {there}, got {name!r}")
        for other in grads:
            if self.group_of.get(other, min(parts[name].groups)) not in parts[name].groups:
                own = self.groups[self.group_of[other]]["part"]
                raise InvalidTensor(f"grads: {other!r} is stepped with the part {own!r}, not with {name!r}")
        return parts[name] if len(parts) > 1 else None


def _check_parts(
    rules: Mapping[str, Any], groups: Sequence[Mapping[str, Any]] | None, rules_of_tables: Mapping[str, Optimizer]
) -> None:
    if not rules:
        raise InvalidRequest("optimizer: there is none; pass one, or several by name")
    for name in rules:
        identifier(InvalidRequest, "optimizer", name)
    if groups is None:
        raise InvalidRequest(
            "groups: several optimizers need them, such as [{'part': 'generator', 'params': [names]}, ...]: which parameters "
            "each steps"
        )
    if rules_of_tables:
        raise InvalidRequest(
            f"tables: {next(iter(rules_of_tables))!r}: not with several optimizers, in this face; embeddings of "
            "psd_client.torch and psd_client.keras are stepped with one of several"
        )


def _rule(rules: Mapping[str, Any], group: Mapping[str, Any], index: int) -> tuple[Optimizer, dict[str, str]]:
    """The rule of a group, and its part, if there are several."""
    if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple, set)):
        raise InvalidRequest(f"groups[{index}]: expected a dict with 'params', a list of names, got {group!r}")
    options = {name: value for name, value in group.items() if name != "params"}
    part = "" if "" in rules else options.pop("part", None)
    if part not in rules:
        raise InvalidRequest(f"groups[{index}]: part: must be one of {', '.join(rules)}, got {part!r}")
    optimizer = rules[part]
    known = optimizer.option_values().keys()
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(f"groups[{index}]: no option {unknown[0]!r}; there are {', '.join(sorted(known))}")
    try:
        return optimizer.with_options(options), {"part": part} if part else {}
    except (TypeError, ValueError) as error:
        raise type(error)(f"groups[{index}]: {error}") from None
