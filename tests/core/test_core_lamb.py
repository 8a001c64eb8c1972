"""LAMB against the paper, of whole tensors, and of the pieces that norms put together."""

import numpy as np
import pytest
from helpers_rules import cases, update

import psd_core

everything = pytest.mark.parametrize("dtype", [np.float32, np.float64])
every_case = pytest.mark.parametrize("case", cases("lamb"), ids=str)
TOLERANCE = {np.float32: 1e-6, np.float64: 1e-12}
STEPS = 100


def by_the_paper(start, grads, lr, beta1, beta2, eps, weight_decay):
    """You et al. 2020, algorithm 2, line by line in float64, phi being the identity; a norm of 0 leaves the step as it is."""
    x, m, v = start.astype(np.float64), np.zeros(start.shape), np.zeros(start.shape)
    for t, g in enumerate(grads.astype(np.float64), start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        m_hat = m / (1 - beta1**t)
        v_hat = v / (1 - beta2**t)
        r = m_hat / (np.sqrt(v_hat) + eps)
        u = r + weight_decay * x
        x_norm, u_norm = np.linalg.norm(x), np.linalg.norm(u)
        x = x - lr * (x_norm / u_norm if x_norm and u_norm else 1) * u
    return x, m, v


def numbers(rng, n, dtype):
    return rng.standard_normal(n).astype(dtype), rng.standard_normal((STEPS, n)).astype(dtype)


def assert_close(actual, expected, dtype, factor=1):
    assert np.linalg.norm(actual - expected) <= factor * TOLERANCE[dtype] * np.linalg.norm(expected)


@everything
@every_case
@pytest.mark.parametrize("start_scale", [0, 1])
def test_a_hundred_steps_match_the_paper(dtype, case, start_scale, rng):
    """Also from zeros, where the first step has no trust ratio."""
    start, grads = numbers(rng, 1001, dtype)
    start *= start_scale
    sign = -1 if "maximize" in case.flags else 1
    expected, m, v = by_the_paper(start, sign * grads, **case.named)

    param, slots = start.copy(), case.new_slots(start)
    for step, grad in enumerate(grads, start=1):
        case.update(param, grad, slots, step)

    assert_close(param, expected, dtype)
    assert_close(slots[0], m, dtype, 4)
    assert_close(slots[1], v, dtype, 4)


@everything
@every_case
def test_pieces_make_the_step_of_the_whole(dtype, case, rng):
    """A tensor cut between runs: directions from step_block, ratios from the pieces' squares; the same bits."""
    start, grads = numbers(rng, 1001, dtype)
    whole, slots = start.copy(), case.new_slots(start)
    pieces = [start[:400].copy(), start[400:416].copy(), start[416:].copy()]
    piece_slots = [case.new_slots(piece) for piece in pieces]

    for step, grad in enumerate(grads[:10], start=1):
        case.update(whole, grad, slots, step)
        directions = [np.empty_like(piece) for piece in pieces]
        for piece, direction, part, mine in zip(pieces, directions, np.split(grad, [400, 416]), piece_slots, strict=True):
            case.apply(piece, direction, part, mine, step)
        ratio = psd_core.trust_ratio(sum(map(psd_core.square_sum, pieces)), sum(map(psd_core.square_sum, directions)))
        for piece, direction in zip(pieces, directions, strict=True):
            psd_core.accumulate(piece, direction, -case.named["lr"] * ratio)

    np.testing.assert_array_equal(np.concatenate(pieces), whole)


def test_by_hand():
    """Betas of 0: the direction is the sign of the gradient, plus the decay; |x| = 5, |u| = sqrt(2) without decay."""
    param, slots = np.array([3.0, 4.0]), np.zeros((2, 2))

    update("lamb", param, np.array([2.0, -8.0]), *slots, lr=0.1, beta1=0, beta2=0, eps=0, weight_decay=0, step=1)

    np.testing.assert_allclose(param, [3 - 0.5 / np.sqrt(2), 4 + 0.5 / np.sqrt(2)], rtol=1e-15)
