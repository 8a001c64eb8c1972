"""Which jobs have verdicts, what a job spec may ask for, and the arithmetic from measures to a verdict."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import psd_core
from psd.contract.consistency import Consistency
from psd.contract.errors import InvalidRequest
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.contract.verdicts import Verdict, clip_scale, judged, measure_message
from psd.v1 import job_pb2


def job(rules: tuple[str, ...] = ("sgd",), mode: str = "sync", aggregation: str = "exact", **fields: Any) -> JobSpec:
    return JobSpec(
        2,
        tuple(TensorSpec(f"t{i}", (3,), "float32", i) for i in range(len(rules))),
        tuple(GroupSpec(rule) for rule in rules),
        Consistency.parse(mode),
        aggregation=aggregation,
        **fields,
    )


def measure(*arrays: Any) -> job_pb2.Measure:
    return measure_message([psd_core.square_sum(np.array(array, np.float32)) or 0 for array in arrays])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"clip_norm": -1.0}, "clip_norm: must be finite and >= 0"),
        ({"clip_norm": math.nan}, "clip_norm: must be finite"),
        ({"clip_norm": math.inf}, "clip_norm: must be finite"),
        ({"clip_norm": 1.0, "aggregation": "fast"}, "clip_norm needs aggregation exact"),
        ({"nan_policy": "skip", "aggregation": "fast"}, "nan_policy: skip needs aggregation exact"),
        ({"rules": ("lamb",), "aggregation": "fast"}, "groups.rule: lamb needs aggregation exact"),
        ({"rules": ("lamb",), "aggregation": "fast", "mode": "async"}, "groups.rule: lamb needs the norms of whole tensors"),
        ({"rules": ("lamb",), "aggregation": "fast", "mode": "ssp:1"}, "the mode is ssp:1, not sync"),
        ({"nan_policy": "ignore"}, r"nan_policy: must be one of \['allow', 'refuse', 'skip'\], got 'ignore'"),
        ({"clip_norm": 1.0, "nan_policy": "allow"}, "nan_policy: allow, but clip_norm needs norms"),
        ({"rules": ("lamb",), "nan_policy": "allow"}, "nan_policy: allow, but groups.rule: lamb needs norms"),
    ],
)
def test_what_makes_no_sense_together_is_refused(fields: dict[str, Any], words: str) -> None:
    """The message names what would go together."""
    with pytest.raises(InvalidRequest, match=words):
        job(**fields)


@pytest.mark.parametrize("mode", ["async", "ssp:1"])
def test_without_rounds_each_push_is_clipped_or_skipped_by_its_worker(mode: str) -> None:
    """So nothing is asked of the shards, and no aggregation is."""
    assert not job(mode=mode, aggregation="fast", clip_norm=1.0, nan_policy="skip").has_verdicts


def test_specs_come_back_from_their_message_and_name_what_differs() -> None:
    """Both fields travel, and both must be equal."""
    spec = job(clip_norm=0.5, nan_policy="skip")

    assert JobSpec.from_message(spec.to_message()) == spec
    assert (
        spec.difference(job(clip_norm=0.25, nan_policy="skip"))
        == "clip_norm: 0.5 in the job, 0.25 in this worker's declaration"
    )
    assert spec.difference(job(clip_norm=0.5)) == "nan_policy: skip in the job, refuse in this worker's declaration"


def test_the_scale_is_that_of_torch() -> None:
    """It holds for norms above the largest, at it, below it, and of zero."""
    torch = pytest.importorskip("torch")
    for norm_max, values in ((1.0, [3.0, 4.0]), (7.0, [3.0, 4.0]), (5.0, [3.0, 4.0]), (1.0, [0.0])):
        parameter = torch.nn.Parameter(torch.zeros(len(values), dtype=torch.float64))
        parameter.grad = torch.tensor(values, dtype=torch.float64)
        torch.nn.utils.clip_grad_norm_([parameter], norm_max)
        scale = clip_scale(norm_max, float(np.linalg.norm(values)))
        assert parameter.grad.tolist() == [scale * value for value in values]


def test_gradients_of_all_shards_make_one_scale() -> None:
    """3 on one shard and 4 on the other: the norm is 5."""
    verdict = judged(job(clip_norm=1.0), 7, None, [measure([3]), measure([4]), measure([])])

    assert verdict == Verdict(7, scale=1 / (5 + 1e-6))


def test_updates_of_all_shards_make_ratios() -> None:
    """Two tensors, both cut over two shards; the scale that was found first stays."""
    spec = job(("lamb", "sgd", "lamb"), clip_norm=1.0)
    first = judged(spec, 7, None, [measure([3]), measure([4])])
    assert (first.is_final, first.ratios) == (False, ())

    verdict = judged(spec, 7, first, [measure([3], [6], [0], [2]), measure([4], [8], [0], [1])])

    assert verdict == Verdict(7, scale=first.scale, ratios=(0.5, 1.0))


def test_directions_of_all_shards_make_their_norms() -> None:
    """The first tensor is cut over two shards; the last is merged by its mean, and not measured."""
    plain = job(("sgd", "sgd", "sgd"))
    spec = replace(plain, tensors=tuple(replace(tensor, merge="rda") for tensor in plain.tensors[:2]) + plain.tensors[2:])
    assert JobSpec.from_message(spec.to_message()) == spec

    verdict = judged(spec, 7, None, [measure([3], []), measure([4], [2])])

    assert verdict == Verdict(7, ratios=(5.0, 2.0))
    assert Verdict.from_message(verdict.to_message(), spec) == verdict
    assert judged(spec, 7, None, [measure_message(None), measure([4], [2])]) == Verdict(7, skip=True)


@pytest.mark.parametrize("rules", [("sgd",), ("lamb",)])
def test_what_is_not_finite_skips_the_round(rules: tuple[str, ...]) -> None:
    """On whichever shard it was measured."""
    spec = job(rules, clip_norm=1.0 if rules == ("sgd",) else 0.0)
    sums = [[1]] if rules == ("sgd",) else [[1], [1]]

    assert judged(spec, 7, None, [measure(*sums), measure_message(None)]) == Verdict(7, skip=True)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (job_pb2.Verdict(scale=1.5, is_final=True), "verdict.scale: must be from 0 to 1, got 1.5"),
        (job_pb2.Verdict(scale=math.nan, is_final=True), "verdict.scale: must be from 0 to 1"),
        (job_pb2.Verdict(scale=1, is_final=True), "verdict.ratios: expected 1, got 0"),
        (job_pb2.Verdict(scale=1, ratios=[1]), "verdict.ratios: expected 0, got 1"),
        (job_pb2.Verdict(scale=1, ratios=[math.inf], is_final=True), "verdict.ratios: must be finite"),
        (job_pb2.Verdict(scale=1, ratios=[-1.0], is_final=True), "verdict.ratios: must be finite and >= 0"),
    ],
)
def test_verdicts_that_no_shard_0_finds_are_refused(message: job_pb2.Verdict, words: str) -> None:
    """A scale above 1, ratios in another number than tensors, or no numbers."""
    with pytest.raises(InvalidRequest, match=words):
        Verdict.from_message(message, job(("lamb",)))
    with pytest.raises(InvalidRequest, match="verdict: only a job with rounds"):
        Verdict.from_message(message, job())


def test_measures_that_no_shard_makes_are_refused() -> None:
    """Another number of sums, or one of more bytes than a sum can have."""
    with pytest.raises(InvalidRequest, match=r"measures\.squares: expected 1, got 2"):
        judged(job(clip_norm=1.0), 0, None, [measure([1], [2])])
    with pytest.raises(InvalidRequest, match=r"measures\.squares: has 1000 bytes, the limit is 320"):
        judged(job(clip_norm=1.0), 0, None, [job_pb2.Measure(is_finite=True, squares=[bytes(1000)])])
