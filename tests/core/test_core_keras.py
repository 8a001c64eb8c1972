"""Keras's forms of the rules over a hundred steps, against keras.optimizers' formulas in float64."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_rules import Case, keras_cases, over

STEPS = 100
TOLERANCE = {np.float32: 2e-6, np.float64: 1e-12}


def sgd(p, g, t, s, *, lr, momentum, dampening, weight_decay, nesterov):
    first = np.zeros_like(p) if t == 1 else s.get("v")
    share = 1 if t == 1 else 1 - dampening
    g = g + weight_decay * p
    v = s["v"] = momentum * first - share * lr * g
    if not momentum:
        return p - lr * g
    return p + momentum * v - lr * g if nesterov else p + v


def adam(p, g, t, s, *, lr, beta1, beta2, eps, weight_decay, amsgrad, decoupled_weight_decay):
    if decoupled_weight_decay:
        p = p - lr * weight_decay * p
    else:
        g = g + weight_decay * p
    m = s["m"] = s.get("m", 0) + (g - s.get("m", 0)) * (1 - beta1)
    v = s["v"] = s.get("v", 0) + (g**2 - s.get("v", 0)) * (1 - beta2)
    top = s["top"] = np.maximum(s.get("top", 0), v)
    alpha = lr * np.sqrt(1 - beta2**t) / (1 - beta1**t)
    return p - m * alpha / (np.sqrt(top if amsgrad else v) + eps)


def adagrad(p, g, t, s, *, lr, lr_decay, eps, weight_decay):
    g = g + weight_decay * p
    total = s["sum"] = s.get("sum", 0) + g**2
    return p - lr / (1 + (t - 1) * lr_decay) * g / np.sqrt(total + eps)


def adamax(p, g, t, s, *, lr, beta1, beta2, eps, weight_decay):
    g = g + weight_decay * p
    m = s["m"] = s.get("m", 0) + (g - s.get("m", 0)) * (1 - beta1)
    u = s["u"] = np.maximum(beta2 * s.get("u", 0), np.abs(g))
    return p - lr * m / ((1 - beta1**t) * (u + eps))


def rmsprop(p, g, t, s, *, lr, alpha, eps, weight_decay, momentum, centered):
    g = g + weight_decay * p
    square = s["square"] = alpha * s.get("square", 0) + (1 - alpha) * g**2
    mean = s["mean"] = alpha * s.get("mean", 0) + (1 - alpha) * g
    increment = lr * g / np.sqrt((square - mean**2 if centered else square) + eps)
    s["buffer"] = momentum * s.get("buffer", 0) + increment
    return p - s["buffer"]


FORMULAS = {"sgd": sgd, "adam": adam, "adagrad": adagrad, "adamax": adamax, "rmsprop": rmsprop}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@over("case", keras_cases())
def test_a_hundred_steps_match_keras_formulas(dtype, case, rng):
    """With a learning rate that changes, and an epsilon large enough to show where it is."""
    param = rng.standard_normal(301).astype(dtype)
    grads = rng.standard_normal((STEPS, 301)).astype(dtype)
    expected, theirs, slots = param.astype(np.float64), {}, case.new_slots(param)
    options = {name: value for name, value in case.options.items() if name not in ("keras", "maximize")}
    sign = -1 if "maximize" in case.flags else 1

    for step, grad in enumerate(grads, start=1):
        changed = {"lr": case.named["lr"] * (1 + step % 3)} | ({"eps": 1e-3} if "eps" in options else {})
        expected = FORMULAS[case.rule](expected, sign * grad.astype(np.float64), step, theirs, **options | changed)
        scalars = tuple((case.named | changed).values())
        Case(case.rule, scalars, case.flags).update(param, grad, slots, step)

    np.testing.assert_allclose(param, expected, rtol=0, atol=TOLERANCE[dtype] * np.abs(expected).max())
