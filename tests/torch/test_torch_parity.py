"""Steps on the shards are torch.optim.SGD's steps of one process on the joined batch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import assert_close, backward, part, small_model, train_alone, train_part, values  # noqa: E402
from torch.optim import SGD  # noqa: E402
from torch.optim.lr_scheduler import OneCycleLR, StepLR  # noqa: E402

import psd_client.torch as psd  # noqa: E402

STEPS = 20

OPTIONS = {
    "plain": {"lr": 0.1},
    "momentum": {"lr": 0.1, "momentum": 0.9},
    "dampening": {"lr": 0.1, "momentum": 0.9, "dampening": 0.4},
    "nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "decay": {"lr": 0.1, "weight_decay": 0.1},
    "maximize": {"lr": 0.01, "maximize": True},
    "everything": {"lr": 0.002, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "maximize": True},
    "tensor lr": {"lr": torch.tensor(0.1), "momentum": 0.5},
}

WORLDS = [(1, 1), (2, 1), (1, 3), (2, 2)]


@pytest.mark.parametrize(("world_size", "shards"), WORLDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_steps_equal_one_process_on_the_joined_batch(run_workers, world_size, shards, options):
    """Any mix of SGD's options, uneven batches, any number of workers and shards."""
    model = small_model()
    expected = train_alone(model, SGD(model.parameters(), **options))

    for actual in run_workers(world_size, shards, lambda ps: train_part(ps, lambda model: SGD(model.parameters(), **options))):
        assert_close(actual, expected)


@pytest.mark.parametrize(("world_size", "shards"), WORLDS)
def test_param_groups_keep_their_own_options(run_workers, world_size, shards):
    """Groups differ in their learning rate, their decay and in whether they have momentum at all."""

    def groups(model):
        return [
            {"params": [model[0].weight], "momentum": 0.9, "nesterov": True},
            {"params": [model[2].weight], "lr": 0.3, "weight_decay": 0.1},
            {"params": [model[2].bias, model[0].bias], "momentum": 0.5, "dampening": 0.1},
        ]

    model = small_model()
    expected = train_alone(model, SGD(groups(model), lr=0.05))

    for actual in run_workers(world_size, shards, lambda ps: train_part(ps, lambda model: SGD(groups(model), lr=0.05))):
        assert_close(actual, expected)


def test_sum_adds_the_workers_gradients(run_workers):
    """With reduce="sum", two workers with the same batch go twice as far."""
    model = small_model()
    expected = train_alone(model, SGD(model.parameters(), lr=0.2, momentum=0.5))

    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1, momentum=0.5), ps=ps, reduce="sum")
        for step in range(STEPS):
            backward(model, *part(step, 0, 1))
            optimizer.step(batch_size=7)
        return values(model)

    for actual in run_workers(2, 2, worker):
        assert_close(actual, expected)


SCHEDULERS = {
    "StepLR": lambda optimizer: StepLR(optimizer, step_size=6, gamma=0.3),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS + 1),  # cycles momentum, too
}


@pytest.mark.parametrize("scheduled", ["given", "distributed"])
@pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers_take_effect_at_the_next_step(run_workers, schedule, scheduled):
    """Built on the given optimizer or on the distributed one, before the first step or later."""
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = train_alone(model, optimizer, after_step=schedule(optimizer).step)

    def worker(ps):
        model = small_model()
        given = SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = psd.distribute(model, given, ps=ps)
        scheduler = schedule(given if scheduled == "given" else optimizer)
        for step in range(STEPS):
            x, y = part(step, ps.rank, 2)
            backward(model, x, y)
            optimizer.step(batch_size=len(x))
            scheduler.step()
        return values(model)

    for actual in run_workers(2, 2, worker):
        assert_close(actual, expected)


def test_float64_is_trained_in_float64(run_workers):
    """A float64 model loses nothing on its way."""
    model = small_model(torch.float64)
    expected = train_alone(model, SGD(model.parameters(), lr=0.1, momentum=0.9), dtype=torch.float64)

    def worker(ps):
        model = small_model(torch.float64)
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1, momentum=0.9), ps=ps)
        for step in range(STEPS):
            x, y = part(step, ps.rank, 2, torch.float64)
            backward(model, x, y)
            optimizer.step(batch_size=len(x))
        return values(model)

    for actual in run_workers(2, 3, worker):
        assert_close(actual, expected, 1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_a_rounded_copy_of_a_float32_master(run_workers, dtype):
    """Updates too small for the worker's dtype add up on the shards."""
    start, gradient, lr, steps = 1.0, 2.0**-4, 2.0**-10, 128

    def worker(ps):
        layer = torch.nn.Linear(3, 3, bias=False).to(dtype)
        torch.nn.init.constant_(layer.weight, start)
        optimizer = psd.distribute(layer, SGD(layer.parameters(), lr=lr), ps=ps)
        for _ in range(steps):
            layer.weight.grad = torch.full_like(layer.weight, gradient)
            optimizer.step()
        return layer.weight.detach()

    (actual,) = run_workers(1, 1, worker)

    assert actual.dtype == dtype
    assert actual.unique().tolist() == [start - steps * lr * gradient]


def test_half_precision_gradients_are_added_up_in_float32(run_workers):
    """256 + 1 is 256 in bfloat16; the mean of the two is 128.5 on the shards."""

    def worker(ps):
        layer = torch.nn.Linear(3, 3, bias=False).to(torch.bfloat16)
        torch.nn.init.constant_(layer.weight, 0)
        optimizer = psd.distribute(layer, SGD(layer.parameters(), lr=2.0), ps=ps)
        layer.weight.grad = torch.full_like(layer.weight, (256, 1)[ps.rank])
        optimizer.step()
        layer.weight.grad = torch.full_like(layer.weight, -128)
        optimizer.step()
        return layer.weight.detach().unique().tolist()

    assert run_workers(2, 2, worker) == [[-1.0]] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_every_rule_works_on_the_master(run_workers, kind, dtype):
    """As torch's optimizer on a float32 copy that is fed the same half-precision gradients."""
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(4, 5, generator=generator).to(dtype) for _ in range(30)]
    master = torch.nn.Parameter(torch.ones(4, 5))
    alone = kind([master], lr=1e-3)
    for gradient in gradients:
        master.grad = gradient.float()
        alone.step()

    def worker(ps):
        layer = torch.nn.Linear(5, 4, bias=False).to(dtype)
        torch.nn.init.constant_(layer.weight, 1)
        optimizer = psd.distribute(layer, kind(layer.parameters(), lr=1e-3), ps=ps)
        for gradient in gradients:
            layer.weight.grad = gradient.clone()
            optimizer.step()
        return [layer.weight.detach()]

    (actual,) = run_workers(1, 2, worker)
    assert_close(actual, [master.detach().to(dtype)], 1e-3)  # a few of them may be rounded the other way
