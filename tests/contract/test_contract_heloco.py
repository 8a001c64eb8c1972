"""HeLoCo's correction of a difference by the momentum: its formula at every angle, and what a round's verdict makes of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import psd_core
from psd.contract.config import Limits
from psd.contract.errors import InvalidRequest
from psd.contract.heloco import KAPPA, NORM_MIN, correction
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.contract.spec_limits import check_limits
from psd.contract.verdicts import Verdict, judged, measure_message
from psd.v1 import job_pb2

MOMENTUM = GroupSpec("sgd", ("momentum",))


def job(**fields: Any) -> JobSpec:
    tensors = (TensorSpec("a", (2,), merge="heloco"), TensorSpec("b", (3,)), TensorSpec("c", (2,), merge="heloco"))
    return JobSpec(3, tensors, (MOMENTUM,), aggregation="exact", **fields)


def corrected(d: np.ndarray[Any, Any], m: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    keep, turn = correction(float(np.linalg.norm(d)), float(np.linalg.norm(m)), float(d @ m))
    assert keep >= 0
    assert turn >= 0
    found: np.ndarray[Any, Any] = keep * d + turn * m
    return found


@pytest.mark.parametrize("ratio", [1e-3, 0.3, 1.0, 20.0])
@pytest.mark.parametrize("degrees", [0, 30, 78, 79, 85, 90, 91, 120, 150, 180])
def test_a_difference_is_kept_turned_or_shortened_by_its_angle(degrees: int, ratio: float) -> None:
    """Cosine 0.2, at 78.5 degrees, and above: as it is. Down to 0: turned, of the same length. Below: at most half of the
    opposing part is gone, and nothing beside it. The shorter the difference beside the momentum, the less of either."""
    angle = math.radians(degrees)
    m = np.array([0.5, 0.0])
    d = 0.5 * ratio * np.array([math.cos(angle), math.sin(angle)])
    found, trust = corrected(d, m), ratio / (ratio + KAPPA)
    after = math.atan2(found[1], found[0])

    if degrees <= 78:
        assert found.tolist() == d.tolist()
    elif degrees < 90:
        assert np.linalg.norm(found) == pytest.approx(np.linalg.norm(d))
        assert 0 < after < angle
        turned = min((1 - math.cos(angle)) * trust, 1)
        assert after == pytest.approx(math.atan2((1 - turned) * math.sin(angle), (1 - turned) * math.cos(angle) + turned))
    elif degrees > 90:
        lost = min(-math.cos(angle) * trust, 0.5)
        assert found[0] == pytest.approx((1 - lost) * d[0])
        assert found[1] == d[1]


@pytest.mark.parametrize(
    ("norm", "momentum"), [(0.0, 1.0), (1.0, 0.0), (1.0, NORM_MIN / 2), (1e20, 1e-20), (NORM_MIN / 2, 1.0)]
)
def test_where_there_is_no_direction_nothing_is_corrected(norm: float, momentum: float) -> None:
    """Before the first round the momentum is 0; a fragment that was not sent is, too."""
    assert correction(norm, momentum, -norm * momentum) == (1.0, 0.0)


def measure(*tensors: tuple[Any, list[Any]]) -> job_pb2.Measure:
    """Of a shard's part of the momentum and of the members' differences, by tensor."""
    sums: list[int] = []
    for momentum, differences in tensors:
        m = np.array(momentum, np.float32)
        sums.append(psd_core.square_sum(m) or 0)
        for difference in differences:
            d = np.array(difference, np.float32)
            product = psd_core.product_sum(d, m) or 0
            sums += [psd_core.square_sum(d) or 0, max(product, 0), max(-product, 0)]
    return measure_message(sums)


def test_measures_of_all_shards_make_each_members_factors() -> None:
    """Two members; the first tensor is cut over two shards, which see it on opposite sides of the momentum."""
    spec = job()
    parts = [
        measure(([3], [[-4], [3]]), ([], [[], []])),
        measure(([0], [[3], [4]]), ([1, 1], [[-1, -1], [0, 0]])),
    ]

    found = judged(spec, 7, None, parts, 2)

    opposed, alike = correction(5, 3, -12), correction(5, 3, 9)
    assert found.ratios == pytest.approx((*opposed, *alike, *correction(2**0.5, 2**0.5, -2), 1.0, 0.0))
    assert opposed[1] > 0
    assert alike == (1.0, 0.0)
    assert Verdict.from_message(found.to_message(), spec) == found
    assert judged(spec, 7, None, [parts[0], measure_message(None)], 2) == Verdict(7, skip=True)
    with pytest.raises(InvalidRequest, match=r"measures\.squares: expected 20, got 14"):
        judged(spec, 7, None, parts, 3)


@pytest.mark.parametrize("count", [2, 6, 16])
def test_verdicts_with_factors_of_no_round_are_refused(count: int) -> None:
    """Two tensors and at most three members: 4, 8 or 12."""
    with pytest.raises(
        InvalidRequest, match=f"verdict.ratios: expected 2 for each member of the round and each of 2 .*{count}"
    ):
        Verdict.from_message(job_pb2.Verdict(scale=1, ratios=[1.0] * count, is_final=True), job())


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (GroupSpec("sgd"), "compares gradients with the rule's momentum, and sgd has none here"),
        (GroupSpec("adagrad", (), (0.0,)), "and adagrad has none here"),
        (GroupSpec("rmsprop", ("momentum",)), "and rmsprop has none here"),
        (GroupSpec("sgd", ("maximize", "momentum")), "heloco does not go with sgd's maximize"),
        (GroupSpec("sgd", ("keras", "momentum")), "heloco does not go with sgd's keras"),
    ],
)
def test_rules_without_a_momentum_of_differences_are_refused(group: GroupSpec, words: str) -> None:
    """Also those whose momentum has another scale or sign."""
    with pytest.raises(InvalidRequest, match=words):
        replace(job(), groups=(group,))


@pytest.mark.parametrize(("rule", "scalars", "scale"), [
    ("sgd", (0.7, 0.9, 0.0, 0.0), 0.1),
    ("sgd", (0.7, 0.9, 0.5, 0.0), 0.2),
    ("sgd", (0.7, 1.0, 0.0, 0.0), 0.0),
    ("delayed_nesterov", (0.7, 0.8, 4.0, 0.0), 0.2),
    ("adam", (0.7, 0.9, 0.99, 1e-8, 0.0), 1.0),
])  # fmt: skip
def test_the_momentum_is_taken_as_a_mean_of_differences(rule: str, scalars: tuple[float, ...], scale: float) -> None:
    """A sum that fades has the norm of a mean times 1 / (1 - momentum)."""
    info = GroupSpec(rule).info
    assert info.momentum_at(("momentum",)) == 0
    assert info.momentum_scale(scalars) == pytest.approx(scale)


def test_both_merges_in_one_job_are_refused() -> None:
    """A verdict has numbers of one kind."""
    tensors = (TensorSpec("a", (2,), merge="heloco"), TensorSpec("b", (3,), merge="rda"))
    with pytest.raises(InvalidRequest, match="tensor 'b': merge: is rda, but 'a' has heloco"):
        replace(job(), tensors=tensors)


def test_more_sums_than_a_shard_takes_are_refused() -> None:
    """One for each tensor, and three for each of it and each worker."""
    check_limits(job(), Limits(tensors_max=10))
    with pytest.raises(InvalidRequest, match="merge: 2 tensors of heloco have up to 20 sums in a round of 3 workers"):
        check_limits(job(), Limits(tensors_max=9))
