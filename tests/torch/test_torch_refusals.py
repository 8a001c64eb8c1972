"""Refusals: whatever psd would not do as torch does is refused, by name, before anything is sent."""

from __future__ import annotations

import pickle

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import backward, batch, small_model, values  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import LBFGS, SGD, AdamW  # noqa: E402

import psd_client  # noqa: E402
import psd_client.torch as psd  # noqa: E402
from psd.contract.errors import InvalidRequest, InvalidTensor, NonFiniteGradient  # noqa: E402

NOBODY = "127.0.0.1:1"  # no shard listens there, so an error that names something else came before connecting


class Custom(SGD):
    pass


class Bag(nn.Module):
    def __init__(self, **parameters: nn.Parameter) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, value)


def distribute(model, optimizer, **arguments):
    return psd.distribute(model, optimizer, servers=NOBODY, rank=0, world_size=1, retry_timeout=0, **arguments)


def test_other_optimizers_are_refused_by_name():
    model = small_model()
    with pytest.raises(
        TypeError, match=r"^torch\.optim\.LBFGS is not supported yet; supported: SGD, Adagrad, .*, NAdam; .*CustomRule$"
    ):
        distribute(model, LBFGS(model.parameters()))


def test_subclass_of_sgd_is_refused_by_name():
    model = small_model()
    with pytest.raises(TypeError, match=r"\.Custom is a subclass of torch\.optim\.SGD"):
        distribute(model, Custom(model.parameters(), lr=0.1))


def test_subclass_of_a_class_that_is_itself_one_is_refused_by_the_nearest_name():
    class Mine(AdamW):
        pass

    model = small_model()
    with pytest.raises(TypeError, match=r"Mine is a subclass of torch\.optim\.AdamW"):
        distribute(model, Mine(model.parameters()))


def test_option_that_shards_do_not_honour_is_refused_by_name():
    model = small_model()
    with pytest.raises(InvalidRequest, match="differentiable=True is not supported"):
        distribute(model, SGD(model.parameters(), lr=0.1, differentiable=True))


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
def test_choice_of_torchs_kernel_is_ignored(run_workers, options):
    """foreach and fused choose among torch's own kernels for the same arithmetic."""

    def worker(ps):
        model = small_model()
        psd.distribute(model, SGD(model.parameters(), lr=0.1, **options), ps=ps)
        return True

    assert run_workers(1, 1, worker) == [True]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": [nn.Linear(1, 1)]}, TypeError, r"model: expected a torch.nn.Module, got \[Linear"),
        ({"optimizer": None}, TypeError, "optimizer: expected one of torch.optim, or a rule of psd_client, got None"),
        ({"optimizer": SGD}, TypeError, "optimizer: expected one of torch.optim"),
        ({"staleness": 1}, InvalidRequest, 'staleness: expected "lr" or None'),
        (
            {"overlap": True, "clip_norm": 1.0, "consistency": "async"},
            InvalidRequest,
            "clip_norm .*'async'.* leave one",
        ),
        ({"consistancy": "async"}, TypeError, r"distribute\(\) got an unexpected .* 'consistancy'; did you mean 'consistency'"),
        ({"servers": 3}, ValueError, "servers: expected the shards' addresses"),
    ],
)
def test_argument_of_the_wrong_kind_is_refused_by_name(arguments, error, message):
    model = small_model()
    given = {"model": model, "optimizer": SGD(model.parameters(), lr=0.1), "servers": NOBODY, "rank": 0, "world_size": 1}
    with pytest.raises(error, match=message):
        psd.distribute(**given | arguments)


