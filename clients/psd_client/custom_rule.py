"""CustomRule: the way in which a worker names a user's own update rule.

psd/contract/custom_rules.py finds the class and says what it must look like. Must not know tensors or connections.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psd.contract.custom_rules import load_rule
from psd.contract.jobspec import GroupSpec
from psd_core.optimizer import Optimizer, number


class CustomRule(Optimizer):
    """An update rule of your own: a Python class. The shards import it by its path; their operator must have listed it.

        psd_client.CustomRule("my_package.my_module:MyRule", lr=0.01)

    The class must be importable here, too; psd/contract/custom_rules.py shows its form.

    Args:
        rule: the import path; or the class itself, if it can be imported by its module and name.
        hyper: numbers that replace the class's defaults; they travel with each push and may change during the job.

    Raises:
        ConfigError: the class cannot be imported, or lacks the expected form.
        TypeError, ValueError: an argument is wrong; the message names it.

    Attributes:
        spec: the group's declaration.
    """

    def __init__(self, rule: str | type, **hyper: float) -> None:
        if isinstance(rule, type):
            if rule.__module__ == "__main__":
                raise ValueError(
                    f"rule: {rule.__qualname__} is in the script itself, where shards cannot find it; put it in a module"
                )
            rule = f"{rule.__module__}:{rule.__qualname__}"
        found = load_rule(rule)
        unknown = sorted(set(hyper) - set(found.hyper))
        if unknown:
            raise TypeError(f"{rule} has no number {unknown[0]!r}; it has {', '.join(found.hyper) or 'none'}")
        values = {name: number(name, hyper.get(name, default)) for name, default in found.hyper.items()}
        spec = GroupSpec(rule, (), tuple(found.slots.values()), tuple(found.slots), tuple(found.hyper))
        for name, value in values.items():
            problem = spec.info.problem(name, value)
            if problem:
                raise ValueError(f"{name}: {problem}")
        self._path, self.spec, self._values = rule, spec, values

    def option_values(self) -> dict[str, Any]:
        """Values of the rule's numbers, by name."""
        return dict(self._values)

    def with_options(self, options: Mapping[str, Any]) -> CustomRule:
        """The same rule with some numbers changed."""
        return CustomRule(self._path, **(self._values | dict(options)))

    def scalars(self) -> dict[str, Any]:
        """The scalars of a push by name, in the order in which the class lists them."""
        return dict(self._values)

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __repr__(self) -> str:
        numbers = "".join(f", {name}={value}" for name, value in self._values.items())
        return f"CustomRule({self._path!r}{numbers})"
