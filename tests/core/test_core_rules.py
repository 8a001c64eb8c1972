"""Every rule over a hundred steps: torch.optim where it has the rule, the paper in float64 where it has not."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_rules import Case, cases, over, update

from psd_core.rules import CLASSES, DelayedNesterov

STEPS = 100

TOLERANCE = {np.float32: 1e-6, np.float64: 1e-12}
"""Of the tensor's largest value. An element near 0 is the difference of larger numbers, and so are the updates that led there:
it carries their rounding errors, whoever computes it, and a bound relative to the element itself would bound nothing. Slots get
four times that: Adadelta's average of squared updates feeds on itself, and so do its rounding errors."""

TORCH_NAMES = {kind.rule: kind.__name__ for kind in CLASSES if kind.is_in_torch and not kind.always}

everything = pytest.mark.parametrize("dtype", [np.float32, np.float64])
every_case = over("case", cases())


def numbers(rng, n, dtype):
    return rng.standard_normal(n).astype(dtype), rng.standard_normal((STEPS, n)).astype(dtype)


def train(case: Case, start, grads, slot_value=0.0):
    param = start.copy()
    slots = case.new_slots(param, slot_value)
    for step, grad in enumerate(grads, start=1):
        case.update(param, grad, slots, step)
    return param, slots


def torch_optimizer(torch, case: Case, param, **more):
    options = case.options
    options.pop("keras", None)
    if "beta1" in options:
        options["betas"] = options.pop("beta1"), options.pop("beta2")
    name = TORCH_NAMES[case.rule]
    if case.rule == "adam" and options.pop("decoupled_weight_decay"):
        name = "AdamW"
    return getattr(torch.optim, name)([param], **options, **more)


def assert_close(actual, expected, dtype, factor=1):
    assert actual.dtype == dtype
    np.testing.assert_allclose(actual, expected, rtol=0, atol=factor * TOLERANCE[dtype] * np.abs(expected).max())


@pytest.fixture
def torch(request):
    """Torch, with its scalars in the type of the test: NAdam keeps a running product as a tensor of the default type."""
    torch = pytest.importorskip("torch")
    before = torch.get_default_dtype()
    torch.set_default_dtype({np.float32: torch.float32, np.float64: torch.float64}[request.getfixturevalue("dtype")])
    yield torch
    torch.set_default_dtype(before)


@everything
@over("case", cases(*TORCH_NAMES))
def test_a_hundred_steps_match_torch(torch, dtype, case, rng):
    start, grads = numbers(rng, 1001, dtype)
    theirs = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = torch_optimizer(torch, case, theirs)

    for grad in grads:
        theirs.grad = torch.from_numpy(grad.copy())
        optimizer.step()
    ours, slots = train(case, start, grads)

    assert_close(ours, theirs.detach().numpy(), dtype)
    state = optimizer.state[theirs]
    for name, slot in zip(case.slots, slots, strict=True):
        assert_close(slot, state[{"momentum": "momentum_buffer"}.get(name, name)].numpy(), dtype, 4)


@everything
def test_adagrads_sum_begins_with_its_initial_value(torch, dtype, rng):
    """PEERS: slots that begin with the wrong numbers."""
    start, grads = numbers(rng, 101, dtype)
    theirs = torch.nn.Parameter(torch.from_numpy(start.copy()))
    case = cases("adagrad")[0]
    optimizer = torch_optimizer(torch, case, theirs, initial_accumulator_value=0.25)

    for grad in grads:
        theirs.grad = torch.from_numpy(grad.copy())
        optimizer.step()

    assert_close(train(case, start, grads, slot_value=0.25)[0], theirs.detach().numpy(), dtype)


def ftrl_by_the_paper(start, grads, lr, beta, l1, l2):
    """McMahan et al. 2013, algorithm 1, line by line, with the weights taken from z and n after each step."""
    w, z, n = start.astype(np.float64), np.zeros(start.shape), np.zeros(start.shape)
    for g in grads.astype(np.float64):
        sigma = (np.sqrt(n + g**2) - np.sqrt(n)) / lr
        z = z + g - sigma * w
        n = n + g**2
        w = np.where(np.abs(z) <= l1, 0, -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / lr + l2))
    return w, n, z


def lion_by_the_paper(start, grads, lr, beta1, beta2, weight_decay):
    """Chen et al. 2023, algorithm 2, line by line."""
    theta, m = start.astype(np.float64), np.zeros(start.shape)
    for g in grads.astype(np.float64):
        c = beta1 * m + (1 - beta1) * g
        theta = theta - lr * (np.sign(c) + weight_decay * theta)
        m = beta2 * m + (1 - beta2) * g
    return theta, m


