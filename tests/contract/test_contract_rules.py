"""Declarations of rules: what a job may declare, and which numbers may travel with a push."""

from __future__ import annotations

import math
from typing import Any

import pytest

from psd.contract.compression import Compression
from psd.contract.consistency import SYNC, Consistency
from psd.contract.errors import InvalidRequest
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.contract.layout import Layout
from psd.contract.rules import PUBLISHED, RULES, TABLE_RULES, rule_info

ADAM = (1e-3, 0.9, 0.999, 1e-8, 0.0)


def job(*groups: GroupSpec) -> JobSpec:
    aggregation = "exact" if any(group.is_layerwise for group in groups) else "fast"
    tensors = tuple(TensorSpec(f"t{i}", (3,), "float32", i) for i in range(len(groups)))
    return JobSpec(1, tensors, groups, aggregation=aggregation)


@pytest.mark.parametrize(
    ("group", "slots", "starts"),
    [
        (GroupSpec("sgd"), (), ()),
        (GroupSpec("sgd", ("momentum",)), ("momentum",), (0,)),
        (GroupSpec("adagrad", (), (0.5,)), ("sum",), (0.5,)),
        (GroupSpec("adam"), ("exp_avg", "exp_avg_sq"), (0, 0)),
        (GroupSpec("adam", ("amsgrad",)), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), (0, 0, 0)),
        (GroupSpec("rmsprop", ("momentum",)), ("square_avg", "momentum_buffer"), (0, 0)),
        (GroupSpec("rmsprop", ("centered", "momentum")), ("square_avg", "grad_avg", "momentum_buffer"), (0, 0, 0)),
        (GroupSpec("ftrl", (), (0.5,)), ("accumulator", "linear"), (0.5, 0)),
        (GroupSpec("static"), (), ()),
    ],
)
def test_slots_follow_from_the_flags(group: GroupSpec, slots: tuple[str, ...], starts: tuple[float, ...]) -> None:
    """Each has a name and a value of its own to begin with."""
    rule = rule_info(group.rule)

    assert rule.slots(group.flags) == slots
    assert rule.slot_starts(group.flags, group.constants) == starts


@pytest.mark.parametrize("name", [name for name in RULES if name not in (*TABLE_RULES, PUBLISHED.name)])
def test_specs_come_back_from_their_message(name: str) -> None:
    """Constants travel exactly."""
    spec = job(GroupSpec(name, tuple(sorted(RULES[name].flags)), (0.1,) * len(RULES[name].constants)))

    assert JobSpec.from_message(spec.to_message()) == spec


PUBLICATION: dict[str, Any] = {"consistency": SYNC, "aggregation": "exact", "reduction": "sum"}


def test_a_publication_comes_back_from_its_message() -> None:
    """Its tensors are of any dtype; a group's are one worker's."""
    tensors = (TensorSpec("a", (3,), "bfloat16"), TensorSpec("b", (), "int64", 1), TensorSpec("c", (5,), "bool", 2))
    spec = JobSpec(2, tensors, (GroupSpec("published"),) * 3, **PUBLICATION)

    assert spec.is_publication
    assert JobSpec.from_message(spec.to_message()) == spec
    assert [(block.publisher, block.own_codec) for block in Layout(spec, 2).blocks] == [(0, "bf16"), (1, ""), (0, "")]


@pytest.mark.parametrize(
    ("message", "terms"),
    [
        (
            "mode: must be sync where tensors are published, got async",
            {"consistency": Consistency("async"), "aggregation": "fast"},
        ),
        ("aggregation: must be exact", {"aggregation": "fast"}),
        ("reduction: must be sum", {"reduction": "mean"}),
        ("quorum: must be 2", {"quorum": 1}),
        ("grace: must be none", {"grace": 1.0}),
        ("clip_norm: must be none", {"clip_norm": 1.0}),
        ("nan_policy: must be refuse or allow", {"nan_policy": "skip"}),
        ("compression: must be none", {"compression": Compression.of("int8", None, True, None)}),
        ("groups.rule: published is for jobs that train nothing", {"groups": (GroupSpec("published"), GroupSpec())}),
    ],
)
def test_a_publication_on_other_terms_is_refused(message: str, terms: dict[str, Any]) -> None:
    """Its rounds set all tensors together, and do nothing else."""
    with pytest.raises(InvalidRequest, match=message):
        JobSpec(2, (TensorSpec("a", (3,)),), **{"groups": (GroupSpec("published"),), **PUBLICATION, **terms})


