"""What the shards keep comes out as the state of torch's own optimizers, from which both go on alike; and goes in again."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import STEPS, Unlike, assert_close, backward, batch, part, small_model, train_alone, values  # noqa: E402
from test_torch_slots import RULES, trained  # noqa: E402
from torch import nn, optim  # noqa: E402

import psd_client  # noqa: E402
import psd_client.torch as psd  # noqa: E402
from psd.contract.errors import InvalidRequest  # noqa: E402

BEFORE = 5
"""Steps before a state is taken."""


def begin(model: nn.Module, optimizer: Any, ps: Any = None) -> None:
    """The first steps. One parameter makes none, and another one fewer."""
    for step in range(BEFORE):
        x, y = batch(step) if ps is None else part(step, ps.rank, ps.world_size)
        if ps is not None:
            optimizer.batch_size = len(x)
        backward(model, x, y)
        model[0].bias.grad = None
        model[2].bias.grad = model[2].bias.grad if step > 2 else None
        optimizer.step()


def assert_same_state(found: dict[int, dict[str, Any]], expected: dict[int, dict[str, Any]], relative: float) -> None:
    """But for what is None, or belongs to no step: torch leaves some of that in."""
    expected = {key: {name: value for name, value in state.items() if value is not None} for key, state in expected.items()}
    assert {key for key, state in expected.items() if state} == found.keys()
    for key, state in found.items():
        assert state.keys() == expected[key].keys()
        assert_close(list(state.values()), [expected[key][name] for name in state], relative)


@pytest.mark.parametrize("make", RULES)
def test_plain_torch_goes_on_from_a_job_as_the_job_does(run_workers, make):
    """With the state of one worker, taken while the other one goes on."""

    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, make(model.parameters()), ps=ps)
        begin(model, optimizer, ps)
        state, parameters = None, values(model)
        if ps.rank == 0:
            state = optimizer.state_dict(slots=True)
        trained(model, optimizer, ps)
        return state, parameters, values(model)

    (state, parameters, expected), (_, _, others) = run_workers(2, 2, worker)
    alone = small_model()
    own = make(alone.parameters())
    begin(alone, own)
    assert_close(parameters, values(alone), 1e-5)
    assert_same_state(state["state"], own.state_dict()["state"], 1e-5)
    assert state["param_groups"] == own.state_dict()["param_groups"]

    taken = small_model()
    with torch.no_grad():
        for parameter, value in zip(taken.parameters(), parameters, strict=True):
            parameter.copy_(value)
    following = make(taken.parameters())
    following.load_state_dict(state)
    for found in (train_alone(taken, following), others):
        assert_close(found, expected, 1e-6)


FOUND_RATES = [
    ("momentum", {}, 1, 0),
    ("momentum", {"aggregation": "exact"}, 2, BEFORE),
    ("momentum", {"overlap": True}, 2, 0),
    ("SGD", {}, 2, BEFORE),
    ("SGD", {"aggregation": "exact"}, 1, 0),
    ("SGD", {"overlap": True}, 1, BEFORE),
    ("amsgrad", {}, 2, 0),
    ("amsgrad", {"aggregation": "exact"}, 1, BEFORE),
    ("amsgrad", {"overlap": True}, 2, BEFORE),
]
"""Each value of each beside each of every other."""


@pytest.mark.parametrize(("rule", "options", "workers", "before"), FOUND_RATES, ids=str)
def test_a_learning_rate_finder_leaves_nothing_behind_wherever_it_begins(run_workers, rule, options, workers, before):
    """Torch's own recipe: keep both states, raise the rate from 1e-6 to 1, note the losses, load both, go on. The clock alone
    has moved."""
    make = {"momentum": RULES[0], "SGD": RULES[1], "amsgrad": RULES[5]}[rule]

    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, make(model.parameters()), ps=ps, **options)
        trained(model, optimizer, ps, steps=before)
        saved = copy.deepcopy(model.state_dict()), optimizer.state_dict(slots=True)
        losses = []
        for step in range(13):
            optimizer.param_groups[0]["lr"] = 10.0 ** (step / 2 - 6)
            x, y = part(step, ps.rank, ps.world_size)
            optimizer.batch_size = len(x)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        optimizer.load_parameters(saved[0])
        optimizer.load_state_dict(saved[1])
        assert ps.clock == before + 13
        assert len(set(losses)) == 13
        trained(model, optimizer, ps)
        return values(model)

    alone = small_model()
    own = make(alone.parameters())
    train_alone(alone, own, steps=before)
    expected = train_alone(alone, own)
    for found in run_workers(workers, 2, worker):
        assert_close(found, expected, 1e-5)


def test_a_state_without_slots_is_refused_amid_a_job_and_says_which_one_is_not(run_workers):
    """Where the recipe is followed to the letter, with a state that lacks what the sweep has changed; nothing has changed."""

    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, optim.Adam(model.parameters()), ps=ps)
        trained(model, optimizer, ps, steps=2)
        state, parameters = optimizer.state_dict(), copy.deepcopy(model.state_dict())
        assert state["state"] == {}
        trained(model, optimizer, ps, rates=[0.5])
        with pytest.raises(
            InvalidRequest, match=r"of step 2, and the job is at step 3; .*state_dict\(slots=True\) has its own"
        ):
            optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 0.5
        model.load_state_dict(parameters)
        with pytest.raises(InvalidRequest, match="load_parameters"):
            optimizer.step()

    run_workers(1, 1, worker)


@pytest.mark.parametrize(
    "rule",
    [
        psd_client.Lion(lr=1e-3),
        psd_client.FTRL(lr=0.1, initial_accumulator_value=0.2),
        psd_client.Adam(lr=0.01, amsgrad=True),
        psd_client.SGD(lr=0.1),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_what_comes_out_goes_in_again_to_the_bit(run_workers, rule):
    """Of tensors in several blocks and dtypes, on several shards; also of rules that torch does not have."""

    def worker(ps):
        model = Unlike()
        optimizer = psd.distribute(model, rule, ps=ps)

        def step(value: float) -> list[torch.Tensor]:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, value)
                parameter.grad[::3] *= 2
            optimizer.step()
            return [value for value in values(model) if value.dtype != torch.bfloat16]  # whose masters model.state_dict() lacks

        step(1.0)
        step(-0.5)
        saved, state = copy.deepcopy(model.state_dict()), optimizer.state_dict(slots=True)
        expected = step(3.0)
        optimizer.load_parameters(saved)
        optimizer.load_state_dict(state)
        again = optimizer.state_dict(slots=True)["state"]
        assert again.keys() == state["state"].keys()
        for key, slots in state["state"].items():
            assert all(torch.equal(value, again[key][name]) for name, value in slots.items())
        assert all(map(torch.equal, step(3.0), expected))

    run_workers(1, 3, worker)


def test_without_rounds_a_worker_alone_gets_what_it_has_pushed(run_workers):
    def worker(ps):
        model = small_model()
        optimizer = psd.distribute(model, optim.Adam(model.parameters(), lr=0.01), ps=ps, consistency="async")
        trained(model, optimizer, ps, steps=BEFORE)
        return optimizer.state_dict(slots=True)["state"]

    alone = small_model()
    own = optim.Adam(alone.parameters(), lr=0.01)
    train_alone(alone, own, steps=BEFORE)
    (found,) = run_workers(1, 2, worker)
    assert_same_state(found, own.state_dict()["state"], 1e-5)


def test_groups_have_their_own_slots_and_neither_frozen_parameters_nor_rows_have_any(run_workers):
    """One group with momentum, one without; a table, and a layer that is not trained."""

    def worker(ps):
        model = nn.ModuleDict({"user": psd.Embedding("user", 6), "net": small_model(), "frozen": nn.Linear(2, 2)})
        model["frozen"].requires_grad_(False)
        groups = [
            {"params": [*model["net"][0].parameters(), *model["user"].parameters()], "momentum": 0.9},
            {"params": model["net"][2].parameters()},
            {"params": model["frozen"].parameters(), "momentum": 0.5},
        ]
        optimizer = psd.distribute(model, optim.SGD(groups, lr=0.1), ps=ps)
        for _ in range(2):
            optimizer.zero_grad()
            model["net"](model["user"](torch.tensor([1, 2]))).square().sum().backward()
            optimizer.step()
        state = optimizer.state_dict(slots=True)
        assert {key: sorted(slots) for key, slots in state["state"].items()} == {0: ["momentum_buffer"], 1: ["momentum_buffer"]}
        assert state["state"][0]["momentum_buffer"].shape == (8, 6)
        optimizer.load_state_dict(state)
        assert_same_state(optimizer.state_dict(slots=True)["state"], state["state"], 0.0)
        return True

    assert run_workers(1, 2, worker) == [True]


def test_a_job_that_begins_with_the_state_of_another_one_goes_on_alike(run_workers):
    """Of one worker the first, of two the second, which goes on as the first one does."""

    def first(ps):
        model = small_model()
        optimizer = psd.distribute(model, optim.AdamW(model.parameters(), lr=0.01), ps=ps)
        trained(model, optimizer, ps, steps=BEFORE)
        saved = copy.deepcopy(model.state_dict()), optimizer.state_dict(slots=True)
        trained(model, optimizer, ps)
        return *saved, values(model)

    ((parameters, state, expected),) = run_workers(1, 2, first)

    def second(ps):
        model = small_model()
        model.load_state_dict(parameters)
        optimizer = psd.distribute(model, optim.AdamW(model.parameters()), ps=ps)
        optimizer.load_state_dict(state)
        assert (optimizer.param_groups[0]["lr"], ps.clock) == (0.01, 0)
        trained(model, optimizer, ps, steps=STEPS)
        return values(model)

    for found in run_workers(2, 3, second):
        assert_close(found, expected, 1e-5)
