"""Gradients lie in the client's buffers from the moment they are made, and programs see nothing of it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import assert_close, backward, batch, small_model, values  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import SGD  # noqa: E402

import psd_client.torch as psd  # noqa: E402
from psd.contract.errors import InvalidRequest, NonFiniteGradient  # noqa: E402


def alone(run_workers: Any, body: Any) -> Any:
    """Run `body(ps)` on a single worker with one shard; return its result."""
    return run_workers(1, 1, body)[0]


def distributed(ps: Any, model: Any = None, **options: Any) -> tuple[Any, Any]:
    model = small_model() if model is None else model
    return model, psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps, **options)


def trained(ps: Any, **options: Any) -> tuple[Any, Any]:
    """A distributed model after a step."""
    model, optimizer = distributed(ps, **options)
    backward(model, *batch(0))
    optimizer.step()
    return model, optimizer


def are_views(ps: Any, model: Any) -> list[bool]:
    """True for each parameter whose gradient is where pushes are sent from."""
    pairs = zip(model.parameters(), ps._worker.gradients.views, strict=True)
    return [parameter.grad.data_ptr() == view.__array_interface__["data"][0] for parameter, view in pairs]


def step_alone(change: Any) -> list[Any]:
    """The model after a step in one process; `change(model)` makes the gradients."""
    model = small_model()
    change(model)
    SGD(model.parameters(), lr=0.1).step()
    return values(model)


def step_here(run_workers: Any, change: Any) -> list[Any]:
    """The model after a step of the distributed optimizer."""

    def body(ps):
        model, optimizer = distributed(ps)
        change(model)
        optimizer.step()
        return values(model)

    return alone(run_workers, body)


def test_backward_then_gradients_are_views_of_the_buffers(run_workers):
    def body(ps):
        model, optimizer = distributed(ps)
        backward(model, *batch(0))
        after_first = are_views(ps, model)
        optimizer.step()
        backward(model, *batch(1))
        return after_first, are_views(ps, model)

    assert alone(run_workers, body) == ([True] * 4, [True] * 4)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_then_the_next_gradients_are_views_and_nothing_of_the_last_ones_is_left(run_workers, set_to_none):
    def body(ps):
        model, optimizer = distributed(ps)
        model(batch(1)[0]).sum().backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        nn.functional.mse_loss(model(batch(0)[0]), batch(0)[1]).backward()
        assert are_views(ps, model) == [True] * 4
        optimizer.step()
        return values(model)

    assert_close(alone(run_workers, body), step_alone(lambda model: backward(model, *batch(0))))


def clip(model: Any) -> None:
    backward(model, *batch(0))
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def scale_in_place(model: Any) -> None:
    backward(model, *batch(0))
    for parameter in model.parameters():
        parameter.grad.data.mul_(0.5)


def accumulate(model: Any) -> None:
    backward(model, *batch(0))
    model(batch(1)[0]).sum().backward()


def replace(model: Any) -> None:
    backward(model, *batch(0))
    model[0].weight.grad = 3 * model[0].weight.grad
    model[2].bias.grad = torch.ones(3)


def set_by_hand(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)


def replace_then_accumulate(model: Any) -> None:
    replace(model)
    model(batch(1)[0]).sum().backward()


def give_other_memory(model: Any) -> None:
    backward(model, *batch(0))
    for parameter in model.parameters():
        parameter.grad.data = 0.5 * parameter.grad.data


def convert_and_back(model: Any) -> None:
    """By torch's conversions of a model, which give gradients other memory, too."""
    backward(model, *batch(0))
    model.double()
    model.float()
    model.zero_grad()
    backward(model, *batch(1))


def share(model: Any) -> None:
    """As a queue of torch.multiprocessing does: it moves the memory itself, under all tensors that share it."""
    backward(model, *batch(0))
    model.share_memory()
    model.zero_grad()
    backward(model, *batch(1))


