"""Line searches of L-BFGS, on numbers alone. Must not know vectors or workers.

A search is a generator: it yields a step to try, is sent the objective and the slope there, and so on. It returns the step to
take, which is the last one tried, or raises `NoStep`. If a step is too long, objective and slope may be infinite or NaN.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import NamedTuple

DECREASE = 1e-4
"""A step must reach this share of the decrease that the slope predicts: c1 of Nocedal and Wright."""

CURVATURE = 0.9
"""At a step the slope may be this share of the slope at the start: their c2, as they advise for quasi-Newton methods."""

GROWTH = 4.0
"""Largest factor by which a step is lengthened at once."""

TRIALS_MAX = 30

ROUNDING = 2.0**-44
"""A relative rise of the objective up to this counts as rounding: near the minimum, differences are smaller than that."""

Search = Generator[float, tuple[float, float], float]


class NoStep(Exception):
    """Raised when no step along the direction makes the objective small enough."""


class _Point(NamedTuple):
    step: float
    fun: float
    slope: float


def strong_wolfe(fun: float, slope: float, first: float) -> Search:
    """Search for a step that satisfies the strong Wolfe conditions: Nocedal and Wright, 2nd ed., algorithms 3.5 and 3.6.

    Args:
        fun, slope: objective and slope at step 0; the slope is negative. first: the step to try first.
    """
    low, high = _Point(0.0, fun, slope), None  # the best step so far, and one beyond which none need be looked for
    step = first
    for _ in range(TRIALS_MAX):
        tried = _Point(step, *(yield step))
        too_high = not tried.fun <= fun + DECREASE * step * slope + ROUNDING * abs(fun)
        if too_high or (tried.fun > low.fun + ROUNDING * abs(fun)):
            high = tried
        elif abs(tried.slope) <= -CURVATURE * slope:
            return step
        else:
            if tried.slope * ((high.step if high else math.inf) - low.step) >= 0:
                high = low
            low = tried
        step = _between(low, high) if high else low.step * GROWTH
        if high and abs(high.step - low.step) <= 1e-12 * max(high.step, low.step):
            break
    if not low.fun < fun:
        raise NoStep
    yield low.step  # the slope is still steep there, but the objective is smaller
    return low.step


def _between(low: _Point, high: _Point) -> float:
    """The minimum of the cubic through both points, if it is well inside the interval; else the middle."""
    middle, width = (low.step + high.step) / 2, abs(high.step - low.step)
    if not (math.isfinite(high.fun) and math.isfinite(high.slope)):
        return middle
    d1 = low.slope + high.slope - 3 * (low.fun - high.fun) / (low.step - high.step)
    under_root = d1 * d1 - low.slope * high.slope
    if not under_root >= 0:
        return middle
    d2 = math.copysign(math.sqrt(under_root), high.step - low.step)
    below = high.slope - low.slope + 2 * d2
    step = high.step - (high.step - low.step) * (high.slope + d2 - d1) / below if below else middle
    return step if abs(step - middle) <= 0.4 * width else middle


def backtracking(fun: float, first: float) -> Search:
    """Halve the step until the objective is small enough, as OWL-QN does: Andrew and Gao 2007, section 3.2.

    Instead of a slope it is sent the change of the objective that the pseudo-gradient predicts for the step: a negative number.
    """
    step = first
    for _ in range(TRIALS_MAX):
        reached, promised = yield step
        if reached <= fun + DECREASE * promised + ROUNDING * abs(fun):
            return step
        step /= 2
    raise NoStep
