"""The terms of a job, from a program's keywords and the environment's defaults, checked before anything is connected.

What depends on the number of workers, or on their rules, JobSpec checks. Must not know connections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from typing_extensions import Unpack

from psd.contract import arguments
from psd.contract.consistency import Consistency
from psd.contract.environment import job_defaults
from psd.contract.errors import InvalidRequest
from psd.contract.jobspec import AGGREGATIONS, NAN_POLICIES, REDUCTIONS, GroupSpec, JobSpec, TensorSpec
from psd.contract.keywords import DEFAULTS, JobKeywords
from psd.contract.staleness import parse_staleness
from psd.contract.tables import SparseTableSpec


@dataclass(frozen=True)
class JobTerms:
    """The terms of a program's JobKeywords, or the environment's where they say nothing.

    Attributes:
        quorum: 0 for all workers. staleness: empty for none. clip_norm: 0 for no limit.
        is_aggregation_given: False if `aggregation` is exact, too, where a rule needs that.
    """

    consistency: Consistency
    reduction: str
    quorum: int
    aggregation: str
    is_aggregation_given: bool
    staleness: str
    clip_norm: float
    nan_policy: str

    @classmethod
    def of(cls, **job: Unpack[JobKeywords]) -> JobTerms:
        """The terms for these keywords. Raises InvalidRequest, which names the keyword that is wrong."""
        default = job_defaults()
        mode = default.consistency_of(job.get("consistency"))
        reduction, aggregation = job.get("reduce"), job.get("aggregation")
        quorum, clip_norm = job.get("quorum"), job.get("clip_norm")
        if quorum is None:
            quorum = default.quorum if mode.has_rounds else 0
        elif arguments.whole_number(InvalidRequest, "quorum", quorum) == 0:
            raise InvalidRequest("quorum: must be 1 to world_size, or None for all workers, got 0")
        if clip_norm is not None and not arguments.real_number(InvalidRequest, "clip_norm", clip_norm) > 0:
            raise InvalidRequest(f"clip_norm: must be > 0, or None for no clipping, got {clip_norm}")
        nan_policy = job.get("nan_policy", DEFAULTS["nan_policy"])
        arguments.choice(InvalidRequest, "nan_policy", nan_policy, NAN_POLICIES)
        needs_exact = clip_norm is not None or nan_policy == "skip"
        usual = "fast" if not mode.has_rounds else "exact" if needs_exact else default.aggregation
        return cls(
            mode,
            arguments.choice(InvalidRequest, "reduce", default.reduction if reduction is None else reduction, REDUCTIONS),
            int(quorum),
            arguments.choice(InvalidRequest, "aggregation", usual if aggregation is None else aggregation, AGGREGATIONS),
            aggregation is not None,
            parse_staleness(job.get("staleness")),
            float(clip_norm or 0.0),
            nan_policy,
        )

    def spec(
        self, world_size: int, tensors: Sequence[TensorSpec], groups: Sequence[GroupSpec], tables: Sequence[SparseTableSpec]
    ) -> JobSpec:
        """The declaration of a job on these terms; raises as JobSpec does."""
        is_layerwise = any(group.is_layerwise for group in groups)
        is_exact = is_layerwise and self.consistency.has_rounds and not self.is_aggregation_given
        return JobSpec(
            world_size=world_size,
            tensors=tuple(tensors),
            groups=tuple(replace(group, staleness="" if group.is_static else self.staleness) for group in groups),
            consistency=self.consistency,
            reduction=self.reduction,
            quorum=self.quorum,
            aggregation="exact" if is_exact else self.aggregation,
            clip_norm=self.clip_norm,
            nan_policy=self.nan_policy,
            tables=tuple(tables),
        )