def test_what_is_distributed_already_is_refused(cluster):
    """Whichever way it is done a second time: the message says how to train two models."""
    model = small_model()
    given, servers = SGD(model.parameters(), lr=0.1), cluster(1).servers
    together = r"distribute\(\{'a': a, 'b': b\}, \{'a': optimizer_of_a, 'b': optimizer_of_b\}\)"
    with psd_client.connect(servers, 0, 1) as ps:
        optimizer = psd.distribute(model, given, ps=ps)
        with pytest.raises(TypeError, match="optimizer: is distributed already; pass the torch"):
            psd.distribute(model, optimizer, ps=ps)
        with pytest.raises(InvalidRequest, match=rf"declared its job already.*{together}"):
            psd.distribute(model, given, ps=ps)
        with pytest.raises(InvalidRequest, match="batch_size: expected a number, got '3'"):
            optimizer.step(batch_size="3")
        other = nn.Linear(1, 1)
        with pytest.raises(psd_client.SpecMismatch, match=rf"parameter .*connected twice as worker 0.*{together}"):
            psd.distribute(other, SGD(other.parameters(), lr=0.1), servers=servers, rank=0, world_size=1)


def test_optimizer_that_has_momentum_already_is_refused():
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    backward(model, *batch(0))
    optimizer.step()
    with pytest.raises(InvalidRequest, match=r"has been stepped.*momentum_buffer"):
        distribute(model, optimizer)


def test_parameter_outside_the_model_is_refused():
    model, other = small_model(), nn.Linear(5, 2)
    with pytest.raises(InvalidRequest, match=r"parameter 0 of param_groups\[1\], of shape \(2, 5\), is not in the model"):
        distribute(model, SGD([{"params": model.parameters()}, {"params": other.parameters()}], lr=0.1))


def test_model_without_anything_to_train_is_refused():
    model = small_model().requires_grad_(False)
    with pytest.raises(InvalidRequest, match="nothing to train"):
        distribute(model, SGD(model.parameters(), lr=0.1))


def test_unknown_policy_for_buffers_is_refused():
    model = small_model()
    with pytest.raises(InvalidRequest, match=r"buffers.*'average'"):
        distribute(model, SGD(model.parameters(), lr=0.1), buffers="average")


def test_connection_and_its_arguments_exclude_each_other(run_workers):
    def worker(ps):
        model = small_model()
        with pytest.raises(TypeError, match="either ps or rank, servers"):
            psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps, servers=NOBODY, rank=0)
        return True

    assert run_workers(1, 1, worker) == [True]


def two_tensors():
    from torch.testing._internal.two_tensor import TwoTensor  # with which torch's compiler comes: not while tests are found

    return {"w": TwoTensor(torch.zeros(3), torch.zeros(3))}


STORAGE = torch.zeros(100)

PARAMETERS = {
    "complex": ({"w": torch.zeros(3, dtype=torch.complex64)}, r"'w' has dtype torch\.complex64"),
    "integer": ({"w": torch.zeros(3, dtype=torch.int64)}, r"'w' has dtype torch\.int64"),
    "float8": ({"w": torch.zeros(3, dtype=torch.float8_e4m3fn)}, r"'w' has dtype torch\.float8"),
    "meta": ({"w": torch.zeros(3, device="meta")}, "'w' is on the meta device"),
    "sparse": ({"w": torch.eye(3).to_sparse()}, "'w' has layout torch.sparse_coo"),
    "of other tensors": (two_tensors, "'w' is a TwoTensor, which is made of other tensors"),
    "expanded": ({"w": torch.zeros(1, 3).expand(4, 3)}, "'w' is expanded"),
    "overlapping itself": ({"w": STORAGE.as_strided((5, 5), (3, 1))}, "'w' is expanded"),
    "overlapping": ({"v": STORAGE[:60], "w": STORAGE[50:]}, "'w' shares memory with 'v'"),
    "same memory, other dtype": ({"v": STORAGE[:10], "w": STORAGE.view(torch.float16)[:4]}, "'w' shares memory with 'v'"),
}


@pytest.mark.parametrize(("tensors", "message"), PARAMETERS.values(), ids=PARAMETERS)
def test_parameter_that_cannot_be_trained_is_refused_by_name(tensors, message):
    named = tensors() if callable(tensors) else tensors
    parameters = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in named.items()}
    model = Bag(good=nn.Parameter(torch.zeros(2)), **parameters)
    with pytest.raises(InvalidTensor, match=message):
        distribute(model, SGD(model.parameters(), lr=0.1))


def test_lazy_parameter_is_refused_by_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    with pytest.raises(InvalidTensor, match=r"'1\.weight' has no shape yet"):
        distribute(model, SGD(model[0].parameters(), lr=0.1))


