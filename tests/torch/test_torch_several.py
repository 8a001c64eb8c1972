"""Several models and optimizers in one job, each stepped when the program says: the numbers of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import assert_close, values  # noqa: E402
from torch import nn, optim  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

import psd_client  # noqa: E402
import psd_client.torch as psd  # noqa: E402
from psd.contract.errors import InvalidRequest, PartsDisagree  # noqa: E402

STEPS = 6
WORLDS = [(1, 1), (2, 2)]


def seeded(model: nn.Module) -> nn.Module:
    """A model with the same values at each call."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4, generator)
    return model


def gan() -> dict[str, nn.Module]:
    return {
        "generator": seeded(nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))),
        "critic": seeded(nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))),
    }


def rules(models: dict[str, nn.Module]) -> dict[str, optim.Optimizer]:
    return {
        "generator": optim.Adam(models["generator"].parameters(), lr=0.01, betas=(0.5, 0.999)),
        "critic": optim.RMSprop(models["critic"].parameters(), lr=0.003),
    }


def drawn(step: int, shape: tuple[int, int], rank: int, world_size: int) -> Any:
    """A worker's share of a step's samples."""
    samples = torch.randn(*shape, generator=torch.Generator().manual_seed(step))
    return samples[rank::world_size]


def train_gan(models: dict[str, nn.Module], optimizers: Any, rank: int = 0, world_size: int = 1) -> list[Any]:
    """Two steps of the critic, one of the generator; the generator's loss leaves gradients in the critic, too."""
    generator, critic = models["generator"].eval(), models["critic"]
    for step in range(STEPS):
        for turn in range(2):
            real = drawn(100 + 2 * step + turn, (8, 6), rank, world_size)
            fake = generator(drawn(200 + 2 * step + turn, (8, 4), rank, world_size)).detach()
            optimizers["critic"].zero_grad()
            (F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()).backward()
            optimizers["critic"].step()
        optimizers["generator"].zero_grad()
        F.softplus(-critic(generator(drawn(300 + step, (8, 4), rank, world_size)))).mean().backward()
        optimizers["generator"].step()
    return values(generator) + values(critic)


@pytest.mark.parametrize(("world_size", "shards"), WORLDS)
@pytest.mark.parametrize("options", [{}, {"aggregation": "exact"}, {"nan_policy": "skip"}], ids=str)
def test_a_gan_has_the_numbers_of_one_process(run_workers: Any, world_size: int, shards: int, options: Any) -> None:
    alone = gan()
    expected = train_gan(alone, rules(alone))

    def worker(ps: Any) -> Any:
        models = gan()
        optimizers = psd.distribute(models, rules(models), ps=ps, **options)
        trained = train_gan(models, optimizers, ps.rank, ps.world_size)
        assert ps.clock == 3 * STEPS
        return trained

    for actual in run_workers(world_size, shards, worker):
        assert_close(actual, expected, 1e-5)


