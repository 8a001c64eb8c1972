"""Users' own rules for tests, which shards import by name."""

from __future__ import annotations

from typing import Any

import numpy as np


class Drifting:
    """Momentum whose share falls with the number of updates, beside a mean of squares that begins with 0.5; in place."""

    slots = {"velocity": 0.0, "mean_square": 0.5}
    hyper = {"lr": 0.1, "friction": 0.9}

    def apply(self, param: Any, grad: Any, slots: Any, hyper: Any) -> None:
        velocity, mean_square = slots["velocity"], slots["mean_square"]
        mean_square += (grad * grad - mean_square) / 8
        velocity *= hyper["friction"] / (1 + 1 / hyper["step"])
        velocity += grad / np.sqrt(mean_square)
        param -= hyper["lr"] * velocity


class Failing(Drifting):
    """Raises from the third update on."""

    def apply(self, param: Any, grad: Any, slots: Any, hyper: Any) -> None:
        super().apply(param, grad, slots, hyper)
        if hyper["step"] > 2:
            raise ArithmeticError("enough")
