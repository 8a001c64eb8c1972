"""GradScaler with several workers: an infinite gradient on one of them skips the round for all, and all scales stay equal."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import assert_close, part, scaled_backward, small_model, values  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import SGD, AdamW  # noqa: E402

import psd_client.torch as psd  # noqa: E402
from psd.contract.errors import InvalidRequest  # noqa: E402

STEPS = 12
BAD_STEPS = {3: 0, 4: 1, 8: 1}  # step -> the rank whose gradient is infinite there
OPTIMIZERS = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: AdamW(p, lr=0.01, amsgrad=True),
}


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)


def spoil(model, value=float("inf")):
    next(model.parameters()).grad.view(-1)[1] = value


def alone(make):
    """One process on the joined batch, whose gradient is infinite at the same steps."""
    model, grad_scaler = small_model(), scaler()
    optimizer, scales = make(model.parameters()), []
    for step in range(STEPS):
        scaled_backward(grad_scaler, model, *part(step, 0, 1))
        if step in BAD_STEPS:
            spoil(model)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        scales.append((grad_scaler.get_scale(), grad_scaler._get_growth_tracker()))
    return values(model), scales


@pytest.mark.parametrize("is_unscaled_before", [False, True])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_infinite_gradient_on_one_worker_skips_the_round_for_all(run_workers, make, is_unscaled_before):
    """Parameters, slots and step counters are those of one process that skipped the same steps; so is every worker's scale."""
    expected, scales_alone = alone(make)

    def worker(ps):
        model, grad_scaler = small_model(), scaler()
        optimizer, scales = psd.distribute(model, make(model.parameters()), ps=ps, nan_policy="skip"), []
        for step in range(STEPS):
            x, y = part(step, ps.rank, 2)
            before = values(model)
            scaled_backward(grad_scaler, model, x, y)
            if BAD_STEPS.get(step) == ps.rank:
                spoil(model)
            if is_unscaled_before:
                grad_scaler.unscale_(optimizer)
            grad_scaler.step(optimizer, batch_size=len(x))
            grad_scaler.update()
            assert ps.is_skipped == (step in BAD_STEPS)
            assert all(map(torch.equal, before, values(model))) == (step in BAD_STEPS)
            scales.append((grad_scaler.get_scale(), grad_scaler._get_growth_tracker()))
        return values(model), scales, ps.stats()["rounds_skipped"], ps.clock

    for actual, scales, skipped, clock in run_workers(2, 2, worker):
        assert_close(actual, expected)
        assert scales == scales_alone
        assert (skipped, clock) == (len(BAD_STEPS), STEPS)


def test_a_worker_without_gradients_in_a_step_has_the_scale_of_the_others(run_workers):
    """It takes part in the round, and hears how that has ended."""

    def worker(ps):
        model, grad_scaler, scales = small_model(), scaler(), []
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps, nan_policy="skip")
        for step in range(6):
            if step in BAD_STEPS or ps.rank == 1:
                scaled_backward(grad_scaler, model, *part(step, ps.rank, 2), is_bad=BAD_STEPS.get(step) == ps.rank)
            else:
                grad_scaler.scale(torch.zeros(()))  # a loss that reaches no parameter
                optimizer.zero_grad()
            grad_scaler.step(optimizer)
            grad_scaler.update()
            scales.append((grad_scaler.get_scale(), grad_scaler._get_growth_tracker()))
        return scales, ps.clock

    (scales, clock), other = run_workers(2, 2, worker)
    assert (scales, clock) == other
    assert scales[3][0] < scales[2][0]


def test_a_disabled_scaler_changes_nothing(run_workers):
    """As mixed precision without fp16 uses it; the policy may then be the default."""

    def worker(ps):
        model, grad_scaler = small_model(), torch.amp.GradScaler("cpu", enabled=False)
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps)
        x, y = part(0, ps.rank, 2)
        scaled_backward(grad_scaler, model, x, y)
        grad_scaler.step(optimizer, batch_size=len(x))
        grad_scaler.update()
        return values(model)

    first, second = run_workers(2, 2, worker)
    assert all(map(torch.equal, first, second))


def test_a_scaler_needs_the_policy_and_says_so(run_workers):
    def worker(ps):
        model, grad_scaler = small_model(), scaler()
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps)
        scaled_backward(grad_scaler, model, *part(0, 0, 1))
        with pytest.raises(InvalidRequest, match='pass nan_policy="skip" to distribute'):
            grad_scaler.step(optimizer)

    run_workers(1, 1, worker)


def test_a_scaler_that_does_not_give_itself_is_refused(run_workers):
    """Should torch leave that out one day: the gradients would be pushed as they are, scaled."""

    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps, nan_policy="skip")
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
        with pytest.raises(InvalidRequest, match="grad_scaler: this version of torch"):
            optimizer.step()

    run_workers(1, 1, worker)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_without_a_scaler_the_policy_holds_all_the_same(run_workers, bad):
    """What a worker finds in its gradient by itself."""

    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps, nan_policy="skip")
        skipped = []
        for step in range(4):
            x, y = part(step, ps.rank, 2)
            model.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            if (step, ps.rank) == (2, 1):
                spoil(model, bad)
            optimizer.step(batch_size=len(x))
            skipped.append(ps.is_skipped)
        return values(model), skipped

    (first, skipped), (second, also) = run_workers(2, 2, worker)
    assert skipped == also == [False, False, True, False]
    assert all(map(torch.equal, first, second))
    assert all(tensor.isfinite().all() for tensor in first)


@pytest.mark.parametrize("mode", ["async", "ssp:1"])
def test_without_rounds_each_worker_leaves_out_its_own_push(run_workers, mode):
    """And backs off by itself."""

    def worker(ps):
        model, grad_scaler = small_model(), scaler()
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.01), ps=ps, nan_policy="skip", consistency=mode)
        ps.barrier("begin")  # who comes late enters at the clock of those who have gone ahead
        for step in range(4):
            scaled_backward(grad_scaler, model, *part(step, ps.rank, 2))
            if (step, ps.rank) == (2, 1):
                spoil(model)
            grad_scaler.step(optimizer)
            grad_scaler.update()
        ps.barrier("end")
        optimizer.pull()
        return values(model), grad_scaler.get_scale(), ps.clock

    (first, scale, clock), (second, other_scale, other_clock) = run_workers(2, 2, worker)
    assert (scale, other_scale) == (2.0**11, 2.0**9)
    assert clock == other_clock == 4
    assert all(map(torch.equal, first, second))
    assert all(tensor.isfinite().all() for tensor in first)
