"""Embeddings give what torch's own modules give for the same rows, and collect the same gradients."""

from __future__ import annotations

import copy
import io
import pickle

import pytest

torch = pytest.importorskip("torch")

from rows_in_memory import IDS, RowsInMemory, dense  # noqa: E402
from torch import nn  # noqa: E402

import psd_client.torch as psd  # noqa: E402
from psd.contract.errors import InvalidRequest, InvalidTensor, NotDeclared  # noqa: E402
from psd_client import SGD, Adagrad  # noqa: E402

DIM = 6


def shuffled(*shape: int, seed: int = 0) -> torch.Tensor:
    """Ids, many of them repeated."""
    return torch.randint(IDS // 3, shape, generator=torch.Generator().manual_seed(seed))


def weights_of(output: torch.Tensor) -> torch.Tensor:
    """What an output is multiplied by in the loss, so that all gradients differ."""
    return torch.arange(output.numel(), dtype=output.dtype).reshape(output.shape).sin()


def pair(**options):
    """An embedding, torch's own with the same rows, and the tables."""
    rows = RowsInMemory(DIM)
    mine, theirs = psd.Embedding("user", DIM, **options), nn.Embedding.from_pretrained(rows.weight(), freeze=False, **options)
    return mine, theirs, rows.join(mine)


def check_same(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """Outputs are equal; and back-propagation from both."""
    assert mine.shape == theirs.shape
    torch.testing.assert_close(mine, theirs)
    for output in (mine, theirs):
        (output * weights_of(output)).sum().backward()


@pytest.mark.parametrize("ids", [shuffled(40), shuffled(3, 4, 5).int(), torch.tensor(7), shuffled(0), shuffled(8, 6).t()])
def test_rows_and_gradients_are_those_of_torch(ids):
    """Repeated ids, of any shape, int64 and int32, a single one, none, and no plain memory."""
    mine, theirs, tables = pair()

    check_same(mine(ids), theirs(ids))

    torch.testing.assert_close(dense(tables, DIM), theirs.weight.grad)


def test_the_output_may_be_changed_in_place():
    """As by x += positions(...), or by layers that have inplace=True."""
    mine, theirs, tables = pair()
    ids = shuffled(3, 4)

    check_same(*(nn.ReLU(inplace=True)(module(ids).add_(0.5)) for module in (mine, theirs)))

    torch.testing.assert_close(dense(tables, DIM), theirs.weight.grad)


def test_padding_is_zeros_and_has_no_gradient():
    """Nor is it asked for. In torch, too, the row of the padding is zeros at first, and stays so."""
    mine, theirs, tables = pair(padding_idx=3)
    with torch.no_grad():
        theirs.weight[3] = 0
    ids = torch.tensor([[3, 5, 3], [9, 5, 1]])

    check_same(mine(ids), theirs(ids))

    torch.testing.assert_close(dense(tables, DIM), theirs.weight.grad)
    assert tables._worker.pulls == [({0: [1, 5, 9]}, False)]


def test_gradients_of_several_lookups_add_up_until_zero_grad():
    """Of one module called twice, of several backward(), and after a step: as in `.grad`."""
    mine, theirs, tables = pair()
    for embedding in (mine, theirs):
        first, second = embedding(shuffled(30)), embedding(shuffled(20, seed=1))
        ((first * weights_of(first)).sum() - (second * weights_of(second)).sum()).backward()
        (embedding(shuffled(9, seed=2)) ** 2).sum().backward()
    torch.testing.assert_close(dense(tables, DIM), theirs.weight.grad)
    torch.testing.assert_close(mine.handle.grad.norm(), theirs.weight.grad.norm())

    tables.on_step()
    torch.testing.assert_close(dense(tables, DIM), theirs.weight.grad)

    for owner in (nn.ModuleList([mine]), torch.optim.SGD(mine.parameters(), lr=0.1)):
        for set_to_none in (True, False):
            owner.zero_grad(set_to_none)
            assert tables.gradients() == {}
            mine(shuffled(4)).sum().backward()
    assert dense(tables, DIM).sum() == 4 * DIM


def test_what_is_done_to_all_gradients_is_done_to_rows():
    """Clipping by the norm of all, and by a GradScaler's unscale_; an infinity is found."""
    mine, theirs, tables = pair()
    other = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    ids = shuffled(30)
    for embedding, parameter in ((mine, other[0]), (theirs, other[1])):
        (embedding(ids).square().sum() * 1024 + parameter.sum() * 2048).backward()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.ones(()))
        scaler.unscale_(torch.optim.SGD([*embedding.parameters(), parameter], lr=0.1))
        nn.utils.clip_grad_norm_([*embedding.parameters(), parameter], 1.0)
    torch.testing.assert_close(dense(tables, DIM), theirs.weight.grad)
    torch.testing.assert_close(other[0].grad, other[1].grad)

    mine.zero_grad()
    (mine(ids) * float("inf")).sum().backward()
    assert mine.handle.grad.isinf().all()


def test_rows_are_of_the_modules_dtype():
    mine, theirs, tables = pair()
    ids = shuffled(30)

    output = mine.half()(ids)
    assert output.dtype == torch.float16
    check_same(output, theirs.half()(ids))

    torch.testing.assert_close(dense(tables, DIM), theirs.weight.grad.float(), rtol=2e-3, atol=2e-3)

    mine, theirs, tables = pair()
    check_same(mine.double()(ids), theirs.double()(ids))
    torch.testing.assert_close(dense(tables, DIM), theirs.weight.grad.float())
    torch.testing.assert_close(mine.handle.grad.norm(), theirs.weight.grad.norm(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("form", ["offsets", "last offset", "matrix", "weights", "matrix weights", "padding", "matrix padding"])
def test_bags_are_those_of_torch(mode, form):
    """Of one dimension and of two, with an empty bag, weights, padding, a bag of nothing else, and weights with padding."""
    rows = RowsInMemory(DIM)
    padding_idx = 3 if form in ("padding", "matrix padding", "matrix weights") else None
    options = {"mode": mode, "include_last_offset": form == "last offset", "padding_idx": padding_idx}
    mine, theirs = psd.EmbeddingBag("item", DIM, **options), nn.EmbeddingBag.from_pretrained(rows.weight(), False, **options)
    tables = rows.join(mine)
    arguments = [shuffled(6, 4), None] if form.startswith("matrix") else [shuffled(12), torch.tensor([0, 5, 5, 9])]
    if padding_idx is not None:
        arguments[0][-3 if form == "padding" else -1 :] = padding_idx
    if form == "last offset":
        arguments[1] = torch.tensor([0, 5, 9, 12])
    weights = [torch.linspace(-1, 2, arguments[0].numel()).view_as(arguments[0]).requires_grad_() for _ in range(2)]
    if form.endswith("weights"):
        if mode != "sum":
            with pytest.raises(InvalidRequest, match='per_sample_weights: only with mode="sum"'):
                mine(*arguments, per_sample_weights=weights[0])
            return
        check_same(mine(*arguments, weights[0]), theirs(*arguments, weights[1]))
        torch.testing.assert_close(weights[0].grad, weights[1].grad)
    else:
        check_same(mine(*arguments), theirs(*arguments))

    torch.testing.assert_close(dense(tables, DIM), theirs.weight.grad)


def test_a_collection_pulls_all_tables_at_once_and_shares_them():
    """Features may have a module, or a table, in common."""
    rows = RowsInMemory(DIM, 3)
    item = psd.Embedding("item", 3)
    modules = {"user": psd.Embedding("user", DIM), "item": item, "again": item, "seen": psd.EmbeddingBag("item", 3, mode="sum")}
    collection = psd.EmbeddingCollection(modules)
    tables = rows.join(modules["user"], item, modules["seen"])
    seen = torch.tensor([1, 2, 9]), torch.tensor([0, 1])
    ids = {"user": shuffled(5), "item": torch.tensor([2, 4]), "again": torch.tensor([4, 4]), "seen": seen}

    out = collection(ids)

    assert len(rows.pulls) == 1
    weight = rows.weight(1)
    torch.testing.assert_close(out["again"], weight[[4, 4]])
    torch.testing.assert_close(out["seen"], torch.stack([weight[1], weight[2] + weight[9]]))
    sum(value.sum() for value in out.values()).backward()
    expected = torch.zeros(IDS)
    for row in (2, 4, 4, 4, 1, 2, 9):
        expected[row] += 1
    torch.testing.assert_close(dense(tables, 3, table=1)[:, 0], expected)
    with pytest.raises(InvalidRequest, match="no feature 'person'; there are user, item, again, seen"):
        collection({"person": ids["user"]})


def test_in_evaluation_mode_rows_are_trained_as_torchs_are_and_kept_alive_by_no_lookup():
    """As where dropout is off while a model is tuned. Without gradients nothing is tracked."""
    mine, theirs, tables = pair()
    ids = torch.tensor([1, 2, 2])

    check_same(mine.eval()(ids), theirs.eval()(ids))
    torch.testing.assert_close(dense(tables, DIM), theirs.weight.grad)
    mine.zero_grad()
    with torch.no_grad():
        assert not mine(ids).requires_grad
    mine.train().requires_grad_(False)
    assert not mine(ids).requires_grad

    assert tables._worker.pulls == [({0: [1, 2]}, True)] * 3
    assert tables.gradients() == {}


def test_prefetched_rows_serve_one_lookup_of_the_next_step():
    """Of the same ids; they are asked for when the step has ended, all at once, and dropped when they are too old."""
    rows = RowsInMemory(DIM, 3)
    user, item = psd.Embedding("user", DIM), psd.Embedding("item", 3)
    tables = rows.join(user, item)
    ids = torch.tensor([5, 6])

    def step():
        rows.clock += 1
        tables.on_step()

    user.prefetch(ids)
    item.prefetch(ids)
    assert rows.pulls == []
    step()
    torch.testing.assert_close(user(ids), rows.weight()[ids])
    assert rows.pulls == [({0: [5, 6], 1: [5, 6]}, False)]
    user(ids)  # a second time
    item(torch.tensor([6, 5]))  # others
    assert len(rows.pulls) == 3
    step()
    item(ids)  # from an older step
    assert len(rows.pulls) == 4

    user.prefetch(ids)
    user(ids)  # before the step has ended: there is nothing to be asked for after it
    step()
    assert len(rows.pulls) == 5


def test_without_rounds_rows_are_prefetched_at_once_and_are_one_step_older():
    rows = RowsInMemory(DIM, mode="async")
    user = psd.Embedding("user", DIM)
    tables = rows.join(user)
    ids = torch.tensor([5, 6])
    before = rows.weight()

    user.prefetch(ids)
    tables.settle()
    assert len(rows.pulls) == 1
    rows.rows[0] += 1
    rows.clock += 1
    tables.on_step()
    torch.testing.assert_close(user(ids), before[ids])

    user.prefetch(ids)
    tables.settle()
    for _ in range(2):
        rows.clock += 1
        tables.on_step()
    torch.testing.assert_close(user(ids), rows.weight()[ids])
    assert len(rows.pulls) == 3


def test_an_error_of_a_prefetch_is_raised_once_by_the_lookup():
    rows = RowsInMemory(DIM)
    user = psd.Embedding("user", DIM)
    tables = rows.join(user)
    user.prefetch(torch.tensor([1]))
    rows.error = RuntimeError("cut")
    tables.on_step()

    with pytest.raises(RuntimeError, match="cut"):
        user(torch.tensor([1]))
    rows.error = None
    user(torch.tensor([1]))
    tables.settle()


def test_copies_and_pickles_are_joined_to_nothing_and_say_what_to_do():
    mine, _, _ = pair()
    mine(torch.tensor([1])).sum().backward()
    file = io.BytesIO()
    torch.save(mine, file)

    for other in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine)), psd.Embedding("user", DIM)):
        with pytest.raises(NotDeclared, match=r"embedding 'user': .* call psd_client\.torch\.distribute\(model, optimizer\)"):
            other(torch.tensor([1]))
        assert other.gradients.take(other.handle) is None


