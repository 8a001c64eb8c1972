"""Slots that begin anew, or are loaded, in the midst of a job: training goes on as in one process that does likewise."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import STEPS, assert_close, backward, batch, part, small_model, train_alone, values  # noqa: E402
from torch import nn, optim  # noqa: E402

import psd_client  # noqa: E402
import psd_client.torch as psd  # noqa: E402
from psd.contract.errors import InvalidRequest, InvalidTensor, NonFiniteGradient  # noqa: E402
from psd_client.worker.exchange.loading import ParameterLoad  # noqa: E402

SWEEP = [1e-3 * 8**n for n in range(6)]
"""Learning rates of a finder; the last ones let the model diverge."""


def trained(model, optimizer, ps, *, steps: int = STEPS, rates: list[float] | None = None) -> None:
    for step, rate in enumerate(rates or [None] * steps):
        if rate is not None:
            optimizer.param_groups[0]["lr"] = rate
        x, y = part(step, ps.rank, ps.world_size)
        optimizer.batch_size = len(x)
        backward(model, x, y)
        optimizer.step()


@pytest.mark.parametrize("options", [{}, {"aggregation": "exact"}, {"overlap": True}], ids=str)
@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda model: optim.Adam(model.parameters(), lr=0.01, amsgrad=True),
        lambda model: optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        lambda model: optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.3, lr_decay=0.1),
    ],
    ids=["Adam", "SGD", "Adagrad"],
)
def test_a_learning_rate_finder_leaves_nothing_behind(run_workers, optimizer_of, options):
    """The usual recipe: keep both states, sweep, load both. Without reset_slots, which its error names, the moments of the
    sweep would stay."""

    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, optimizer_of(model), ps=ps, **options)
        parameters, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        trained(model, optimizer, ps, rates=SWEEP)

        optimizer.load_parameters(parameters)
        with pytest.raises(InvalidRequest, match=r"of step 0, and the job is at step 6; .* reset_slots\(\)"):
            optimizer.load_state_dict(state)
        optimizer.reset_slots()
        optimizer.load_state_dict(state)
        trained(model, optimizer, ps)
        assert ps.clock == len(SWEEP) + STEPS
        with pytest.raises(InvalidRequest, match="of step 0"):
            optimizer.load_state_dict(state)
        return values(model)

    alone = small_model()
    expected = train_alone(alone, optimizer_of(alone))
    for found in run_workers(2, 2, worker):
        assert_close(found, expected)


@pytest.mark.parametrize("consistency", ["async", "ssp:2"])
def test_reset_slots_without_rounds_then_all_workers_begin_anew(run_workers, consistency):
    """They come at clocks of their own."""

    def worker(ps):
        model = small_model()
        given = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer = psd.distribute(model, given, ps=ps, consistency=consistency)
        for step in range(2 + ps.rank):
            backward(model, *batch(step))
            optimizer.step()
        optimizer.reset_slots()
        before = values(model)
        ps.barrier("both have read")
        if ps.rank == 0:
            backward(model, *batch(9))
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
            assert_close(values(model), [old - 0.05 * gradient for old, gradient in zip(before, gradients, strict=True)])
        ps.barrier("one has pushed")

    run_workers(2, 2, worker)


def test_reset_slots_when_the_worker_that_does_it_dies_in_the_middle_then_another_one_does(cluster, monkeypatch):
    """Neither shard keeps slots of before, and the others wait for nobody."""
    set_at = ParameterLoad._set_at

    def dies_at_the_second_shard(self, lane, call, request):
        if self._rank == 0 and lane.shard == 1:
            raise RuntimeError("dies")
        set_at(self, lane, call, request)

    monkeypatch.setattr(ParameterLoad, "_set_at", dies_at_the_second_shard)
    servers = cluster(2, lease_s=60.0, on_worker_failure="continue").servers

    def worker(rank):
        model = nn.ModuleList([nn.Linear(40, 60), nn.Linear(60, 40)])
        with psd_client.connect(servers, rank, 3, wait_timeout=120) as ps:
            optimizer = psd.distribute(model, optim.SGD(model.parameters(), lr=1.0, momentum=0.5), ps=ps)
            gradients = [torch.ones_like(parameter) for parameter in model.parameters()]
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
            optimizer.reset_slots()
            before = values(model)
            optimizer.step()
        return [old - new for old, new in zip(before, values(model), strict=True)], gradients

    with ThreadPoolExecutor(3) as pool:
        dead, *others = [pool.submit(worker, rank) for rank in range(3)]
        assert str(dead.exception()) == "dies"
        for other in others:
            steps, gradients = other.result()
            assert_close(steps, gradients, 1e-5)


RULES = [
    lambda parameters: optim.SGD(parameters, lr=0.05, momentum=0.9, dampening=0.1),
    lambda parameters: optim.SGD(parameters, lr=0.05),
    lambda parameters: optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.2, lr_decay=0.05),
    lambda parameters: optim.Adadelta(parameters, lr=0.5),
    lambda parameters: optim.RMSprop(parameters, lr=0.01, centered=True, momentum=0.5),
    lambda parameters: optim.Adam(parameters, lr=0.01, amsgrad=True, weight_decay=0.1),
    lambda parameters: optim.AdamW(parameters, lr=0.01),
    lambda parameters: optim.Adamax(parameters, lr=0.01),
    lambda parameters: optim.NAdam(parameters, lr=0.01),
]


@pytest.mark.parametrize("make", RULES)
def test_the_state_of_torchs_own_optimizer_is_gone_on_from(run_workers, make):
    """Of a program that has trained in one process. One parameter has made no step, another one fewer."""

    def begun():
        model = small_model()
        optimizer = make(model.parameters())
        for step in range(5):
            backward(model, *batch(step))
            model[0].bias.grad = None
            model[2].bias.grad = model[2].bias.grad if step > 2 else None
            optimizer.step()
        return model, optimizer

    model, optimizer = begun()
    state, expected = copy.deepcopy(optimizer.state_dict()), train_alone(model, optimizer)

    def worker(ps):
        model, _ = begun()
        optimizer = psd.distribute(model, make(model.parameters()), ps=ps)
        optimizer.load_state_dict(copy.deepcopy(state))
        trained(model, optimizer, ps)
        return values(model)

    for found in run_workers(2, 2, worker):
        assert_close(found, expected, 1e-5)


def refused(ps, optimizer_of, spoil, error, text) -> None:
    """A state that was loaded is refused, and nothing changes."""
    model = small_model()
    other = optim.Adam(model.parameters(), lr=0.3)
    backward(model, *batch(0))
    other.step()
    state = copy.deepcopy(other.state_dict())
    spoil(state["state"])
    given = optimizer_of(model)
    optimizer = psd.distribute(model, given, ps=ps)
    with pytest.raises(error, match=text):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] != 0.3
    with pytest.raises(InvalidRequest, match=r"'step'.*load_state_dict\(\) of what distribute\(\) returns"):
        given.load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    ("optimizer_of", "spoil", "error", "text"),
    [
        (optim.RMSprop, lambda state: None, InvalidRequest, "'0.weight': the state has 'exp_avg', and the rule .*'rmsprop'"),
        (lambda p: optim.Adam(p, amsgrad=True), lambda state: None, InvalidRequest, "has no 'max_exp_avg_sq'"),
        (optim.Adam, lambda state: state[1].update(exp_avg=torch.ones(3)), InvalidTensor, "of '0.bias' has the shape"),
        (optim.Adam, lambda state: state[1]["exp_avg"].fill_(torch.nan), NonFiniteGradient, "'exp_avg' of '0.bias' holds NaN"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(run_workers, optimizer_of, spoil, error, text):
    run_workers(1, 1, lambda ps: refused(ps, lambda model: optimizer_of(model.parameters()), spoil, error, text))


def test_a_state_of_an_embedding_of_torchs_is_refused(run_workers):
    """The shards have rows by id, and slots of them that nobody can load."""

    def worker(ps):
        model = nn.ModuleList([psd.Embedding("user", 4), nn.Linear(4, 1)])
        theirs = nn.ModuleList([nn.Embedding(9, 4), nn.Linear(4, 1)])
        other = optim.Adam(theirs.parameters())
        theirs[1](theirs[0](torch.tensor([1, 2]))).sum().backward()
        other.step()
        optimizer = psd.distribute(model, optim.Adam(model.parameters()), ps=ps)
        with pytest.raises(InvalidRequest, match="parameter 0, which stands for an embedding's rows"):
            optimizer.load_state_dict(other.state_dict())

    run_workers(1, 1, worker)
