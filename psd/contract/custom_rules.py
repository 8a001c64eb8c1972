"""Update rules written by users: a Python class by import path, such as "my_package.my_module:MyRule".

    class MyRule:
        slots = {"velocity": 0.0}              # arrays of the parameter's shape, and their initial values
        hyper = {"lr": 0.1, "friction": 0.9}   # numbers that are sent with each push, and their defaults

        def apply(self, param, grad, slots, hyper):
            slots["velocity"][:] = hyper["friction"] * slots["velocity"] + grad
            param -= hyper["lr"] * slots["velocity"]

`apply` is called on a shard with 1-D arrays of one dtype and length: a run of one block, which may be a piece of a tensor, or
several tensors at the same step end to end. So it must be *elementwise*: the new value of an element must depend on that
element alone. For a table the arrays are (n, dim) float32: some rows of one update, in any order. The new values of a row must
depend on that row alone. `param` and the arrays in `slots` are updated in place; `grad` is read-only. Besides the declared
numbers, `hyper` has "step" (the number of this update for these tensors, or this table, from 1) and "age" (updates of the
block, or the tables, since the worker read them; 0 under sync). Several threads update blocks at once: an object must keep
nothing between calls.

Imports such a class and checks its form. Must not know groups, pages or connections.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psd.contract.config import ConfigError, is_rule_path
from psd_core.optimizer import FLOAT32_MAX

NAMES_MAX = 64
"""Limit of the slots of one rule, and of its numbers."""

RESERVED = frozenset({"step", "age", "params"})
"""Names that psd itself uses."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True)
class ListedRule:
    """A rule that has been imported and checked.

    Attributes:
        path: the import path. kind: the class.
        slots: initial values by name. hyper: defaults by name. Both are in the class's order.
    """

    path: str
    kind: type[Any]
    slots: Mapping[str, float]
    hyper: Mapping[str, float]


def name_problem(names: Sequence[str]) -> str | None:
    """Problem with the names of a rule's slots or numbers; None if there is none."""
    if len(names) > NAMES_MAX:
        return f"has {len(names)} names, the limit is {NAMES_MAX}"
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            return f"names must be identifiers of at most 64 letters, got {name!r}"
        if name in RESERVED:
            return f"the name {name!r} is psd's own"
    return None if len(set(names)) == len(names) else "a name is given twice"


def load_rule(path: str) -> ListedRule:
    """Import a rule and check its form.

    Raises:
        ConfigError: the rule cannot be imported, or has not the form above; the message names it.
    """
    found = _imported(path)
    if not isinstance(found, type):
        raise ConfigError(f"rule {path!r}: expected a class, got {found!r}")
    numbers = {attribute: _numbers(path, attribute, getattr(found, attribute, None)) for attribute in ("slots", "hyper")}
    apply = getattr(found, "apply", None)
    if not callable(apply):
        raise ConfigError(f"rule {path!r}: has no method apply(param, grad, slots, hyper)")
    try:
        inspect.signature(apply).bind(None, None, None, None, None)
        found()
    except Exception as error:
        expected = "a class without arguments that has apply(self, param, grad, slots, hyper)"
        raise ConfigError(f"rule {path!r}: expected {expected}: {describe(error)}") from error
    return ListedRule(path, found, **numbers)


def _imported(path: str) -> Any:
    if not is_rule_path(path):
        raise ConfigError(f"rule {path!r}: expected an import path with a class, such as my_package.my_module:MyRule")
    module_name, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except Exception as error:
        raise ConfigError(f"rule {path!r}: cannot be imported: {describe(error)}") from error


@dataclass(frozen=True)
class Listed:
    """Update rules, and functions for vectors, that an operator has listed with --rule; by path."""

    rules: dict[str, ListedRule]
    functions: dict[str, Callable[..., Any]]


def load_listed(paths: Sequence[str], directory: str) -> Listed:
    """Import rules and functions by path. Their modules are looked for in Python's own places, then in `directory`.

    Raises:
        ConfigError: as `load_rule`.
    """
    if paths and directory not in sys.path:
        sys.path.append(directory)
    listed = Listed({}, {})
    for path in paths:
        found = _imported(path)
        if inspect.isroutine(found):
            listed.functions[path] = found
        else:
            listed.rules[path] = load_rule(path)
    return listed


def _numbers(path: str, attribute: str, value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"rule {path!r}: expected {attribute} to be a dict of names and numbers, got {value!r}")
    problem = name_problem(list(value))
    if problem:
        raise ConfigError(f"rule {path!r}: {attribute}: {problem}")
    for name, number in value.items():
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        if not is_number or not math.isfinite(number) or abs(number) > FLOAT32_MAX:
            raise ConfigError(f"rule {path!r}: {attribute}[{name!r}]: expected a number, finite as a float32, got {number!r}")
    return {name: float(number) for name, number in value.items()}


def describe(error: BaseException) -> str:
    """One line about an error in foreign code, with the place that raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__ and not f.filename.startswith("<")]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