@everything
@pytest.mark.parametrize("case", cases("ftrl"), ids=str)
@pytest.mark.parametrize("start_scale", [0, 1])
def test_ftrl_matches_the_paper(dtype, case, start_scale, rng):
    start, grads = numbers(rng, 1001, dtype)
    start *= start_scale
    expected, n, z = ftrl_by_the_paper(start, grads, **case.named)

    actual, slots = train(case, start, grads)

    assert_close(actual, expected, dtype)
    assert_close(slots[0], n, dtype, 4)
    assert_close(slots[1], z, dtype, 4)


def test_ftrl_makes_weights_exactly_zero(rng):
    """What l1 is for."""
    start, grads = numbers(rng, 1001, np.float32)
    case = Case("ftrl", (0.1, 1.0, 10.0, 0.0), ())
    expected, _, _ = ftrl_by_the_paper(0 * start, grads, **case.named)

    actual, _ = train(case, 0 * start, grads)

    assert 0 < (actual == 0).sum() < 1001
    np.testing.assert_array_equal(actual == 0, expected == 0)


@everything
@pytest.mark.parametrize("case", cases("lion", "delayed_nesterov"), ids=str)
def test_rules_with_one_momentum_match_their_papers(dtype, case, rng):
    start, grads = numbers(rng, 1001, dtype)
    sign = -1 if "maximize" in case.flags else 1
    by_the_paper = lion_by_the_paper if case.rule == "lion" else delayed_nesterov_by_the_paper
    expected, m = by_the_paper(start, sign * grads, **case.named)

    actual, slots = train(case, start, grads)

    assert_close(actual, expected, dtype)
    assert_close(slots[0], m, dtype, 4)


def delayed_nesterov_by_the_paper(start, grads, lr, momentum, every, activation):
    """Liu et al. 2024 (arXiv:2401.09135), algorithm 3, in float64."""
    theta, m, buffer = start.astype(np.float64), np.zeros(len(start)), np.zeros(len(start))
    for t, g in enumerate(grads.astype(np.float64)):
        buffer += g
        if (t + 1) % every == 0:
            m = momentum * m + buffer / every
            theta -= lr * ((1 - activation * every + activation) * momentum * m + g / every)
            buffer[:] = 0
        else:
            theta -= lr * (activation * momentum * m + g / every)
    return theta, m


def test_delayed_nesterov_for_each_gradient_is_nesterovs_momentum(rng):
    """But for rounding."""
    start, grads = numbers(rng, 101, np.float64)
    ours, theirs = start.copy(), start.copy()
    slots, velocity = np.zeros((2, 101)), np.zeros(101)
    for step, grad in enumerate(grads, 1):
        update("delayed_nesterov", ours, grad, *slots, step=step, lr=0.1, momentum=0.9, every=1)
        update("sgd", theirs, grad, velocity, step=step, lr=0.1, momentum=0.9, nesterov=True)

    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 2.5}, "every: must be a whole number"),
        ({"every": 0}, "every: must be > 0"),
        ({"every": 4, "activation": 0.3}, "activation: must be at most 1 / every, got 0.3"),
    ],
)
def test_delayed_nesterov_with_numbers_that_it_has_not_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        DelayedNesterov(lr=0.1, **options)


def test_lion_does_not_move_where_there_is_no_direction():
    """The sign of 0 is 0."""
    param = np.array([1, 2], np.float32)

    update("lion", param, np.array([0, 3], np.float32), np.zeros(2, np.float32), lr=0.5)

    assert param.tolist() == [1, 1.5]


@everything
def test_adam_first_step_by_hand(dtype):
    """At step 1 the bias corrections cancel the betas: the step is lr * g / (|g| + eps)."""
    param, slots = np.array([1, 1], dtype), np.zeros((2, 2), dtype)

    update("adam", param, np.array([4, -0.5], dtype), *slots, lr=0.25, beta1=0.5, beta2=0.75, eps=0, step=1)

    assert param.tolist() == [0.75, 1.25]
    assert slots.tolist() == [[2, -0.25], [4, 0.0625]]


def test_amsgrad_is_applied_once():
    """PEERS: a kernel that ran the AMSGrad update and then the plain one. With a smaller gradient the maximum stays."""
    param, (m, v, top) = np.zeros(1), np.zeros((3, 1))
    for step, grad in enumerate([8.0, 1.0], start=1):
        update("adam", param, np.array([grad]), m, v, top, lr=1, beta1=0, beta2=0.5, eps=0, amsgrad=True, step=step)

    assert (v[0], top[0]) == (16.5, 32)
    np.testing.assert_allclose(param, -1 - 1 / np.sqrt(32 / 0.75), rtol=1e-15)


