"""Several optimizers of named arrays in one job: each part has the numbers that a job of its own would have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from client_faults import in_threads

import psd_client
from psd.contract.errors import InvalidRequest, InvalidTensor, PartsDisagree
from psd_client.param_groups import ParamGroups

Start = Callable[..., Any]
Named = dict[str, Any]

SIZE = 300_000  # above the size from which parameters are lent to the program
ORDER = ("critic", "critic", "generator", "critic", "generator")
RULES = {"generator": psd_client.Adam(lr=0.1), "critic": psd_client.SGD(lr=0.5, momentum=0.9)}
MEMBERS = {"generator": ["g", "h"], "critic": ["c"]}
GROUPS = [
    {"part": "generator", "params": ["g"]},
    {"part": "generator", "params": ["h"], "lr": 0.2},
    {"part": "critic", "params": ["c"]},
]


def initial(names: list[str]) -> Named:
    return {name: np.full(SIZE if name == "g" else 5, 0.1 * len(names), np.float32) for name in names}


def gradients(names: list[str], step: int, rank: int) -> Named:
    return {name: np.full(SIZE if name == "g" else 5, step - 2.0 + rank + len(name), np.float32) for name in names}


def all_names() -> list[str]:
    return [name for names in MEMBERS.values() for name in names]


def trained(servers: str, run: Callable[[Any], Any]) -> list[Any]:
    def worker(rank: int) -> Any:
        with psd_client.connect(servers, rank, 2) as ps:
            return run(ps)

    return in_threads(*(lambda rank=rank: worker(rank) for rank in range(2)))


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("aggregation", ["fast", "exact"])
def test_each_part_is_trained_as_by_a_job_of_its_own(cluster: Start, aggregation: str, copy: bool) -> None:
    """Also where a step brings back its own part alone, and the program keeps what it gets."""

    def several(ps: Any) -> Any:
        first = initial(all_names())
        kept = [ps.declare(first, RULES, groups=GROUPS, aggregation=aggregation, copy=copy)]
        for step, part in enumerate(ORDER):
            kept.append(ps.push_pull(gradients(MEMBERS[part], step, ps.rank), part=part))
            assert kept[-1].keys() == first.keys()
        ps.push({"c": np.ones(5, np.float32)}, part="critic")
        assert ps.clock == len(ORDER) + 1
        values = {name: array.copy() for name, array in kept[-1].items()}
        return values, [entry["c"][0] for entry in kept] if copy else None, ps.pull()["c"].copy()

    def alone(part: str) -> Callable[[Any], Any]:
        def run(ps: Any) -> Any:
            first = initial(all_names())
            groups = [
                {key: value for key, value in group.items() if key != "part"} for group in GROUPS if group["part"] == part
            ]
            kept = [
                ps.declare({name: first[name] for name in MEMBERS[part]}, RULES[part], groups=groups, aggregation=aggregation)
            ]
            for step, turn in enumerate(ORDER):
                kept.append(ps.push_pull(gradients(MEMBERS[part], step, ps.rank)) if turn == part else kept[-1])
            values = kept[-1]
            return values, [entry["c"][0] for entry in kept] if part == "critic" else None

        return run

    found = trained(cluster(2).servers, several)
    expected: Named = {}
    history = None
    for part in RULES:
        values, seen = trained(cluster(2).servers, alone(part))[0]
        expected |= values
        history = seen or history
    for values, seen, last in found:
        for name, value in expected.items():
            np.testing.assert_array_equal(values[name], value)
        assert seen in (None, history)
        assert not np.array_equal(last, values["c"])


def test_a_worker_that_steps_another_part_than_the_round_is_told_and_may_step_that_one(cluster: Start) -> None:
    def run(ps: Any) -> str:
        ps.declare(initial(all_names()), RULES, groups=GROUPS)
        mine, other = ("generator", "critic") if ps.rank else ("critic", "generator")
        try:
            ps.push_pull(gradients(MEMBERS[mine], 0, 0), part=mine)
        except PartsDisagree as error:
            ps.push_pull(gradients(MEMBERS[other], 0, 0), part=other)
            return str(error)
        return ""

    assert len([text for text in trained(cluster(1).servers, run) if text]) == 1


def test_what_a_push_says_of_parts_is_checked(cluster: Start) -> None:
    with psd_client.connect(cluster(1).servers, 0, 1) as ps, psd_client.connect(cluster(1).servers, 0, 1) as one:
        ps.declare(initial(all_names()), RULES, groups=GROUPS)
        one.declare({"c": np.zeros(5)}, psd_client.SGD(lr=1.0))
        for call in (ps.push, ps.push_pull):
            with pytest.raises(InvalidRequest, match="part: must be one of generator, critic, got None"):
                call({"c": np.ones(5, np.float32)})
            with pytest.raises(InvalidRequest, match="part: must be one of generator, critic, got 'g'"):
                call({"c": np.ones(5, np.float32)}, part="g")
            with pytest.raises(InvalidTensor, match="grads: 'c' is stepped with the part 'critic', not with 'generator'"):
                call({"c": np.ones(5, np.float32)}, part="generator")
            with pytest.raises(InvalidTensor, match="no parameter 'x' was declared"):
                call({"x": np.ones(5, np.float32)}, part="generator")
        with pytest.raises(InvalidRequest, match="part: this job has one optimizer, and no parts, got 'critic'"):
            one.push({"c": np.ones(5)}, part="critic")
        assert ps.clock == one.clock == 0
        ps.param_groups[2]["lr"] = 0.0
        np.testing.assert_array_equal(
            ps.push_pull({"c": np.ones(5, np.float32)}, part="critic")["c"], initial(all_names())["c"]
        )


@pytest.mark.parametrize(
    ("rules", "groups", "tables", "text"),
    [
        ({}, GROUPS, {}, "optimizer: there is none"),
        (RULES, None, {}, "groups: several optimizers need them"),
        ({"a b": psd_client.SGD(lr=1.0)}, GROUPS, {}, "names must be words"),
        (RULES, [{"params": ["g"]}], {}, r"groups\[0\]: part: must be one of generator, critic, got None"),
        (RULES, [{"part": "x", "params": ["g"]}], {}, r"groups\[0\]: part: must be one of generator, critic, got 'x'"),
        (RULES, [{"part": "critic", "params": all_names()}], {}, "none is of the part 'generator'"),
        (RULES, GROUPS, {"user": psd_client.SGD(lr=1.0)}, "tables: 'user': not with several optimizers, in this face"),
    ],
)
def test_what_cannot_be_declared_is_refused_by_name(rules: Any, groups: Any, tables: Mapping[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        ParamGroups(all_names(), rules, groups, tables)
