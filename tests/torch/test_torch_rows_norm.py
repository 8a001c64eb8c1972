"""What programs do to all gradients of a model is right for rows on the shards, too, or is refused by name."""

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
    """An embedding after one back-propagation, beside another parameter."""
    module = psd.Embedding("user", DIM)
    module.rows = RowsInMemory(DIM).join(module)
    module(IDS).sum().backward()
    return module


def add_noise(embedding):
    embedding.handle.grad += torch.randn(())


def through_data(embedding):
    embedding.handle.grad.data.clamp_(-0.1, 0.1)


def replaced(embedding):
    embedding.handle.grad = embedding.handle.grad.clamp(-0.1, 0.1)
    embedding.rows.gradients()


def of_its_own(embedding):
    """As by torch.autograd.grad, whose results are then assigned; there are no rows behind them."""
    gradients = torch.autograd.grad(embedding(IDS).sum() * 2, list(embedding.parameters()))
    embedding.zero_grad()
    embedding.handle.grad = gradients[0]
    embedding.rows.gradients()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda embedding: nn.utils.clip_grad_value_(embedding.parameters(), 0.1), "clamp_"),
        (lambda embedding: nn.utils.clip_grad_norm_(embedding.parameters(), 0.1, norm_type=1), "norm: .* kind 1"),
        (lambda embedding: nn.utils.clip_grad_norm_(embedding.parameters(), 0.1, norm_type=torch.inf), "norm: .* kind inf"),
        (lambda embedding: embedding.handle.grad.sign_(), "sign_"),
        (lambda embedding: torch.sign(embedding.handle.grad, out=embedding.handle.grad), "sign"),
        (lambda embedding: torch._foreach_add_([embedding.handle.grad], 1.0), "_foreach_add_"),
        (add_noise, "add_"),
        (through_data, "clamp_"),
        (replaced, "was set to 0.1 by the program"),
        (of_its_own, "was set to .* by the program"),
        (lambda embedding: embedding.handle.square().sum().backward(), "the loss was computed with its handle"),
        (lambda embedding: embedding(IDS).sum().backward(create_graph=True), "create_graph=True"),
    ],
)
def test_what_cannot_be_done_to_rows_is_refused_by_name(embedding, change, name):
    """Instead of being done to their norm, by which all of them would be multiplied, or be forgotten."""
    with pytest.raises(InvalidRequest, match=f"embedding 'user': .*{name}"):
        change(embedding)


def halved(gradient):
    gradient /= 2
    return gradient


def tripled(gradient):
    torch._foreach_mul_([gradient], 3.0)
    return gradient


@pytest.mark.parametrize(
    ("scale", "factor"),
    [
        (lambda gradient: gradient.mul_(0.5), 0.5),
        (lambda gradient: gradient.data.div_(2), 0.5),
        (halved, 0.5),
        (lambda gradient: gradient * 0.5, 0.5),
        (tripled, 3.0),
        (lambda gradient: gradient.clone(), 1.0),
        (lambda gradient: gradient.detach().requires_grad_(False), 1.0),
    ],
)
def test_what_multiplies_a_gradient_multiplies_rows(embedding, scale, factor):
    before = dense(embedding.rows, DIM)
    embedding.handle.grad = scale(embedding.handle.grad)
    torch.testing.assert_close(dense(embedding.rows, DIM), before * factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [0.0, 1e-12])
def test_zero_grad_forgets_rows_whose_gradients_are_zeros_or_nearly(dtype, size):
    """Their norm is 0, or too small for the model's dtype; such rows would be pushed again at each step."""
    embedding = psd.Embedding("user", DIM).to(dtype)
    tables = RowsInMemory(DIM).join(embedding)
    (embedding(IDS) * size).float().sum().backward()
    assert list(tables.gradients()) == [0]

    embedding.zero_grad(set_to_none=False)
    assert tables.gradients() == {}


def test_autograd_grad_gives_the_norm_and_collects_nothing(embedding):
    """Of several lookups that of their sum, as if they were one; what was collected before stays."""
    before = dense(embedding.rows, DIM)
    parameter = nn.Parameter(torch.ones(DIM))

    loss = (embedding(IDS) * parameter).sum() + embedding(torch.tensor([1])).sum()
    norm, of_parameter = torch.autograd.grad(loss, [embedding.handle, parameter], retain_graph=True)
    (again,) = torch.autograd.grad(loss, [embedding.handle])
    loss = (embedding(IDS) * parameter).sum()
    loss.backward(inputs=[parameter])

    torch.testing.assert_close(norm, torch.tensor((2 * 2.0**2 * DIM) ** 0.5))
    torch.testing.assert_close(norm, again)
    torch.testing.assert_close(of_parameter, parameter.grad)
    torch.testing.assert_close(dense(embedding.rows, DIM), before)


def test_a_model_that_is_moved_to_another_dtype_keeps_its_gradients(embedding):
    before = dense(embedding.rows, DIM)
    embedding.half().double()
    torch.testing.assert_close(dense(embedding.rows, DIM), before, rtol=1e-3, atol=0)


def test_a_handle_that_was_initialized_with_all_parameters_is_refused(run_workers):
    """The program believes that rows begin so."""

    def worker(ps):
        model = nn.ModuleList([psd.Embedding("user", DIM), nn.Linear(DIM, 1)])
        for parameter in model.parameters():
            nn.init.uniform_(parameter, 0.1, 0.2)
        with pytest.raises(InvalidRequest, match="'user': its handle was given a value"):
            psd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), ps=ps)

    run_workers(1, 1, worker)
