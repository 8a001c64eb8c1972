"""The look for NaN and infinity in a gradient before anything of it is sent. Must not know shards or sessions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import NonFiniteGradient
from psd_client.lanes.flat import FlatBuffers


def check_finite(gradients: FlatBuffers, present: NDArray[np.bool_] | None, rank: int, clock: int) -> str | None:
    """Zero the tensors that are not present; return the first one, if any, whose gradient makes the round be skipped.

    Raises:
        NonFiniteGradient: there is one, and the job's nan_policy is "refuse".
    """
    if present is not None:
        for tensor in np.flatnonzero(~present).tolist():
            gradients.views[tensor][...] = 0
    policy = gradients.layout.spec.nan_policy
    name = gradients.first_nonfinite() if policy != "allow" else None
    if name is not None and policy == "refuse":
        raise NonFiniteGradient(
            f"worker {rank}: the gradient of {name!r} at step {clock} holds NaN or infinity; nothing was sent",
            rank=rank,
            tensor=name,
            clock=clock,
        )
    return name