def test_constants_are_part_of_what_must_be_equal() -> None:
    """In words, and in the digest."""
    first, second = job(GroupSpec("adagrad", (), (0.1,))), job(GroupSpec("adagrad", (), (0.2,)))

    assert "initial_accumulator_value of parameter group 0: 0.1" in (first.difference(second) or "")
    assert Layout(first, 1).digest != Layout(second, 1).digest


@pytest.mark.parametrize(
    ("group", "match"),
    [
        (("adamw",), "groups.rule: unknown rule 'adamw'; there are .*'adam', 'adamax'"),
        (("adam", ("nesterov",)), "groups.flags: rule 'adam' has no flag 'nesterov'; it has .*'amsgrad'"),
        (("ftrl", ("maximize",)), "groups.flags: rule 'ftrl' has no flag 'maximize'"),
        (("adam", ("maximize", "amsgrad")), "sorted and unique"),
        (("adam", (), (0.1,)), r"groups.constants: rule 'adam' takes 0 \(\), got 1"),
        (("adagrad",), r"groups.constants: rule 'adagrad' takes 1 \(initial_accumulator_value\), got 0"),
        (("adagrad", (), (-0.1,)), "groups.constants: initial_accumulator_value must be >= 0, got -0.1"),
        (
            ("adagrad", (), (math.nan,)),
            "groups.constants: initial_accumulator_value must be finite, also as a float32, got nan",
        ),
        (("adagrad", (), (1e39,)), "must be finite, also as a float32"),
    ],
)
def test_a_group_that_makes_no_sense_is_refused(group: tuple[Any, ...], match: str) -> None:
    """The message names the field, what it must be, and what came."""
    with pytest.raises(InvalidRequest, match=match):
        job(GroupSpec(*group))


@pytest.mark.parametrize(
    ("rule", "flags", "values", "match"),
    [
        ("adam", (), ADAM[:4], r"scalars\[2\].values: rule 'adam' takes 5 \(lr, beta1, .*got 4"),
        ("adam", (), (1e-3, 1.0, *ADAM[2:]), r"scalars\[2\].beta1: must be >= 0 and < 1, got 1.0"),
        ("adam", (), (1e-3, 0.9, -0.1, *ADAM[3:]), r"scalars\[2\].beta2: must be >= 0 and < 1, got -0.1"),
        ("adam", (), (*ADAM[:3], -1e-8, 0.0), r"scalars\[2\].eps: must be >= 0, got"),
        ("adam", (), (math.inf, *ADAM[1:]), r"scalars\[2\].lr: must be finite"),
        ("nadam", (), (*ADAM, -1.0), "momentum_decay: must be >= 0"),
        ("adadelta", (), (1.0, 1.1, 1e-6, 0.0), "rho: must be >= 0 and <= 1, got 1.1"),
        ("rmsprop", (), (0.1, 0.9, 1e-8, 0.0, 0.5), "momentum: is 0.5, but the group was declared without momentum"),
        ("ftrl", (), (0.0, 1.0, 0.0, 0.0), "lr: must be > 0, also as a float32, got 0.0"),
        ("ftrl", (), (1e-39, 1.0, 0.0, 0.0), "lr: must be > 0, also as a float32, got 1e-39"),
        ("lion", (), (0.1, 0.9, 0.99, -1.0), "weight_decay: must be >= 0"),
    ],
)
def test_scalars_out_of_range_are_refused_by_name(rule: str, flags: tuple[str, ...], values: Any, match: str) -> None:
    """What would divide by zero, or take a root of a negative number, never gets to a kernel."""
    with pytest.raises(InvalidRequest, match=match):
        rule_info(rule).check_scalars(values, flags, "scalars[2]")
