"""sgd: hand-computed numbers, a float64 oracle, and torch.optim.SGD."""

import itertools

import numpy as np
import pytest
from helpers_rules import over, update
from hypothesis import given
from hypothesis import strategies as st

FLAGS = [
    {"momentum": momentum, "dampening": dampening, "weight_decay": decay, "nesterov": nesterov, "maximize": maximize}
    for momentum, dampening, decay, nesterov, maximize in itertools.product(
        [0.0, 0.9], [0.0, 0.3], [0.0, 0.01], [False, True], [False, True]
    )
]
TORCH_FLAGS = [f for f in FLAGS if not f["nesterov"] or (f["momentum"] and not f["dampening"])]  # the rest torch refuses
TOLERANCE = {np.float32: 1e-6, np.float64: 1e-12}

everything = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def name_of(flags):
    return "-".join(f"{key}={value}" for key, value in flags.items() if value) or "plain"


def oracle(p, g, b, lr, momentum, dampening, weight_decay, nesterov, maximize, step):
    """SGD on float64 arrays, as torch's documentation states it."""
    g = (-g if maximize else g) + weight_decay * p
    if momentum:
        b = g if step == 1 else momentum * b + (1 - dampening) * g
        g = g + momentum * b if nesterov else b
    return p - lr * g, b


@everything
def test_sgd_when_plain_subtracts_lr_times_gradient(dtype):
    param = np.array([1, 2], dtype)

    update("sgd", param, np.array([4, -8], dtype), lr=0.25)

    assert param.tolist() == [0, 4]


@everything
def test_sgd_two_steps_by_hand(dtype):
    """First g = 2 + 0.5*4 = 4 = b, p = 4 - 2; then g = 2 + 0.5*2 = 3, b = 0.5*4 + 0.75*3 = 4.25, p = 2 - 2.125."""
    param, buffer = np.array([4], dtype), np.array([np.nan], dtype)
    flags = {"lr": 0.5, "momentum": 0.5, "dampening": 0.25, "weight_decay": 0.5}

    update("sgd", param, np.array([2], dtype), buffer, **flags, step=1)
    assert (param[0], buffer[0]) == (2, 4)

    update("sgd", param, np.array([2], dtype), buffer, **flags, step=2)
    assert (param[0], buffer[0]) == (-0.125, 4.25)


@everything
def test_sgd_nesterov_and_maximize_by_hand(dtype):
    """Ascent on gradient 2: g = -2, b = 0.5*8 - 2 = 2, look-ahead g + 0.5*b = -1, p = 1 + 0.25."""
    param, buffer = np.array([1], dtype), np.array([8], dtype)

    update("sgd", param, np.array([2], dtype), buffer, lr=0.25, momentum=0.5, nesterov=True, maximize=True, step=2)

    assert (param[0], buffer[0]) == (1.25, 2)


@everything
@over("n", [0, 1, 3, 257, 1001])
@over("flags", FLAGS)
def test_sgd_one_step_is_within_4_ulps_of_a_float64_oracle(dtype, n, flags, rng):
    """Each result is rounded at most once per operation: 4 ulps of the largest term that goes into it."""
    param, grad, buffer = (rng.standard_normal((3, n)) + 3).astype(dtype)
    before = buffer.copy()
    p64, b64 = oracle(*(x.astype(np.float64) for x in (param, grad, buffer)), lr=0.1, **flags, step=2)
    largest = 10 * np.finfo(dtype).eps

    update("sgd", param, np.frombuffer(grad.tobytes(), dtype), buffer, lr=0.1, **flags, step=2)

    np.testing.assert_allclose(param, p64, rtol=0, atol=4 * largest)
    np.testing.assert_allclose(buffer, b64 if flags["momentum"] else before, rtol=0, atol=4 * largest)


@everything
@over("flags", TORCH_FLAGS)
def test_sgd_a_hundred_steps_match_torch(dtype, flags, rng):
    torch = pytest.importorskip("torch")
    start, grads = rng.standard_normal(101).astype(dtype), rng.standard_normal((100, 101)).astype(dtype)
    theirs = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = torch.optim.SGD([theirs], lr=0.05, **flags)
    ours, buffer = start.copy(), np.zeros_like(start)

    for step, grad in enumerate(grads, start=1):
        theirs.grad = torch.from_numpy(grad.copy())
        optimizer.step()
        update("sgd", ours, grad, buffer, lr=0.05, **flags, step=step)

    expected = theirs.detach().numpy()
    np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE[dtype] * np.abs(expected).max())


@given(st.integers(0, 300), st.integers(0, 300), st.sampled_from(FLAGS))
def test_sgd_on_a_whole_is_sgd_on_its_parts(left, right, flags):
    """Elements do not know of each other: cutting an array anywhere changes no bit."""
    whole = np.random.default_rng(left * 301 + right).standard_normal((3, left + right)).astype(np.float32)
    parts = whole.copy()

    update("sgd", *whole, lr=0.1, **flags, step=3)
    update("sgd", *(row[:left] for row in parts), lr=0.1, **flags, step=3)
    update("sgd", *(row[left:] for row in parts), lr=0.1, **flags, step=3)

    assert whole.tobytes() == parts.tobytes()


def test_sgd_resumed_from_saved_state_continues_with_the_same_bits(rng):
    """Parameter, buffer and step count are the whole state."""
    grads = rng.standard_normal((10, 50)).astype(np.float32)
    param, buffer = np.ones((2, 50), np.float32)
    flags = {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "nesterov": True}
    saved = None
    for step, grad in enumerate(grads, start=1):
        update("sgd", param, grad, buffer, **flags, step=step)
        if step == 5:
            saved = param.copy(), buffer.copy()

    for step, grad in enumerate(grads[5:], start=6):
        update("sgd", saved[0], grad, saved[1], **flags, step=step)

    assert saved[0].tobytes() == param.tobytes()
