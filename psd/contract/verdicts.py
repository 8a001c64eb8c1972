"""Verdicts: how to apply a round if that depends on the whole gradient, although shards hold pieces of tensors.

The Decision, made before, says which workers make up the round. Each shard *measures* its part of the round, as sums of squares
that add up without rounding (psd_core.square_sum); the verdict follows from the sums of all shards. So its bits do not depend
on the number of shards, or on who computes it.

Pure functions on values; psd/state/aggregation/settlement.py and psd_client/worker/exchange/verdict_search.py exchange them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import psd_core
from psd.contract import heloco
from psd.contract.errors import InvalidRequest
from psd.contract.jobspec import JobSpec
from psd.v1 import job_pb2

CLIP_EPSILON = 1e-6
"""The number added to the norm before dividing by it, as in torch.nn.utils.clip_grad_norm_."""

SQUARES_BYTES_MAX = 320
"""Limit of one sum: 2176 bits are enough for any shard's, and for the sum over the largest number of shards."""

WITH_VERDICTS = "only a job with rounds that has clip_norm, a layer-wise rule or tensors that merge by rda or heloco"
"""Words for errors."""

Squares = list[int] | None
"""Sums of squares in units of 2**-1074; None: something is not finite."""


def members_mask(members: bytes) -> int:
    """A Decision's workers as a bit mask."""
    return int.from_bytes(members, "little")


@dataclass(frozen=True)
class Verdict:
    """The way to apply a decided round; psd.v1.Verdict is its message.

    Attributes:
        ratios: by JobSpec.ratio_tensors: trust ratios; or norms of sums of directions; or, for each member of the round, in the
            order of the ranks, the two factors of its correction (psd/contract/heloco.py).
    """

    round: int
    skip: bool = False
    scale: float = 1.0
    ratios: tuple[float, ...] = ()
    is_final: bool = True

    def to_message(self) -> job_pb2.Verdict:
        """The protobuf form."""
        return job_pb2.Verdict(round=self.round, skip=self.skip, scale=self.scale, ratios=self.ratios, is_final=self.is_final)

    @classmethod
    def from_message(cls, message: job_pb2.Verdict, spec: JobSpec) -> Verdict:
        """Read the protobuf form; InvalidRequest if no round of this job can have it."""
        if not spec.has_verdicts:
            raise InvalidRequest(f"verdict: {WITH_VERDICTS} has verdicts")
        if not 0 <= message.scale <= 1:  # also refuses NaN
            raise InvalidRequest(f"verdict.scale: must be from 0 to 1, got {message.scale}")
        expected = len(spec.ratio_tensors) if message.is_final and not message.skip else 0
        if spec.corrected_tensors:
            members, left = divmod(len(message.ratios), 2 * expected or 1)
            if left or not (0 < members <= spec.world_size or not expected):
                raise InvalidRequest(
                    f"verdict.ratios: expected 2 for each member of the round and each of {expected} tensors, got "
                    f"{len(message.ratios)}"
                )
        elif len(message.ratios) != expected:
            raise InvalidRequest(f"verdict.ratios: expected {expected}, got {len(message.ratios)}")
        for ratio in message.ratios:
            if not (math.isfinite(ratio) and ratio >= 0):
                raise InvalidRequest(f"verdict.ratios: must be finite and >= 0, got {ratio} (internal)")
        return cls(message.round, message.skip, message.scale, tuple(message.ratios), message.is_final)


def clip_scale(norm_max: float, norm: float) -> float:
    """The factor that brings a gradient of this norm to at most `norm_max`, as torch.nn.utils.clip_grad_norm_ computes it."""
    return min(1.0, norm_max / (norm + CLIP_EPSILON))


def measure_message(squares: Squares) -> job_pb2.Measure:
    """The message for sums of squares."""
    if squares is None:
        return job_pb2.Measure(is_finite=False)
    return job_pb2.Measure(is_finite=True, squares=[n.to_bytes((n.bit_length() + 7) // 8, "little") for n in squares])


def total_of(measures: Iterable[job_pb2.Measure], count: int) -> Squares:
    """The `count` sums over all shards; InvalidRequest if a measure has another number of sums."""
    totals: Squares = [0] * count
    for measure in measures:
        if not measure.is_finite:
            totals = None
            continue
        if len(measure.squares) != count:
            raise InvalidRequest(f"measures.squares: expected {count}, got {len(measure.squares)}")
        for index, squares in enumerate(measure.squares):
            if len(squares) > SQUARES_BYTES_MAX:
                raise InvalidRequest(f"measures.squares: has {len(squares)} bytes, the limit is {SQUARES_BYTES_MAX}")
            if totals is not None:
                totals[index] += int.from_bytes(squares, "little")
    return totals


def measures_gradients(spec: JobSpec, under: Verdict | None) -> bool:
    """True if gradients must be measured next, False if updates or directions must. `under`: the verdict so far."""
    return under is None and spec.clip_norm > 0


def sums_per_tensor(spec: JobSpec, members: int) -> int:
    """Sums that are measured of each of JobSpec.ratio_tensors in a round of so many members.

    Of its direction; or of parameters and update; or of the momentum and, for each member, of the gradient, and of its products
    with the momentum: those of the one sign, and those of the other.
    """
    return 1 if spec.directed_tensors else 1 + 3 * members if spec.corrected_tensors else 2


def judged(spec: JobSpec, round_: int, under: Verdict | None, measures: Sequence[job_pb2.Measure], members: int = 0) -> Verdict:
    """The verdict from the measures of all shards: of gradients, or of updates `under` an earlier verdict.

    members: how many the round has; for tensors that are corrected by the momentum.
    """
    layerwise = spec.layerwise_tensors
    if measures_gradients(spec, under):
        totals = total_of(measures, 1)
        norm = math.inf if totals is None else psd_core.square_root(totals[0])
        if not math.isfinite(norm):
            return Verdict(round_, skip=True)
        return Verdict(round_, scale=clip_scale(spec.clip_norm, norm), is_final=not layerwise)
    each = sums_per_tensor(spec, members)
    totals = total_of(measures, each * len(spec.ratio_tensors))
    if spec.corrected_tensors:
        return _corrected(round_, totals, each)
    norms = tuple(map(psd_core.square_root, totals or ()))
    if totals is None or not all(map(math.isfinite, norms)):
        return Verdict(round_, skip=True)
    if spec.directed_tensors:
        return Verdict(round_, ratios=norms)
    pairs = zip(totals[::2], totals[1::2], strict=True)
    ratios = tuple(psd_core.trust_ratio(parameter, direction) for parameter, direction in pairs)
    return replace(under or Verdict(round_), ratios=ratios, is_final=True)


def _corrected(round_: int, totals: Squares, each: int) -> Verdict:
    """The factors of each member's gradient of each tensor, whose `each` sums follow one another."""
    ratios: list[float] = []
    for start in range(0, len(totals or ()), each):
        assert totals is not None
        momentum, *of_members = totals[start : start + each]
        for at in range(0, len(of_members), 3):
            squares, plus, minus = of_members[at : at + 3]
            numbers = psd_core.square_root(squares), psd_core.square_root(momentum), psd_core.real(plus - minus)
            ratios += heloco.correction(*numbers) if all(map(math.isfinite, numbers)) else (math.inf, math.inf)
    if totals is None or not all(map(math.isfinite, ratios)):
        return Verdict(round_, skip=True)
    return Verdict(round_, ratios=tuple(ratios))
