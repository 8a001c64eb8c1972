"""Parameters of every kind that a module may have: shapes, strides, ties, gaps; what is trained, shared or left alone."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import assert_close, backward, batch, small_model, values  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import SGD  # noqa: E402

import psd_client.torch as psd  # noqa: E402


class Bag(nn.Module):
    """A module of the given parameters."""

    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def loss(self) -> torch.Tensor:
        return sum(((p * p).sum() + p.sum() for p in self.parameters()), torch.zeros(()))


def odd_parameters() -> dict[str, torch.Tensor]:
    def numbers(*shape: int) -> torch.Tensor:
        return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) / 8

    return {
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(4, 0, 2),
        "transposed": numbers(5, 7).t(),
        "channels_last": numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "strided": numbers(6, 10)[::2, 1::3],
        "one": torch.tensor([[2.0]]),
        "long": numbers(70_000),
        "wide": numbers(11).double(),
        "narrow": numbers(13).bfloat16(),
    }


@pytest.mark.parametrize("shards", [1, 3])
def test_any_shape_stride_and_dtype_is_trained_in_place(run_workers, shards):
    """Values equal torch's; strides, addresses and identity of the parameters stay."""

    def train(model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model.loss().backward()
            optimizer.step()
        return values(model)

    model = Bag(**odd_parameters())
    expected = train(model, SGD(model.parameters(), lr=0.125, momentum=0.5))

    def worker(ps):
        model = Bag(**odd_parameters())
        before = [(p.data_ptr(), p.stride(), p._version) for p in model.parameters()]
        result = train(model, psd.distribute(model, SGD(model.parameters(), lr=0.125, momentum=0.5), ps=ps))
        after = [(p.data_ptr(), p.stride(), p._version) for p in model.parameters()]
        assert [x[:2] for x in before] == [x[:2] for x in after]
        assert all(new[2] > old[2] for new, old in zip(after, before, strict=True))  # autograd sees the change
        return result

    (actual,) = run_workers(1, shards, worker)
    assert_close(actual[:-1], expected[:-1])
    assert_close(actual[-1:], expected[-1:], 2**-7)  # torch rounds to bfloat16 at every step, the shards hold float32


def test_all_workers_start_from_the_first_ones_values(run_workers):
    """Also in parameters that are frozen or that the optimizer does not have, and whatever the strides."""

    def worker(ps):
        mine = float(ps.rank)
        model = Bag(trained=torch.full((3, 2), mine).t(), frozen=torch.full((5,), mine), left_out=torch.full((2,), mine))
        model.frozen.requires_grad_(False)
        psd.distribute(model, SGD([model.trained, model.frozen], lr=0.1), ps=ps)
        return values(model)

    first, second = run_workers(2, 2, worker)
    assert_close(first, second, 0)


def test_frozen_and_left_out_parameters_stay(run_workers):
    """What the optimizer does not update, no step changes, gradient or not."""

    def worker(ps):
        model = small_model()
        model[0].weight.requires_grad_(False)
        optimizer = psd.distribute(model, SGD([model[0].weight, model[2].weight], lr=0.1, momentum=0.9), ps=ps)
        before = values(model)
        for step in range(3):
            backward(model, *batch(step))
            optimizer.step()
        return before, values(model)

    ((before, after),) = run_workers(1, 2, worker)
    changed = [not torch.equal(old, new) for old, new in zip(before, after, strict=True)]
    assert changed == [False, False, True, False]


def test_parameter_without_gradient_is_not_stepped(run_workers):
    """As in torch: neither momentum nor weight decay move it, and its momentum begins with its first gradient."""

    def train(model, optimizer, missing):
        for step in range(6):
            backward(model, *batch(step))
            if step in missing:
                model[0].weight.grad = None
            optimizer.step()
        return values(model)

    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}
    missing = {0, 1, 3, 4}
    model = small_model()
    expected = train(model, SGD(model.parameters(), **options), missing)

    def worker(ps):
        model = small_model()
        return train(model, psd.distribute(model, SGD(model.parameters(), **options), ps=ps), missing)

    for actual in run_workers(2, 2, worker):
        assert_close(actual, expected)


def test_parameter_without_gradient_on_one_worker_counts_as_zero(run_workers):
    """With the worker's samples in the mean, as if its part of the batch did not depend on the parameter."""

    def worker(ps):
        model = Bag(w=torch.zeros(3), v=torch.zeros(2))
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=1.0), ps=ps)
        for _ in range(2):
            model.w.grad = torch.full((3,), -8.0) if ps.rank == 0 else None
            model.v.grad = torch.full((2,), -1.0)
            optimizer.step(batch_size=1 if ps.rank == 0 else 3)
        return model.w.tolist(), model.v.tolist()

    assert run_workers(2, 1, worker) == [([4.0] * 3, [2.0] * 2)] * 2


def test_tied_parameter_is_declared_and_stepped_once(run_workers):
    """One Parameter under two names is one tensor, by its first name."""

    def worker(ps):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=1.0), ps=ps)
        before = model[0].weight.detach().clone()
        model[0].weight.grad = torch.ones(4, 4)
        optimizer.step()
        assert model[1].weight is model[0].weight
        return (before - model[0].weight).tolist(), [t.name for t in ps._worker.parameters.layout.spec.tensors]

    ((moved, names),) = run_workers(1, 1, worker)
    assert torch.tensor(moved).allclose(torch.ones(4, 4))
    assert names == ["0.weight"]


@pytest.mark.parametrize("wrap", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.module."])
def test_wrappers_do_not_change_names(run_workers, wrap):
    """A worker with DistributedDataParallel or torch.compile around its model joins one without."""

    def worker(ps):
        model: nn.Module = small_model()
        for name in reversed(wrap.strip(".").split(".")):
            model = nn.ModuleDict({name: model})
        psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps)
        return [t.name for t in ps._worker.parameters.layout.spec.tensors]

    assert run_workers(1, 1, worker) == [["0.weight", "0.bias", "2.weight", "2.bias"]]


def test_workers_compute_with_buffers_of_their_own(run_workers):
    """BatchNorm's statistics are those of the data that the worker has seen; its weights are shared."""

    def worker(ps):
        model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps)
        for step in range(2):
            x, y = batch(step)
            backward(model, x + 10 * ps.rank, y)
            optimizer.step(batch_size=len(x))
        return values(model), model[1].running_mean.clone(), int(model[1].num_batches_tracked)

    (first, mean_of_first, count), (second, mean_of_second, _) = run_workers(2, 2, worker)
    assert_close(first, second, 0)
    assert not mean_of_first.allclose(mean_of_second)
    assert count == 2


def test_interleaved_views_of_one_storage_are_trained(run_workers):
    """Memory that lies in between is not memory that is shared."""

    def worker(ps):
        storage = torch.zeros(4, 6)
        model = Bag(left=storage[:, :3], right=storage[:, 3:])
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=1.0), ps=ps)
        model.left.grad, model.right.grad = torch.full((4, 3), -1.0), torch.full((4, 3), -2.0)
        optimizer.step()
        return storage[0].tolist()

    assert run_workers(1, 1, worker) == [[1.0, 1.0, 1.0, 2.0, 2.0, 2.0]]
