"""Programs that move gradients from one parameter to another get what torch gives them, although all lie in one buffer."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import assert_close, values  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import SGD  # noqa: E402

import psd_client.torch as psd  # noqa: E402
from psd.contract.errors import InvalidRequest  # noqa: E402


def twins():
    """Two layers of one shape, whose gradients differ."""
    model = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(2, 2, bias=False)])
    for number, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 0.5 + number)
    return model


def backward(model, factor=1.0):
    first, second, third = model.parameters()
    (factor * (first.sum() + 2 * (second * second).sum() + 3 * third.sum())).backward()


def swap(model):
    first, second, _ = model.parameters()
    first.grad, second.grad = second.grad, first.grad


def move(model):
    first, second, _ = model.parameters()
    first.grad, second.grad = second.grad, None


def share(model):
    first, second, _ = model.parameters()
    first.grad = second.grad


def piece(model):
    """A gradient that is a piece of another one, in another order."""
    first, second, _ = model.parameters()
    first.grad = second.grad.t()
    second.grad = second.grad.clone()


def again(model):
    swap(model)
    swap(model)


CHANGES = [swap, move, share, piece, again]

pytestmark = pytest.mark.filterwarnings("ignore:grad and param do not obey:UserWarning")  # of `piece`, without psd, too


def trained(model, optimizer, program):
    """The model, and its gradients, after a program."""
    program(model, optimizer)
    optimizer.zero_grad()
    backward(model, 0.25)
    optimizer.step()
    return [*values(model), *(parameter.grad.clone() for parameter in model.parameters())]


def check(run_workers, program, **options):
    """A program does the same to a model in one process and by way of psd."""
    model = twins()
    expected = trained(model, SGD(model.parameters(), lr=0.1), program)

    def worker(ps):
        model = twins()
        return trained(model, psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps, **options), program)

    assert_close(run_workers(1, 1, worker)[0], expected)


@pytest.mark.parametrize("change", CHANGES)
def test_step_when_gradients_were_moved_then_each_parameter_has_its_own(run_workers, change):
    """Two that were swapped gave both parameters the same gradient."""

    def program(model, optimizer):
        backward(model)
        change(model)
        optimizer.step()

    check(run_workers, program)


@pytest.mark.parametrize("change", CHANGES)
def test_backward_when_gradients_were_moved_then_it_adds_to_them_where_they_are(run_workers, change):
    """The next back-propagation must not put a gradient where another parameter's lies."""

    def program(model, optimizer):
        backward(model)
        change(model)
        backward(model, 0.5)
        change(model)
        optimizer.step()

    check(run_workers, program)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_moved_after_the_step_are_moved(run_workers, change, set_to_none):
    """Also if they are kept, or set to zero where they are, and used on."""

    def program(model, optimizer):
        backward(model)
        optimizer.step()
        change(model)
        backward(model, 0.5)
        optimizer.step()
        change(model)
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(model, 2.0)
        optimizer.step()

    check(run_workers, program)


@pytest.mark.parametrize("change", [change for change in CHANGES if change is not share])
def test_overlap_when_gradients_were_moved_before_they_are_sent_then_each_parameter_has_its_own(run_workers, change):
    """Under no_sync nothing has left yet; the last back-propagation, or the step itself, sends what is there."""

    def program(model, optimizer):
        def accumulate(factor):
            if isinstance(optimizer, psd.DistributedOptimizer):
                with optimizer.no_sync():
                    backward(model, factor)
            else:
                backward(model, factor)

        accumulate(1.0)
        change(model)
        backward(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        accumulate(0.5)
        change(model)
        optimizer.step()

    check(run_workers, program, overlap=True)


@pytest.mark.parametrize("is_before", [True, False])
def test_overlap_when_gradients_change_after_they_were_sent_then_refuses(run_workers, is_before):
    """One that two parameters share does, when it is sent for the first one and back-propagation adds to it for the second."""

    def worker(ps):
        model = twins()
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps, overlap=True)
        if is_before:
            with optimizer.no_sync():
                backward(model)
            share(model)
        backward(model)
        if not is_before:
            swap(model)
        with pytest.raises(InvalidRequest, match="changed after it had been sent"):
            optimizer.step()
        return True

    assert run_workers(1, 1, worker) == [True]


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_that_the_program_keeps_then_stay_as_they_are(run_workers, overlap):
    """As in a method that weighs the gradients of several losses, or of several steps; else their place is used again."""

    def program(model, optimizer):
        kept = []
        for factor in (1.0, 0.5):
            optimizer.zero_grad()
            backward(model, factor)
            kept.append([parameter.grad for parameter in model.parameters()])
            optimizer.step()
        for parameter, first, second in zip(model.parameters(), *kept, strict=True):
            parameter.grad = first - 3 * second
        optimizer.step()
        model[0].weight.grad, model[1].weight.grad = None, kept[1][1] - kept[0][1]
        optimizer.step()
        model[0].weight.grad, model[1].weight.grad = kept[1][0], kept[0][0]
        optimizer.step()
        kept.clear()
        ids = set()
        for factor in (1.0, 0.5):
            optimizer.zero_grad()
            backward(model, factor)
            ids |= {id(parameter.grad) for parameter in model.parameters()}
            optimizer.step()
        assert isinstance(optimizer, SGD) or len(ids) == 3, "what is not kept gets no other memory"

    check(run_workers, program, overlap=overlap)