CHANGES = [
    clip, scale_in_place, accumulate, replace, set_by_hand, replace_then_accumulate, give_other_memory, convert_and_back, share
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_step_when_the_program_works_on_gradients_then_does_as_torch(run_workers, change):
    assert_close(step_here(run_workers, change), step_alone(change))


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_backward_when_it_creates_a_graph_then_gradients_are_left_alone(run_workers):
    """The graph hangs on these very tensors, as for a gradient penalty by way of .grad."""

    def penalty(model):
        (model(batch(0)[0]) ** 2).mean().backward(create_graph=True)
        total = sum(parameter.grad.square().sum() for parameter in model.parameters())
        for parameter in model.parameters():
            parameter.grad = None
        total.backward()

    def body(ps):
        model, _ = distributed(ps)
        (model(batch(0)[0]) ** 2).mean().backward(create_graph=True)
        return all(p.grad.requires_grad for p in model.parameters()), any(are_views(ps, model))

    assert alone(run_workers, body) == (True, False)
    assert_close(step_here(run_workers, penalty), step_alone(penalty))


def test_backward_when_the_gradient_cannot_be_a_view_then_it_is_copied_at_the_step(run_workers):
    """Its memory layout is not the buffers'; bfloat16 is."""

    def model_of():
        model = nn.Sequential(
            nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(4, 2).bfloat16()
        )
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.4, 0.4, generator)
        return model

    def differentiate(model):
        hidden = model[1](model[0](torch.arange(24.0).reshape(2, 3, 2, 2) / 24))
        model[2](hidden.bfloat16()).float().square().mean().backward()

    def body(ps):
        model, optimizer = distributed(ps, model_of())
        differentiate(model)
        viewed = are_views(ps, model)
        optimizer.step()
        return viewed, values(model)

    expected = model_of()
    differentiate(expected)
    SGD(expected.parameters(), lr=0.1).step()
    viewed, actual = alone(run_workers, body)
    assert viewed == [False, True, True, True]
    assert_close(actual[:2], values(expected)[:2])
    assert_close(actual[2:], values(expected)[2:], 1e-2)


def test_step_when_a_gradient_is_not_finite_then_refuses_and_nothing_was_sent(run_workers):
    def body(ps):
        model, optimizer = distributed(ps)
        backward(model, *batch(0))
        model[2].weight.grad[0, 0] = float("inf")
        with pytest.raises(NonFiniteGradient, match=r"'2\.weight'"):
            optimizer.step()
        backward(model, *batch(0))
        optimizer.step()
        return values(model)

    assert_close(alone(run_workers, body), step_alone(lambda model: backward(model, *batch(0))))


@pytest.mark.parametrize("overlap", [False, True])
def test_step_when_a_frozen_parameter_has_a_gradient_then_refuses(run_workers, overlap):
    def body(ps):
        model = small_model()
        model[0].bias.requires_grad_(False)
        model, optimizer = distributed(ps, model, overlap=overlap)
        model[0].bias.requires_grad_(True)
        backward(model, *batch(0))
        with pytest.raises(InvalidRequest, match=r"'0\.bias' was frozen"):
            optimizer.step()
        return True

    assert alone(run_workers, body)


@pytest.mark.parametrize("overlap", [False, True])
def test_close_then_the_models_gradients_are_its_own_again(run_workers, overlap):
    def body(ps):
        model, optimizer = trained(ps, overlap=overlap)
        optimizer.close()
        views = [torch.from_numpy(view) for view in ps._worker.gradients.views]
        backward(model, *batch(1))
        return any(
            parameter.grad.data_ptr() == view.data_ptr() for parameter, view in zip(model.parameters(), views, strict=True)
        )

    assert alone(run_workers, body) is False


@pytest.mark.parametrize("overlap", [False, True])
def test_distribute_when_the_optimizer_is_forgotten_then_it_is_collected_and_the_model_lives_on(run_workers, overlap):
    def body(ps):
        model, optimizer = trained(ps, overlap=overlap)
        forgotten = weakref.ref(optimizer), weakref.ref(optimizer._gradients)
        del optimizer
        gc.collect()
        backward(model, *batch(1))
        return [reference() for reference in forgotten], [len(p._post_accumulate_grad_hooks) for p in model.parameters()]

    assert alone(run_workers, body) == ([None, None], [0] * 4)
