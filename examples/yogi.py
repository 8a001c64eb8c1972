"""Yogi (Zaheer et al. 2018, alg. 2), an update rule that psd does not have: for examples/custom_rule.py.

The shards import this module and run `apply` on their blocks; psd/contract/custom_rules.py says what a rule may rely on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Yogi:
    """Adam with a second moment that grows and shrinks by steps of the size of the squared gradient."""

    slots = {"exp_avg": 0.0, "exp_avg_sq": 1e-6}
    hyper = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-3}

    def apply(self, param: Array, grad: Array, slots: Mapping[str, Array], hyper: Mapping[str, float]) -> None:
        """Update a run of elements in place."""
        m, v = slots["exp_avg"], slots["exp_avg_sq"]
        m *= hyper["beta1"]
        m += (1 - hyper["beta1"]) * grad
        square = grad * grad
        v -= (1 - hyper["beta2"]) * np.sign(v - square) * square
        param -= hyper["lr"] * m / (np.sqrt(v) + hyper["eps"])