class ActorCritic(nn.Module):
    """Two heads on inputs of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = seeded(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)))
        self.critic = seeded(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)))


def heads(model: ActorCritic) -> dict[str, optim.Optimizer]:
    return {
        "actor": optim.SGD(model.actor.parameters(), lr=0.1, momentum=0.9),
        "critic": optim.AdamW(model.critic.parameters(), lr=0.02),
    }


def train_heads(model: ActorCritic, optimizers: Any, rank: int = 0, world_size: int = 1) -> list[Any]:
    """One back-propagation for both, whose gradients add up over two batches."""
    for step in range(STEPS):
        for batch in range(2):
            x = drawn(10 * step + batch, (8, 5), rank, world_size)
            value = model.critic(x).squeeze(1)
            advantage = x.sum(1) - value
            policy = F.log_softmax(model.actor(x), 1)[:, 0]
            (-(advantage.detach() * policy).mean() + advantage.square().mean()).backward()
        optimizers["critic"].step()
        optimizers["actor"].step()
        for optimizer in optimizers.values():
            optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize(("world_size", "shards"), WORLDS)
def test_parts_of_one_model_are_stepped_after_one_back_propagation(run_workers: Any, world_size: int, shards: int) -> None:
    """A step leaves the gradients of the other alone."""
    alone = ActorCritic()
    expected = train_heads(alone, heads(alone))

    def worker(ps: Any) -> Any:
        model = ActorCritic()
        return train_heads(model, psd.distribute(model, heads(model), ps=ps), ps.rank, ps.world_size)

    for actual in run_workers(world_size, shards, worker):
        assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize(("world_size", "shards"), WORLDS)
@pytest.mark.parametrize("has_rule", [False, True])
def test_rows_are_stepped_with_the_part_that_has_their_handle(
    run_workers: Any, world_size: int, shards: int, has_rule: bool
) -> None:
    """Also if the table has a rule of its own; the other part's steps neither use up nor send its gradients."""

    def run(models: dict[str, nn.Module], optimizers: Any, rank: int = 0, world_size: int = 1) -> Any:
        for step in range(STEPS):
            ids = torch.arange(8).remainder(5)[rank::world_size] + step % 3
            models["head"](models["rows"](ids)).square().mean().backward()
            for name in ("head", "rows"):
                optimizers[name].step()
            for optimizer in optimizers.values():
                optimizer.zero_grad()
        return [models["rows"](torch.arange(9)).detach(), *values(models["head"])]

    def head() -> nn.Module:
        return seeded(nn.Linear(4, 2))

    alone = {"rows": nn.Embedding(9, 4), "head": head()}
    nn.init.constant_(alone["rows"].weight, 0.5)
    rate = 0.3 if has_rule else 0.2
    expected = run(
        alone, {"rows": optim.SGD(alone["rows"].parameters(), lr=rate), "head": optim.Adam(alone["head"].parameters(), lr=0.01)}
    )

    def worker(ps: Any) -> Any:
        rule = psd_client.SGD(lr=0.3) if has_rule else None
        models = {"rows": psd.Embedding("rows", 4, init=psd_client.Constant(0.5), optimizer=rule), "head": head()}
        optimizers = {
            "rows": optim.SGD(models["rows"].parameters(), lr=0.2),
            "head": optim.Adam(models["head"].parameters(), lr=0.01),
        }
        return run(models, psd.distribute(models, optimizers, ps=ps), ps.rank, ps.world_size)

    for actual in run_workers(world_size, shards, worker):
        assert_close(actual, expected, 1e-5)


def test_a_rule_that_torch_does_not_have_updates_the_model_of_its_name_or_what_params_say(run_workers: Any) -> None:
    def worker(ps: Any) -> Any:
        models = gan()
        critic = models["critic"]
        optimizers = psd.distribute(
            models,
            {"generator": psd_client.Lion(lr=0.5), "critic": psd_client.FTRL(lr=0.25)},
            params={"critic": [critic[0].weight]},
            ps=ps,
        )
        before = values(models["generator"]), values(critic)
        for parameter in nn.ModuleDict(models).parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizers["critic"].step()
        optimizers["generator"].step()
        return [
            [not torch.equal(old, new) for old, new in zip(before[0], values(models["generator"]), strict=True)],
            [not torch.equal(old, new) for old, new in zip(before[1], values(critic), strict=True)],
            sorted(optimizers["generator"].param_groups[0].keys() & {"lr", "betas"}),
        ]

    assert run_workers(1, 1, worker) == [[[True] * 6, [True, False, False, False], ["betas", "lr"]]]


def test_a_schedule_of_one_of_them_counts_the_jobs_steps(run_workers: Any) -> None:
    """`every` says how many of these make one of its own."""

    def worker(ps: Any) -> Any:
        models = gan()
        optimizers = psd.distribute(models, rules(models), ps=ps)
        schedule = psd.scheduler(optim.lr_scheduler.ExponentialLR(optimizers["critic"], 0.5), every=3)
        train_gan(models, optimizers, ps.rank, ps.world_size)
        return ps.clock, schedule.get_last_lr()[0] / 0.003, optimizers["generator"].param_groups[0]["lr"]

    assert run_workers(2, 1, worker) == [(18, pytest.approx(0.5**6), 0.01)] * 2


def test_a_grad_scaler_serves_all_of_them(run_workers: Any) -> None:
    """An infinity in one's gradients skips that one's round, on all workers."""

    def worker(ps: Any) -> Any:
        model = ActorCritic()
        optimizers = psd.distribute(model, heads(model), ps=ps, nan_policy="skip")
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.zeros(()))
        before = values(model)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 8.0)
        if ps.rank == 1:
            model.actor[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizers["actor"])
        skipped = [ps.is_skipped]
        scaler.step(optimizers["critic"])
        skipped.append(ps.is_skipped)
        scaler.update()
        after = values(model)
        changed = [not torch.equal(old, new) for old, new in zip(before, after, strict=True)]
        return changed, skipped, scaler.get_scale(), ps.clock

    assert run_workers(2, 2, worker) == [([False] * 4 + [True] * 4, [True, False], 4.0, 2)] * 2


