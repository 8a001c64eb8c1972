"""Rules that torch does not have, under its param_groups and schedulers; and what is done about stale gradients."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import assert_close, backward, batch, small_model, values  # noqa: E402

import psd_client  # noqa: E402
import psd_client.torch as psd  # noqa: E402
from psd.contract.errors import InvalidRequest  # noqa: E402

STEPS = 12


class Heavy:
    """SGD with momentum, in torch's form, except for the first step."""

    slots = {"buffer": 0.0}
    hyper = {"lr": 0.1, "momentum": 0.5}

    def apply(self, param, grad, slots, hyper):
        slots["buffer"] *= hyper["momentum"]
        slots["buffer"] += grad
        param -= hyper["lr"] * slots["buffer"]


PATH = f"{__name__}:Heavy"


def run(
    cluster, rule, consistency="sync", steps=STEPS, params=lambda model: None, before_step=lambda optimizer: None, **options
):
    """A worker on two shards; the model and its optimizer."""
    model = small_model(torch.float64)
    optimizer = psd.distribute(
        model,
        rule(model) if callable(rule) else rule,
        params=params(model),
        consistency=consistency,
        servers=cluster(2, rules=(PATH,)).servers,
        rank=0,
        world_size=1,
        **options,
    )
    with optimizer.ps:
        for step in range(steps):
            before_step(optimizer)
            backward(model, *batch(step, torch.float64))
            optimizer.step()
    return model, optimizer


def alone(make, before_step=lambda optimizer: None):
    model = small_model(torch.float64)
    optimizer = make(model)
    for step in range(STEPS):
        before_step(optimizer)
        backward(model, *batch(step, torch.float64))
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("consistency", ["sync", "async", "ssp:2"])
def test_a_rule_of_ones_own_trains_a_model(cluster, consistency):
    """Equal to torch's optimizer of the same formula."""
    model, optimizer = run(cluster, psd_client.CustomRule(Heavy, lr=0.05), consistency)

    assert_close(values(model), alone(lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)), 1e-12)
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.param_groups[0]["momentum"] == 0.5


def test_param_groups_and_schedulers_are_torchs(cluster):
    """Its numbers are options of the groups, and travel with each step."""

    def halve(optimizer):
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    def groups(model):
        return [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2].parameters(), "momentum": 0.9}]

    model, optimizer = run(cluster, psd_client.CustomRule(PATH), params=groups, before_step=halve)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)

    expected = alone(lambda model: torch.optim.SGD(groups(model), lr=0.1, momentum=0.5), halve)
    assert_close(values(model), expected, 1e-12)


def test_rules_that_torch_lacks_are_there_too(cluster):
    """Lion's first step is lr times the sign of the gradient."""
    start = values(small_model(torch.float64))
    model, _ = run(cluster, psd_client.Lion(lr=0.25), params=lambda model: model.named_parameters(), steps=1)

    for before, parameter in zip(start, model.parameters(), strict=True):
        assert torch.equal(parameter.detach(), before - 0.25 * parameter.grad.sign())


@pytest.mark.parametrize(
    ("rule", "params", "error", "message"),
    [
        (
            psd_client.Lion(),
            lambda model: [{"params": model.parameters(), "momentum": 1}],
            InvalidRequest,
            "no option 'momentum'",
        ),
        (psd_client.Lion(), lambda model: [{"params": model.parameters(), "lr": -1}], ValueError, "lr: must be >= 0"),
        (lambda model: torch.optim.SGD(model.parameters()), lambda model: model.parameters(), TypeError, "params: torch's"),
    ],
)
def test_wrong_params_are_refused(cluster, rule, params, error, message):
    with pytest.raises(error, match=message):
        run(cluster, rule, params=params)


def test_staleness_is_a_word(cluster):
    """A single worker is never late: the same numbers as without."""

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)

    expected = values(run(cluster, sgd, "async")[0])
    model, _ = run(cluster, sgd, "async", staleness="lr")
    assert_close(values(model), expected, 1e-12)


@pytest.mark.parametrize(
    ("word", "consistency", "message"),
    [
        ("lr", "sync", "groups.staleness: is 'lr', but under sync no gradient is stale"),
        ("faster", "async", "staleness: expected .* got 'faster'"),
    ],
)
def test_staleness_that_makes_no_sense_is_refused(cluster, word, consistency, message):
    with pytest.raises(InvalidRequest, match=message):
        run(cluster, lambda model: torch.optim.SGD(model.parameters()), consistency, staleness=word)
