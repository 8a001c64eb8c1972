"""What programs do to all gradients of a model is done to those of rows on the shards, too, or is refused by name."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from rows_in_memory import RowsInMemory, dense  # noqa: E402
from torch import nn  # noqa: E402

import psd_client.torch as psd  # noqa: E402
from psd.contract.errors import InvalidRequest  # noqa: E402

DIM = 3
IDS = torch.tensor([1, 2, 2])


@pytest.fixture
def embedding():
    """An embedding after one back-propagation."""
    module = psd.Embedding("user", DIM)
    module.joined = RowsInMemory(DIM).join(module)
    (module(IDS) * torch.tensor([[0.5, -2.0, 3.0]])).sum().backward()
    return module


def assigned(change):
    """A change that a program makes by assigning the gradient."""

    def on(parameter):
        parameter.grad = change(parameter.grad)

    return on


@pytest.mark.parametrize(
    "change",
    [
        lambda p: nn.utils.clip_grad_norm_([p], 0.1),
        lambda p: nn.utils.clip_grad_norm_([p], 0.1, norm_type=1),
        lambda p: nn.utils.clip_grad_norm_([p], 0.1, norm_type=torch.inf, foreach=False),
        lambda p: nn.utils.clip_grad_value_([p], 0.75),
        lambda p: p.grad.sign_(),
        lambda p: torch.sign(p.grad, out=p.grad),
        lambda p: p.grad.data.clamp_(-0.1, 0.1),
        lambda p: torch._foreach_mul_([p.grad], 3.0),
        assigned(lambda gradient: gradient * 0.5),
        assigned(lambda gradient: gradient.clamp(-0.1, 0.1)),
        assigned(lambda gradient: gradient.clone()),
        assigned(lambda gradient: gradient.detach().requires_grad_(False)),
    ],
)
def test_what_is_done_to_a_gradient_is_done_to_rows(embedding, change):
    """As to the gradient of torch's own embedding: clipping by any norm and by value, and whatever else."""
    theirs = nn.Parameter(torch.zeros(50, DIM))
    theirs.grad = dense(embedding.joined, DIM)

    change(embedding.handle)
    change(theirs)

    torch.testing.assert_close(dense(embedding.joined, DIM), theirs.grad)
    assert len(embedding.handle.grad) == 2  # distinct ids


def test_noise_reaches_the_rows_that_have_a_gradient(embedding):
    """The others are not in the model."""
    noise = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])  # of 1, of 2
    before = dense(embedding.joined, DIM)
    embedding.handle.grad += noise
    torch.testing.assert_close(dense(embedding.joined, DIM)[[1, 2]], before[[1, 2]] + noise)


@pytest.mark.parametrize("ids", [[3, 4], [1, 2], [5]])
def test_gradients_that_were_put_aside_are_added_to_those_of_the_same_ids_alone(embedding, ids):
    """Rows have no ids in the model; by their places they would be added to others."""
    aside, before = embedding.handle.grad.clone(), dense(embedding.joined, DIM)
    embedding.zero_grad()
    embedding(torch.tensor(ids)).sum().backward()
    if ids == [1, 2]:
        before[[1, 2]] += 1
        embedding.handle.grad += aside
        torch.testing.assert_close(dense(embedding.joined, DIM), before)
    else:
        with pytest.raises(RuntimeError, match="must match the size"):
            embedding.handle.grad += aside


def of_other_rows(embedding):
    embedding.handle.data = torch.zeros(7, DIM)
    embedding.handle.grad = torch.ones(7, DIM)
    embedding.joined.gradients()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (of_other_rows, "was set by the program, and belongs to no rows"),
        (lambda embedding: embedding.handle.square().sum().backward(), "the loss was computed with its handle"),
        (lambda embedding: embedding(IDS).sum().backward(create_graph=True), "create_graph=True"),
        (lambda embedding: torch.autograd.grad(embedding(IDS).sum(), embedding.handle), "torch.autograd.grad"),
    ],
)
def test_what_cannot_be_done_to_rows_is_refused_by_name(embedding, change, name):
    """Instead of being done to no row, or to another."""
    with pytest.raises(InvalidRequest, match=f"embedding 'user': .*{name}"):
        change(embedding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [0.0, 1e-12])
def test_zero_grad_forgets_rows_whose_gradients_are_zeros_or_nearly(dtype, size):
    """They are pushed once, also those too small for the model's dtype, and not again at each step."""
    embedding = psd.Embedding("user", DIM).to(dtype)
    tables = RowsInMemory(DIM).join(embedding)
    (embedding(IDS) * size).float().sum().backward()
    assert list(tables.gradients()) == [0]

    embedding.zero_grad(set_to_none=False)
    assert tables.gradients() == {}


def test_a_gradient_that_others_have_too_is_not_changed_with_the_rows():
    """Back-propagation gives a hook, and both operands of a sum, the same memory."""
    embedding = psd.Embedding("user", DIM)
    RowsInMemory(DIM).join(embedding)
    output, seen = embedding(torch.tensor([1, 2, 3])), []
    output.register_hook(seen.append)
    output.mul(torch.tensor([1.0, 2.0, 3.0])).sum().backward()

    embedding.handle.grad.zero_()

    assert seen[0].tolist() == [[1.0, 2.0, 3.0]] * 3


def test_back_propagation_to_other_parameters_collects_nothing(embedding):
    """By torch.autograd.grad and by inputs=; what was collected before stays."""
    before = dense(embedding.joined, DIM)
    parameter = nn.Parameter(torch.ones(DIM))

    (gradient,) = torch.autograd.grad((embedding(IDS) * parameter).sum(), [parameter])
    (embedding(IDS) * parameter).sum().backward(inputs=[parameter])

    torch.testing.assert_close(gradient, parameter.grad)
    torch.testing.assert_close(dense(embedding.joined, DIM), before)


def test_a_model_that_is_moved_to_another_dtype_keeps_its_gradients(embedding):
    """As `.grad` of other parameters is moved with them."""
    before = dense(embedding.joined, DIM)
    embedding.half().double()
    torch.testing.assert_close(dense(embedding.joined, DIM), before, rtol=1e-3, atol=0)


def test_a_handle_that_was_initialized_with_all_parameters_is_refused(run_workers):
    """The program believes that rows begin so."""

    def worker(ps):
        model = nn.ModuleList([psd.Embedding("user", DIM), nn.Linear(DIM, 1)])
        for parameter in model.parameters():
            nn.init.uniform_(parameter, 0.1, 0.2)
        with pytest.raises(InvalidRequest, match="'user': its handle was given a value"):
            psd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), ps=ps)

    run_workers(1, 1, worker)