def test_a_state_dict_has_nothing_of_an_embedding_and_rows_are_not_ignored():
    """A model is loaded from a state_dict as before; one of torch's own embedding would be lost, and is refused."""
    model = nn.ModuleDict({"user": psd.Embedding("user", DIM), "top": nn.Linear(DIM, 1)})

    assert set(model.state_dict()) == {"top.weight", "top.bias"}
    model.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "user.weight"'):
        model.load_state_dict(model.state_dict() | {"user.weight": torch.zeros(3, DIM)})


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: psd.Embedding("", 4), InvalidRequest, "name"),
        (lambda: psd.Embedding("user", 0), InvalidRequest, "dim"),
        (lambda: psd.Embedding("user", 4, torch.optim.SGD), TypeError, "optimizer"),
        (lambda: psd.Embedding("user", 4, SGD(lr=1), padding_idx="a"), InvalidRequest, "padding_idx"),
        (lambda: psd.Embedding("user", 4, Adagrad(), colour=3), TypeError, "colour"),
        (lambda: psd.EmbeddingBag("user", 4, mode="median"), InvalidRequest, "mode: must be one of sum, mean, max"),
        (lambda: psd.EmbeddingCollection({"user": nn.Embedding(3, 4)}), TypeError, r"modules\['user'\]"),
    ],
)
def test_wrong_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_wrong_ids_are_named_before_anything_is_pulled():
    rows = RowsInMemory(DIM, DIM)
    user, bag = psd.Embedding("user", DIM), psd.EmbeddingBag("item", DIM, mode="sum")
    rows.join(user, bag)

    with pytest.raises(TypeError, match="ids: expected a tensor, got list"):
        user([1, 2])
    with pytest.raises(InvalidTensor, match=r"ids: dtype must be torch.int64 or torch.int32, got torch.float32"):
        user(torch.zeros(2))
    for arguments, message in [
        ((torch.tensor([1]),), "offsets: ids of 1 dimension need them"),
        ((torch.tensor([[1]]), torch.tensor([0])), "offsets: ids of 1 dimension need them, ids of 2 have none"),
        ((torch.tensor(1), None), "ids: must have 1 or 2 dimensions, got 0"),
        ((torch.tensor([[1]]), None, torch.ones(1)), r"per_sample_weights: shape must be \(1, 1\)"),
        ((torch.tensor([1]), torch.zeros(1)), "offsets: dtype"),
        *(
            (
                (torch.tensor([1, 2, 3]), torch.tensor(offsets, dtype=torch.int64)),
                r"offsets: .* be at most 3, the number of ids",
            )
            for offsets in ([1, 2], [0, 4], [0, 2, 1], [0, -1], [], [[0, 1]])
        ),
    ]:
        with pytest.raises(InvalidTensor, match=message):
            bag(*arguments)
    assert rows.pulls == []
