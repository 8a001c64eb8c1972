"""A user's own rule: how it is found, what it must look like, and how a job declares it."""

from __future__ import annotations

from typing import Any

import pytest

from psd.contract.config import ConfigError, ServerConfig
from psd.contract.custom_rules import load_listed, load_rule
from psd.contract.errors import InvalidRequest
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.contract.layout import Layout

HERE = __name__


class Good:
    slots = {"velocity": 0.5, "other": 1}
    hyper = {"lr": 0.1, "drag": -3}

    def apply(self, param: Any, grad: Any, slots: Any, hyper: Any) -> None: ...


class NoApply:
    slots: dict[str, float] = {}
    hyper: dict[str, float] = {}


class WrongApply(NoApply):
    def apply(self, param: Any, grad: Any) -> None: ...


class NeedsArguments(Good):
    def __init__(self, lr: float) -> None: ...


class WrongSlots(Good):
    slots = ("velocity",)  # type: ignore[assignment]


class WrongName(Good):
    slots = {"first moment": 0.0}


class Reserved(Good):
    hyper = {"step": 1.0}


class NotFinite(Good):
    hyper = {"lr": float("inf")}


class Text(Good):
    hyper = {"lr": "0.1"}  # type: ignore[dict-item]


FUNCTION = len


def test_a_rule_is_found_with_its_slots_and_numbers() -> None:
    """In the order of the class, as floats."""
    rule = load_rule(f"{HERE}:Good")

    assert rule.kind is Good
    assert list(rule.slots.items()) == [("velocity", 0.5), ("other", 1.0)]
    assert list(rule.hyper.items()) == [("lr", 0.1), ("drag", -3.0)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Missing", "cannot be imported: AttributeError"),
        ("FUNCTION", "expected a class, got"),
        ("NoApply", r"has no method apply\(param, grad, slots, hyper\)"),
        ("WrongApply", "expected a class without arguments that has apply.*TypeError"),
        ("NeedsArguments", "expected a class without arguments.*missing 1 required positional argument: 'lr'"),
        ("WrongSlots", "expected slots to be a dict of names and numbers"),
        ("WrongName", "slots: names must be identifiers of at most 64 letters, got 'first moment'"),
        ("Reserved", "hyper: the name 'step' is psd's own"),
        ("NotFinite", r"hyper\['lr'\]: expected a number, finite as a float32, got inf"),
        ("Text", r"hyper\['lr'\]: expected a number"),
    ],
)
def test_a_class_that_will_not_do_is_refused_by_name(name: str, message: str) -> None:
    """Both the shard refuses it when it starts, and the worker that names it."""
    with pytest.raises(ConfigError, match=f"(?s)^rule '{HERE}:{name}': {message}"):
        load_rule(f"{HERE}:{name}")


@pytest.mark.parametrize("path", ["", "Good", "module.Good", ":Good", "module:", "a b:Good", "../module:Good", "m:G" * 100])
def test_what_is_no_import_path_is_refused(path: str) -> None:
    """The configuration refuses it, before anything is imported."""
    with pytest.raises(ConfigError, match="--rule: expected the import path of a class"):
        ServerConfig(0, 1, rules=(path,))
    with pytest.raises(ConfigError, match="expected an import path with a class"):
        load_rule(path)


def test_a_module_that_fails_is_reported_with_the_place(tmp_path: Any) -> None:
    """So that the operator need not look for it."""
    (tmp_path / "module_that_fails.py").write_text("x = 1\nx / 0\n")

    with pytest.raises(ConfigError, match=r"cannot be imported: ZeroDivisionError: .*module_that_fails\.py:2"):
        load_listed(["module_that_fails:Rule"], str(tmp_path))


def group(**changes: Any) -> GroupSpec:
    fields: dict[str, Any] = {"rule": "m:R", "constants": (0.5, 1.0), "slots": ("a", "b"), "scalars": ("lr", "drag")}
    return GroupSpec(**(fields | changes))


def job(*groups: GroupSpec, mode: str = "sync") -> JobSpec:
    from psd.contract.consistency import Consistency

    tensors = tuple(TensorSpec(f"t{i}", (3,), "float32", i) for i in range(len(groups)))
    return JobSpec(1, tensors, groups, Consistency.parse(mode))


def test_a_declared_rule_says_all_that_a_checkpoint_needs() -> None:
    """Without its code: slots by name, and what they begin with; its own numbers may be negative."""
    spec = job(group(), GroupSpec("sgd"))

    assert JobSpec.from_message(spec.to_message()) == spec
    assert group().info.slots(()) == ("a", "b")
    assert group().info.slot_starts((), (0.5, 1.0)) == (0.5, 1.0)
    group().info.check_scalars((0.1, -3.0), (), "scalars[0]")
    assert Layout(spec, 1).digest != Layout(job(group(scalars=("lr",)), GroupSpec("sgd")), 1).digest


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (group(slots=("a",)), r"groups.constants: rule 'm:R' takes 1 \(a\), got 2"),
        (group(slots=("a", "a")), "groups.slots: of rule 'm:R': a name is given twice"),
        (group(scalars=("lr", "age")), "groups.scalars: of rule 'm:R': the name 'age' is psd's own"),
        (group(slots=("a/b", "c")), "groups.slots: .* must be identifiers"),
        (group(flags=("maximize",)), "has no flag 'maximize'"),
        (group(scalars=tuple(f"x{i}" for i in range(65))), "has 65 names, the limit is 64"),
        (GroupSpec("sgd", slots=("a",)), "groups.slots: only a CustomRule may name its slots; 'sgd' has built-in ones"),
        (GroupSpec("sgd", scalars=("lr",)), "groups.scalars: only a CustomRule may name its scalars; 'sgd' has built-in ones"),
    ],
)
def test_a_wrong_declaration_is_refused(wrong: GroupSpec, message: str) -> None:
    """Both sides refuse it, naming the field."""
    with pytest.raises(InvalidRequest, match=message):
        job(wrong)


@pytest.mark.parametrize(
    ("wrong", "mode", "message"),
    [
        (GroupSpec("sgd", staleness="lr"), "sync", "groups.staleness: is 'lr', but under sync no gradient is stale"),
        (GroupSpec("sgd", staleness="decay"), "async", "groups.staleness: must be 'lr' or empty, got 'decay'"),
        (
            GroupSpec("ftrl", staleness="lr"),
            "ssp:3",
            "'lr' does not go with rule 'ftrl', which computes the parameters from lr",
        ),
        (group(scalars=("rate", "drag"), staleness="lr"), "async", "'lr' does not go with rule 'm:R', which has no lr"),
        (GroupSpec("static", staleness="lr"), "async", "'lr' does not go with rule 'static', which has no lr"),
    ],
)
def test_a_staleness_that_makes_no_sense_is_refused(wrong: GroupSpec, mode: str, message: str) -> None:
    """Sync refuses all of them."""
    with pytest.raises(InvalidRequest, match=message):
        job(wrong, mode=mode)