def test_a_worker_that_steps_another_than_the_round_is_told_and_may_step_that_one(run_workers: Any) -> None:
    """Whichever of the two comes second. (On two shards each may be first at one, and both are told.)"""

    def worker(ps: Any) -> tuple[str, list[Any]]:
        models = gan()
        optimizers = psd.distribute(models, rules(models), ps=ps)
        for parameter in nn.ModuleDict(models).parameters():
            parameter.grad = torch.ones_like(parameter)
        mine, other = ("critic", "generator") if ps.rank == 0 else ("generator", "critic")
        told = ""
        try:
            optimizers[mine].step()
        except PartsDisagree as error:
            told = str(error)
            optimizers[other].step()
        return told, values(nn.ModuleDict(models))

    (first, ours), (second, theirs) = run_workers(2, 1, worker)

    assert sorted([bool(first), bool(second)]) == [False, True]
    assert "steps part 1" in first + second
    assert "steps part 2" in first + second
    assert_close(ours, theirs, 0.0)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda m, o, k: k.update(overlap=True), InvalidRequest, "overlap: not with several optimizers"),
        (lambda m, o, k: o.update(third=o["critic"]), InvalidRequest, "one is given under two names"),
        (
            lambda m, o, k: o.update(third=optim.SGD(m["critic"][0].parameters(), lr=1)),
            InvalidRequest,
            r"a parameter of shape \(16, 6\) is in two, 'critic' and 'third'",
        ),
        (lambda m, o, k: o.update({"a.b": o.pop("critic")}), InvalidRequest, "optimizer: names must be words .* got 'a.b'"),
        (lambda m, o, k: o.clear(), InvalidRequest, "optimizer: there is none"),
        (lambda m, o, k: m.update(critic=3), TypeError, r"model\['critic'\]: expected a torch.nn.Module, got 3"),
        (
            lambda m, o, k: k.update(params={"other": []}),
            InvalidRequest,
            "no optimizer is named 'other'; there are generator, cri",
        ),
        (lambda m, o, k: k.update(params={"critic": []}), TypeError, r"params\['critic'\]: torch's optimizers have theirs"),
        (lambda m, o, k: k.update(params=[]), TypeError, "params: expected the parameters of each optimizer, by its name"),
        (lambda m, o, k: o.update(third=psd_client.Lion(lr=1)), InvalidRequest, r"params\['third'\]: is missing: no model is"),
        (lambda m, o, k: m["critic"].requires_grad_(False), InvalidRequest, "optimizer 'critic': none of its parameters"),
        (
            lambda m, o, k: m.update(rows=psd.Embedding("rows", 4, optimizer=psd_client.SGD(lr=1))),
            InvalidRequest,
            "embedding 'rows': is in none of the optimizers",
        ),
    ],
)
def test_what_cannot_be_declared_together_is_refused_by_name(change: Any, error: Any, text: str) -> None:
    """Before a connection is made."""
    models: dict[str, Any] = gan()
    optimizers, keywords = rules(models), {}
    change(models, optimizers, keywords)

    with pytest.raises(error, match=text):
        psd.distribute(models, optimizers, servers="127.0.0.1:1", **keywords)


@pytest.mark.parametrize("loaded", [("generator", "critic"), ("critic",)], ids=str)
def test_slots_that_are_loaded_into_one_of_several_go_on_as_in_one_process(run_workers: Any, loaded: tuple[str, ...]) -> None:
    """The moments of those that are not loaded begin as ever."""
    alone = gan()
    given = rules(alone)
    train_gan(alone, given)
    parameters = {name: copy.deepcopy(model.state_dict()) for name, model in alone.items()}
    states = {name: copy.deepcopy(given[name].state_dict()) for name in loaded}
    following = rules(alone) | {name: given[name] for name in loaded}
    expected = train_gan(alone, following)

    def worker(ps: Any) -> Any:
        models = gan()
        for name, model in models.items():
            model.load_state_dict(parameters[name])
        optimizers = psd.distribute(models, rules(models), ps=ps)
        for name, state in states.items():
            optimizers[name].load_state_dict(copy.deepcopy(state))
        return train_gan(models, optimizers, ps.rank, ps.world_size)

    for actual in run_workers(2, 2, worker):
        assert_close(actual, expected, 1e-4)


