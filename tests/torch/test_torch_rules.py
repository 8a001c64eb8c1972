"""Each of torch's optimizers, distributed over shards, is the same optimizer in one process."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import assert_close, backward, batch, part, small_model, train_alone, values  # noqa: E402
from torch import optim  # noqa: E402

import psd_client.torch as psd  # noqa: E402
from psd.contract.errors import InvalidRequest  # noqa: E402

STEPS = 20

OPTIMIZERS = {
    "Adadelta": (optim.Adadelta, {"lr": 1.0, "weight_decay": 0.01}),
    "Adagrad": (optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "Adagrad from zero": (optim.Adagrad, {"lr": 0.05, "weight_decay": 0.1, "maximize": True}),
    "Adam": (optim.Adam, {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1}),
    "Adam amsgrad": (optim.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "AdamW": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW amsgrad": (optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "Adamax": (optim.Adamax, {"lr": 0.01, "weight_decay": 0.1}),
    "NAdam": (optim.NAdam, {"lr": 0.01, "weight_decay": 0.1}),
    "NAdam decoupled": (optim.NAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RMSprop": (optim.RMSprop, {"lr": 0.01, "weight_decay": 0.1}),
    "RMSprop centered": (optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "tensor lr": (optim.Adam, {"lr": torch.tensor(0.01, dtype=torch.float64), "foreach": False}),
    "fused": (optim.AdamW, {"lr": 0.01, "fused": True}),
}

everyone = pytest.mark.parametrize(("kind", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS)


def worker_of(make, world_size, before_step=lambda optimizer, step: None):
    def worker(ps):
        model = small_model(torch.float64)
        optimizer = psd.distribute(model, make(model), ps=ps)
        for step in range(STEPS):
            before_step(optimizer, step)
            x, y = part(step, ps.rank, world_size, torch.float64)
            backward(model, x, y)
            optimizer.step(batch_size=len(x))
        return values(model)

    return worker


@everyone
def test_two_workers_on_two_shards_equal_one_process(run_workers, kind, options):
    """In float64, so that the bound is far below any wrong operation; NAdam keeps one number in float32 in torch."""
    model = small_model(torch.float64)
    expected = train_alone(model, kind(model.parameters(), **options), dtype=torch.float64)

    for actual in run_workers(2, 2, worker_of(lambda model: kind(model.parameters(), **options), 2)):
        assert_close(actual, expected, 1e-7 if kind is optim.NAdam else 1e-11)


def test_groups_keep_their_own_flags(run_workers):
    """One group with amsgrad, one that ascends, one with betas of its own."""

    def make(model):
        groups = [
            {"params": [model[0].weight], "amsgrad": True},
            {"params": [model[2].weight], "maximize": True, "lr": 0.003},
            {"params": [model[2].bias, model[0].bias], "betas": (0.5, 0.75), "weight_decay": 0.1},
        ]
        return optim.Adam(groups, lr=0.01)

    model = small_model(torch.float64)
    expected = train_alone(model, make(model), dtype=torch.float64)

    for actual in run_workers(2, 2, worker_of(make, 2)):
        assert_close(actual, expected, 1e-11)


def test_a_schedule_of_the_betas_takes_effect(run_workers):
    """Schedulers such as OneCycleLR write a new pair of betas at each step."""

    def cycle(optimizer, step):
        optimizer.param_groups[0]["betas"] = (0.95 - 0.01 * (step % 7), 0.99)

    model = small_model(torch.float64)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        cycle(optimizer, step)
        backward(model, *batch(step, torch.float64))
        optimizer.step()
    expected = values(model)

    for actual in run_workers(2, 2, worker_of(lambda model: optim.AdamW(model.parameters(), lr=0.01), 2, cycle)):
        assert_close(actual, expected, 1e-11)


def test_steps_count_updates_of_each_tensor(run_workers):
    """PEERS: a counter per push. A tensor without a gradient in a step keeps its step, and with it its bias correction."""

    def train(model, optimizer):
        for step in range(STEPS):
            backward(model, *batch(step, torch.float64))
            if step % 3:
                model[0].weight.grad = None
            optimizer.step()
        return values(model)

    model = small_model(torch.float64)
    expected = train(model, optim.Adam(model.parameters(), lr=0.01))

    def worker(ps):
        model = small_model(torch.float64)
        return train(model, psd.distribute(model, optim.Adam(model.parameters(), lr=0.01), ps=ps))

    for actual in run_workers(2, 2, worker):
        assert_close(actual, expected, 1e-11)


@pytest.mark.parametrize(
    ("rule", "change", "message"),
    [
        (optim.Adam, {"amsgrad": True}, r"param_groups\[0\]: amsgrad was off when the job was declared"),
        (optim.Adam, {"betas": (0.9, 1.0)}, r"param_groups\[0\]\.beta2: must be >= 0 and < 1, got 1.0"),
        (optim.Adam, {"eps": -1e-8}, r"param_groups\[0\]\.eps: must be >= 0"),
        (optim.Adagrad, {"initial_accumulator_value": 1.0}, r"initial_accumulator_value was 0\.0 when the job was declared"),
    ],
)
def test_a_late_change_that_shards_cannot_follow_is_refused(run_workers, rule, change, message):
    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, rule(model.parameters()), ps=ps)
        backward(model, *batch(0))
        optimizer.param_groups[0].update(change)
        with pytest.raises(InvalidRequest, match=message):
            optimizer.step()
        return ps.clock

    assert run_workers(1, 1, worker) == [0]


@pytest.mark.parametrize("kind", [kind for kind, _ in OPTIMIZERS.values()])
@pytest.mark.parametrize("option", ["capturable", "differentiable"])
def test_options_for_graphs_are_refused_by_name(kind, option):
    model = small_model()
    optimizer = kind(model.parameters())
    if option not in optimizer.defaults:
        option = "differentiable"
    optimizer.param_groups[0][option] = True
    with pytest.raises(InvalidRequest, match=f"{option}=True is not supported by psd"):
        psd.distribute(model, optimizer, servers="127.0.0.1:1", rank=0, world_size=1, retry_timeout=0)


def test_an_adagrad_that_has_been_stepped_is_refused():
    """Its slots are there from the beginning; only those of a step would be lost."""
    model = small_model()
    optimizer = optim.Adagrad(model.parameters())
    backward(model, *batch(0))
    optimizer.step()
    with pytest.raises(InvalidRequest, match="has been stepped"):
        psd.distribute(model, optimizer, servers="127.0.0.1:1", rank=0, world_size=1, retry_timeout=0)
