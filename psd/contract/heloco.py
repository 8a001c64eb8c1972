"""HeLoCo's correction of a difference that is late or opposed (arXiv 2606.00271): how far it is turned towards the momentum.

With d a learner's difference of a tensor, m the momentum of the outer rule before the round, as a mean of differences, c the
cosine of the two, and trust = |d| / (|d| + KAPPA |m|):

    c >= PASSES        d is taken as it is
    c < 0              d loses b of its part along m, with b = min(SHRINKS |c| trust, SHRINKS_MAX)
    else               d is turned, its norm kept: along (1 - t) d/|d| + t m/|m|, with t = min(TURNS (1 - c) trust, 1)

Pure functions on numbers; psd/contract/verdicts.py has the norms and products, over whole tensors.
"""

from __future__ import annotations

import math

PASSES = 0.2
"""The least cosine of a difference that is taken as it is."""

SHRINKS, SHRINKS_MAX = 1.0, 0.5
"""Strength with which an opposed difference loses its opposing part, and the most of it that it loses."""

TURNS = 1.0
"""Strength with which a difference that hardly agrees is turned."""

KAPPA = 1.0
"""Weight of the momentum's norm beside the difference's."""

NORM_MIN = 2.0**-100
"""A momentum that is shorter, or so much shorter than the difference, has no direction: the factors might not be float32."""


def correction(norm: float, momentum: float, product: float) -> tuple[float, float]:
    """The corrected difference as keep * d + turn * m; both are finite and >= 0.

    Args:
        norm, momentum: |d| and |m|. product: the inner product of d and m.
    """
    if norm < NORM_MIN or momentum < NORM_MIN * max(1.0, norm):
        return 1.0, 0.0
    cosine = max(-1.0, min(1.0, product / norm / momentum))
    if cosine >= PASSES:
        return 1.0, 0.0
    trust, ratio = norm / (norm + KAPPA * momentum), norm / momentum
    if cosine < 0:
        return 1.0, min(SHRINKS * -cosine * trust, SHRINKS_MAX) * -cosine * ratio
    turned = min(TURNS * (1 - cosine) * trust, 1.0)
    kept = 1 - turned
    length = math.sqrt(kept * kept + 2 * kept * turned * cosine + turned * turned)
    return kept / length, turned * ratio / length