def test_slots_that_are_loaded_amid_a_job_leave_those_of_other_parts_and_of_rows(run_workers: Any) -> None:
    """A parameter that the state does not have begins anew, in the part that is loaded alone."""

    def worker(ps: Any) -> None:
        models = {**gan(), "critic": nn.Sequential(psd.Embedding("word", 6, psd_client.Adagrad(lr=0.1)), nn.Linear(6, 1))}
        rule = {name: optim.Adam(model.parameters(), lr=0.01) for name, model in models.items()}
        optimizers = psd.distribute(models, rule, ps=ps)

        def step(name: str, x: Any) -> None:
            optimizers[name].zero_grad()
            models[name](x).square().mean().backward()
            optimizers[name].step()

        ids = torch.arange(5)
        for turn in range(3):
            step("generator", drawn(turn, (8, 4), ps.rank, 2))
            step("critic", ids)
        kept, own = (optimizers[name].state_dict(slots=True) for name in ("generator", "critic"))
        assert len(own["state"]) == 2
        clock, (lost, _) = ps.clock, own["state"].popitem()
        optimizers["critic"].load_state_dict(own)
        after = {name: optimizer.state_dict(slots=True)["state"] for name, optimizer in optimizers.items()}
        assert ps.clock == clock
        assert lost not in after["critic"]
        for found, expected in ((after["generator"], kept["state"]), (after["critic"], own["state"])):
            assert found.keys() == expected.keys()
            for number, slots in expected.items():
                for name, value in slots.items():
                    assert torch.equal(torch.as_tensor(found[number][name]), torch.as_tensor(value))
        before = models["critic"][0](ids).detach().clone()
        step("critic", ids)
        moved = (models["critic"][0](ids).detach() - before).abs().max()
        assert moved < 0.09, "the first step of Adagrad is lr"

    run_workers(2, 2, worker)


@pytest.mark.parametrize(("world_size", "options"), [(2, {}), (1, {"consistency": "async"})], ids=str)
def test_clip_norm_clips_each_step_by_the_norm_of_its_own_part(run_workers: Any, world_size: int, options: Any) -> None:
    """The gradients that wait in the other part are no part of it."""

    def train(model: ActorCritic, optimizers: Any, rank: int, of: int, *, clips: bool) -> list[Any]:
        for step in range(STEPS):
            x = drawn(step, (8, 5), rank, of)
            (model.critic(x).square().mean() - 3 * F.log_softmax(model.actor(x), 1)[:, 0].mean()).backward()
            for name, part in (("actor", model.actor), ("critic", model.critic)):
                if clips:
                    nn.utils.clip_grad_norm_(part.parameters(), 0.05)
                optimizers[name].step()
            for optimizer in optimizers.values():
                optimizer.zero_grad()
        return values(model)

    def with_sgd(model: ActorCritic) -> dict[str, optim.Optimizer]:
        return {name: optim.SGD(part.parameters(), lr=1.0) for name, part in model.named_children()}

    alone, unclipped = ActorCritic(), ActorCritic()
    expected = train(alone, with_sgd(alone), 0, 1, clips=True)
    train(unclipped, with_sgd(unclipped), 0, 1, clips=False)
    assert not torch.allclose(expected[0], values(unclipped)[0], rtol=0.1)

    def worker(ps: Any) -> Any:
        model = ActorCritic()
        optimizers = psd.distribute(model, with_sgd(model), ps=ps, clip_norm=0.05, **options)
        return train(model, optimizers, ps.rank, ps.world_size, clips=False)

    for actual in run_workers(world_size, 2, worker):
        assert_close(actual, expected, 1e-5)


def test_the_slots_of_one_of_several_are_fetched_as_its_own(run_workers: Any) -> None:
    """In the form of torch's optimizer, which goes on with them."""
    alone = gan()
    given = rules(alone)
    train_gan(alone, given)

    def worker(ps: Any) -> Any:
        models = gan()
        optimizers = psd.distribute(models, rules(models), ps=ps)
        train_gan(models, optimizers)
        found = {}
        for name, optimizer in optimizers.items():
            again = rules(models)[name]
            again.load_state_dict(optimizer.state_dict(slots=True))
            found[name] = again.state_dict()["state"]
        return found

    (found,) = run_workers(1, 2, worker)

    for name, optimizer in given.items():
        expected = optimizer.state_dict()["state"]
        assert found[name].keys() == expected.keys()
        for number, slots in expected.items():
            assert found[name][number].keys() >= {slot for slot in slots if slot != "step"}
            for slot, value in slots.items():
                torch.testing.assert_close(torch.as_tensor(found[name][number][slot]), value, rtol=1e-4, atol=1e-6)