def test_sparse_gradient_is_refused_by_name(run_workers):
    def worker(ps):
        model = nn.Embedding(10, 2, sparse=True)
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps)
        model(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(InvalidTensor, match=r"'weight': its gradient is sparse.*sparse=False"):
            optimizer.step()
        return ps.clock

    assert run_workers(1, 1, worker) == [0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite_is_refused_before_it_is_sent(run_workers, bad):
    """The model stays, and the next step is the first one."""

    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps)
        backward(model, *batch(0))
        before = values(model)
        model[2].bias.grad[1] = bad
        with pytest.raises(NonFiniteGradient, match=r"2\.bias"):
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(values(model), before, strict=True))
        assert ps.clock == 0
        backward(model, *batch(0))
        optimizer.step()
        return ps.clock

    assert run_workers(1, 2, worker) == [1]


def change_nesterov(optimizer, _model):
    optimizer.param_groups[0]["nesterov"] = False


def add_momentum(optimizer, _model):
    optimizer.param_groups[1]["momentum"] = 0.9


def spoil_lr(optimizer, _model):
    optimizer.param_groups[1]["lr"] = float("nan")


def spoil_batch_size(optimizer, _model):
    optimizer.batch_size = -1


def unfreeze(_optimizer, model):
    model[0].bias.requires_grad_(True)
    model[0].bias.grad = torch.zeros(8)


def move_to_another_group(optimizer, _model):
    first, second = optimizer.param_groups
    first["params"].append(second["params"].pop(0))


LATE_CHANGES = {
    "params": (move_to_another_group, r"param_groups\[0\]\['params'\]: has changed since the job was declared"),
    "nesterov": (change_nesterov, r"param_groups\[0\]: nesterov was on when the job was declared"),
    "momentum": (add_momentum, r"param_groups\[1\]: momentum was off when the job was declared"),
    "lr": (spoil_lr, r"^param_groups\[1\].lr: must be finite"),
    "batch_size": (spoil_batch_size, r"^batch_size: must be 0, or 1e-09 to 1e\+15, got -1"),
    "frozen": (unfreeze, r"'0\.bias' was frozen when the job was declared"),
}


@pytest.mark.parametrize(("change", "message"), LATE_CHANGES.values(), ids=LATE_CHANGES)
def test_change_of_what_was_declared_is_refused(run_workers, change, message):
    def worker(ps):
        model = small_model()
        model[0].bias.requires_grad_(False)
        groups = [{"params": [model[0].weight], "momentum": 0.9, "nesterov": True}, {"params": [model[2].bias, model[0].bias]}]
        optimizer = psd.distribute(model, SGD(groups, lr=0.1), ps=ps)
        backward(model, *batch(0))
        with pytest.raises(TypeError, match=r"closure: expected a function .* batch_size= .*, got 8"):
            optimizer.step(8)
        change(optimizer, model)
        with pytest.raises(InvalidRequest, match=message):
            optimizer.step()
        return ps.clock

    assert run_workers(1, 1, worker) == [0]


def test_new_param_group_is_refused(run_workers):
    """Added to the distributed optimizer at once, added to the given one at the next step."""

    def worker(ps):
        model = small_model()
        given = SGD(model[0].parameters(), lr=0.1)
        optimizer = psd.distribute(model, given, ps=ps)
        backward(model, *batch(0))
        with pytest.raises(InvalidRequest, match="add all groups before distribute"):
            optimizer.add_param_group({"params": model[2].parameters()})
        optimizer.step()
        given.add_param_group({"params": model[2].parameters()})
        with pytest.raises(InvalidRequest, match="add all groups before distribute"):
            optimizer.step()
        return ps.clock

    assert run_workers(1, 1, worker) == [1]


def test_pickling_is_refused_with_a_hint(run_workers):
    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, SGD(model.parameters(), lr=0.1), ps=ps)
        with pytest.raises(TypeError, match="state_dict"):
            pickle.dumps(optimizer)
        return True

    assert run_workers(1, 1, worker) == [True]