def test_weight_decay_goes_where_its_form_says():
    """With a gradient of 0: Adam's decay is a gradient like any other, AdamW's shrinks the parameter and leaves the slots."""
    coupled, decoupled, zero = np.array([2.0]), np.array([2.0]), np.zeros(1)
    slots, slots_w = np.zeros((2, 1)), np.zeros((2, 1))
    options = {"lr": 0.125, "eps": 0.5, "weight_decay": 0.5, "step": 1}

    update("adam", coupled, zero, *slots, **options)
    update("adam", decoupled, zero, *slots_w, decoupled_weight_decay=True, **options)

    np.testing.assert_allclose(coupled, 2 - 0.125 * 1 / 1.5)
    assert decoupled[0] == 2 * (1 - 0.125 * 0.5)
    assert slots.all()
    assert not slots_w.any()


@every_case
def test_second_moments_never_fall_below_zero(case, rng):
    """PEERS: a slot below 0 is NaN at the next root. Tiny, huge and constant gradients."""
    start = rng.standard_normal(300).astype(np.float32)
    scale = np.repeat(np.array([1e-30, 1.0, 1e6], np.float32), 100)
    param, slots = train(case, start, np.tile(scale * start, (STEPS, 1)))

    squares = {"sum", "square_avg", "acc_delta", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "accumulator"}
    for name, slot in zip(case.slots, slots, strict=True):
        assert name not in squares or (slot >= 0).all()
    assert np.isfinite(param).all()


@every_case
def test_resuming_from_saved_state_continues_with_the_same_bits(case, rng):
    """Parameter, slots and step count are the whole state."""
    start, grads = numbers(rng, 50, np.float32)
    param, slots = train(case, start, grads)

    saved, saved_slots = train(case, start, grads[:37])
    saved, saved_slots = saved.copy(), [slot.copy() for slot in saved_slots]
    for step, grad in enumerate(grads[37:], start=38):
        case.update(saved, grad, saved_slots, step)

    assert saved.tobytes() == param.tobytes()
    assert [a.tobytes() for a in saved_slots] == [b.tobytes() for b in slots]


@pytest.mark.parametrize(("beta", "step"), [(0.9, 1), (0.999, 2), (0.999, 1000), (0.999999, 10**6), (0.0, 3), (0.5, 2**40)])
def test_bias_corrections_are_those_of_the_exact_power(beta, step):
    """Powers by repeated squaring lose next to nothing."""
    param, slots = np.zeros(1), np.zeros((2, 1))

    update("adamax", param, np.ones(1), *slots, lr=1, beta1=beta, beta2=0, eps=0, step=step)

    np.testing.assert_allclose(param, -(1 - beta) / -np.expm1(step * np.log(beta)) if beta else -1, rtol=1e-9)


@pytest.mark.parametrize("step", [1, 2, 10, 1000, 10**6])
@pytest.mark.parametrize("momentum_decay", [0, 0.004, 3, 1e30])
def test_nadams_product_of_momenta(step, momentum_decay):
    """The closed form in C against the running product in Python."""
    momenta = [0.9 * (1 - 0.5 * 0.96 ** (i * momentum_decay)) for i in range(1, min(step, 2000) + 1)]
    product, last = np.prod(momenta), 0.9 * (1 - 0.5 * 0.96 ** (step * momentum_decay))
    following = 0.9 * (1 - 0.5 * 0.96 ** ((step + 1) * momentum_decay))
    param, slots = np.zeros(1), np.zeros((2, 1))

    update("nadam", param, np.ones(1), *slots, lr=1, beta1=0.9, beta2=0, eps=0, momentum_decay=momentum_decay, step=step)

    # exp_avg is 0.1 after the first gradient.
    expected = -(1 - last) / (1 - product) - 0.1 * following / (1 - product * following)
    np.testing.assert_allclose(param, expected, rtol=1e-12)


def test_one_test_over_all_cases_names_the_one_that_fails():
    """And runs those before it."""
    seen = []

    @over("value", [1, 2, 3])
    def below(limit, value):
        seen.append(value)
        assert value < limit

    below(limit=4)
    with pytest.raises(AssertionError, match=r"^value: 2$"):
        below(limit=2)
    assert seen == [1, 2, 3, 1, 2]
