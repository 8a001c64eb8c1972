"""Checks a gradient for NaN and infinity before anything of it is sent. Must not know shards or sessions."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import InvalidRequest, NonFiniteGradient
from psd.contract.jobspec import JobSpec
from psd_client.lanes.flat import FlatBuffers
from psd_client.worker.rows import RowGradients

logger = logging.getLogger("psd_client")


def check_skip(spec: JobSpec) -> None:
    """Raise InvalidRequest if a round is to be skipped, and the job skips none."""
    if spec.nan_policy != "skip":
        raise InvalidRequest(f'skip: the job was declared with nan_policy="{spec.nan_policy}", not "skip"')


def is_finite(
    gradients: FlatBuffers,
    present: NDArray[np.bool_] | None,
    rows: RowGradients,
    rank: int,
    clock: int,
    *,
    is_expected: bool,
) -> bool:
    """Zero the tensors that are not present; False if a gradient is not finite, of which the log tells unless it is expected.

    Spaces in which nothing is present are left alone: they are not sent. Where the job allows such gradients, all are finite.

    Raises:
        NonFiniteGradient: a gradient is not finite, and the job's nan_policy is "refuse".
    """
    if present is not None:
        for index in gradients.absent(present):
            gradients.views[index][...] = 0
    policy = gradients.layout.spec.nan_policy
    if policy == "allow":
        return True
    tensor = gradients.first_nonfinite(present)
    row = rows.first_nonfinite() if tensor is None else None
    if tensor is None and row is None:
        return True
    name = repr(tensor) if row is None else f"id {row[1]} of table {row[0]!r}"
    if policy == "refuse":
        raise NonFiniteGradient(
            f"worker {rank}: the gradient of {name} at step {clock} holds NaN or infinity; nothing was sent",
            rank=rank,
            clock=clock,
            **({"tensor": tensor} if row is None else {"table": row[0], "id": row[1]}),
        )
    if not is_expected:
        what = "the gradient of %s at step %d holds NaN or infinity; the round is skipped"
        logger.warning("psd: worker %d: " + what, rank, name, clock)
    return False
