"""The ways in which a round's gradients of a tensor become one, other than the job's reduction, and what each needs of a job.

psd/state/aggregation/directed_rounds.py and corrected_rounds.py merge so. Must not know how.
"""

from __future__ import annotations

from typing import Any

from psd.contract.errors import InvalidRequest

RDA, HELOCO = "rda", "heloco"

MERGES = ("", RDA, HELOCO)
"""Values of TensorSpec.merge."""


def check_merges(spec: Any) -> None:
    """Raise InvalidRequest if a tensor is merged in a way that the job does not allow. spec: a JobSpec, which calls this."""
    tensor = next((tensor for tensor in spec.tensors if tensor.merge), None)
    if tensor is None:
        return
    what = f"tensor {tensor.name!r}: merge: "
    for other in spec.tensors:
        if other.merge not in MERGES:
            raise InvalidRequest(f"tensor {other.name!r}: merge: must be one of {sorted(MERGES)}, got {other.merge!r}")
        if other.merge and spec.groups[other.group].is_static:
            raise InvalidRequest(f"tensor {other.name!r}: merge: is {other.merge}, but nothing is pushed to it")
        if other.merge and other.merge != tensor.merge:
            raise InvalidRequest(f"tensor {other.name!r}: merge: is {other.merge}, but {tensor.name!r} has {tensor.merge}")
        if other.merge == HELOCO:
            _check_momentum(spec, other)
    if not spec.consistency.has_rounds:
        raise InvalidRequest(
            f"{what}{tensor.merge} merges the gradients of a round, and {spec.consistency} has no rounds; in sync with "
            "quorum 1 each gradient that comes is one"
        )
    if spec.aggregation != "exact":
        raise InvalidRequest(
            f"{what}{tensor.merge} needs aggregation exact, by which all shards agree on a round's members; it is "
            f"{spec.aggregation}"
        )
    if spec.reduction != "mean" or spec.nan_policy == "allow":
        raise InvalidRequest(
            f"{what}{tensor.merge} needs reduce mean, and nan_policy refuse or skip; they are {spec.reduction} and "
            f"{spec.nan_policy}"
        )
    if spec.clip_norm or spec.layerwise_tensors or spec.tables:
        raise InvalidRequest(f"{what}{tensor.merge} does not go with clip_norm, a layer-wise rule or tables")


def _check_momentum(spec: Any, tensor: Any) -> None:
    group = spec.groups[tensor.group]
    if group.info.momentum_at(group.flags) is None:
        raise InvalidRequest(
            f"tensor {tensor.name!r}: merge: heloco compares gradients with the rule's momentum, and {group.rule} has none "
            "here; use SGD with momentum, DelayedNesterov, or one of Adam's kind"
        )
    for flag in ("keras", "maximize"):
        if flag in group.flags:
            raise InvalidRequest(f"tensor {tensor.name!r}: merge: heloco does not go with {group.rule}'s {flag}")
