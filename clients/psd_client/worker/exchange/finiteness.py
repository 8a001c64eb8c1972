"""Checks a gradient for NaN and infinity before anything of it is sent. Must not know shards or sessions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import NonFiniteGradient
from psd_client.lanes.flat import FlatBuffers
from psd_client.worker.rows import RowGradients


def check_finite(
    gradients: FlatBuffers, present: NDArray[np.bool_] | None, rows: RowGradients, rank: int, clock: int
) -> str | None:
    """Zero the tensors that are not present; return the name of the first gradient that is not finite, or None.

    Spaces in which nothing is present are left alone: they are not sent.

    Raises:
        NonFiniteGradient: a gradient is not finite, and the job's nan_policy is "refuse".
    """
    if present is not None:
        for index in gradients.absent(present):
            gradients.views[index][...] = 0
    policy = gradients.layout.spec.nan_policy
    if policy == "allow":
        return None
    tensor = gradients.first_nonfinite(present)
    row = rows.first_nonfinite() if tensor is None else None
    if tensor is None and row is None:
        return None
    name = repr(tensor) if row is None else f"id {row[1]} of table {row[0]!r}"
    if policy == "refuse":
        raise NonFiniteGradient(
            f"worker {rank}: the gradient of {name} at step {clock} holds NaN or infinity; nothing was sent",
            rank=rank,
            clock=clock,
            **({"tensor": tensor} if row is None else {"table": row[0], "id": row[1]}),
        )
    return name
