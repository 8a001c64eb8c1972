"""Learners that make many steps of their own between exchanges: the numbers of a simulation in one process."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import assert_close, values  # noqa: E402
from learners import OUTER, SUM, Walker, adam, backward, constant, learned, merged, momentum_of, network  # noqa: E402
from torch import optim  # noqa: E402

import psd_client  # noqa: E402
import psd_client.torch as psd  # noqa: E402
from psd.contract.errors import InvalidRequest  # noqa: E402
from psd_client import ParameterServer  # noqa: E402


def simulated(local: psd.Local, learners: int, steps: int, tokens: Any = lambda step, rank: 1) -> list[list[Any]]:
    """What each learner has after these steps, in one process, with torch's own SGD as the outer rule."""
    models = [network() for _ in range(learners)]
    inner = [adam(model) for model in models]
    of_fragment = [
        [next(i for i, p in enumerate(models[0].parameters()) if p is one) for one in members]
        for members in local.split(models[0], list(models[0].parameters()))
    ]
    globals_ = [parameter.detach().clone().requires_grad_() for parameter in models[0].parameters()]
    outer = [
        optim.SGD([globals_[i] for i in members], lr=OUTER.lr, momentum=OUTER.momentum, nesterov=True)
        for members in of_fragment
    ]
    bases = [[value.detach().clone() for value in globals_] for _ in models]
    done = [[[0, 0.0] for _ in of_fragment] for _ in models]
    arriving: list[tuple[int, int]] = []
    exchange = 0

    def arrive(fragment: int) -> None:
        for rank, model in enumerate(models):
            for i in of_fragment[fragment]:
                own, received = list(model.parameters())[i], globals_[i].detach()
                own.data.copy_(local.share * own.detach() + (1 - local.share) * received)
                bases[rank][i] = received.clone()

    for step in range(1, steps + 1):
        for rank, model in enumerate(models):
            backward(model, step, rank)
            inner[rank].step()
            for counts in done[rank]:
                counts[0] += 1
                counts[1] += tokens(step, rank)
        for fragment in [fragment for at, fragment in arriving if at == step]:
            arrive(fragment)
        if step == local.step_of(exchange):
            fragment = exchange % local.count
            exchange += 1
            weights = [counts[fragment][1] ** 2 / counts[fragment][0] for counts in done]
            for i in of_fragment[fragment]:
                moved = [bases[rank][i] - list(model.parameters())[i].detach() for rank, model in enumerate(models)]
                momentum = momentum_of(outer[fragment], globals_[i])
                globals_[i].grad = merged(local.merge if i else "mean", moved, weights, momentum)  # the first is an embedding
            outer[fragment].step()
            for counts in done:
                counts[fragment] = [0, 0.0]
            arriving.append((step + local.delay, fragment))
            if not local.delay:
                arrive(fragment)
    return [values(model) for model in models]


CASES = {
    "diloco": psd.Local(steps=4, outer=OUTER),
    "fragments": psd.Local(steps=6, outer=OUTER, fragments=3),
    "strided": psd.Local(steps=5, outer=OUTER, fragments=2, pattern="strided"),
    "streaming": psd.Local(steps=6, outer=OUTER, fragments=3, delay=2),
    "mixed": psd.Local(steps=4, outer=OUTER, fragments=2, delay=1, alpha=0.25),
    "late": psd.Local(steps=4, outer=OUTER, delay=4, alpha=0.0),
    "two under way": psd.Local(steps=6, outer=OUTER, fragments=3, delay=3),
    "as many as can be": psd.Local(steps=5, outer=OUTER, fragments=2, delay=5, alpha=0.25),
    "directions": psd.Local(steps=4, outer=OUTER, merge="rda"),
    "streamed directions": psd.Local(steps=6, outer=OUTER, fragments=3, delay=2, merge="rda"),
    "directions under way": psd.Local(steps=6, outer=OUTER, fragments=3, delay=4, merge="rda"),
    "corrected": psd.Local(steps=2, outer=OUTER, merge="heloco"),
    "streamed corrected": psd.Local(steps=4, outer=OUTER, fragments=2, delay=2, merge="heloco"),
}


@pytest.mark.parametrize(("learners", "shards"), [(1, 2), (3, 2)])
@pytest.mark.parametrize(
    ("local", "aggregation"),
    [
        pytest.param(local, aggregation, id=f"{name}-{aggregation}")
        for name, local in CASES.items()
        for aggregation in ("fast", "exact")[local.merge != "mean" :]
    ],
)
def test_learners_have_the_numbers_of_a_simulation(
    run_workers: Any, local: psd.Local, learners: int, shards: int, aggregation: str
) -> None:
    """With unequal numbers of tokens, and an end in the midst of an interval."""

    def tokens(step: int, rank: int) -> int:
        return 1 + (step + rank) % 3

    expected = simulated(local, learners, 15, tokens)

    found = run_workers(learners, shards, lambda ps: learned(ps, local, 15, tokens, aggregation=aggregation))

    for mine, right in zip(found, expected, strict=True):
        assert_close(mine, right, 1e-5)


def test_a_step_and_a_plain_mean_are_synchronous_training(run_workers: Any) -> None:
    def synchronous(ps: Any) -> Any:
        model = network()
        optimizer = psd.distribute(model, optim.SGD(model.parameters(), lr=0.1), ps=ps)
        for step in range(1, 9):
            backward(model, step, ps.rank)
            optimizer.step()
        return values(model)

    def local(ps: Any) -> Any:
        model = network()
        options = psd.Local(steps=1, outer=psd_client.SGD(lr=1.0))
        optimizer = psd.distribute(model, optim.SGD(model.parameters(), lr=0.1), local=options, ps=ps)
        for step in range(1, 9):
            backward(model, step, ps.rank)
            optimizer.step()
        return values(model)

    for ours, theirs in zip(run_workers(2, 2, local), run_workers(2, 2, synchronous), strict=True):
        assert_close(ours, theirs, 1e-6)


def test_a_learner_that_is_started_again_goes_on_at_the_jobs_last_exchange(cluster: Any) -> None:
    """With its own optimizer's state, if the program has kept it, and its schedule at that step."""
    servers = cluster(1).servers
    local = psd.Local(steps=4, outer=SUM, fragments=2)
    with psd_client.connect(servers, 0, 1) as ps:
        walker = Walker(ps, local)
        walker.walk(7)
        state = copy.deepcopy(walker.optimizer.state_dict())
    assert state["local_step"] == 7

    with psd_client.connect(servers, 0, 1) as ps:
        walker = Walker(ps, local)
        schedule = psd.scheduler(optim.lr_scheduler.StepLR(walker.optimizer, 1, 0.5))
        assert walker.optimizer.local_step == 6
        assert walker.place == [-6.0, -4.0]
        assert schedule.get_last_lr() == [0.5**6]
        walker.optimizer.load_state_dict(state)
        assert walker.optimizer.local_step == 6


def test_pull_takes_the_jobs_parameters_and_drops_what_was_not_exchanged(cluster: Any) -> None:
    with psd_client.connect(cluster(1).servers, 0, 1) as ps:
        walker = Walker(ps, psd.Local(steps=4, outer=SUM))
        assert walker.walk(6) == [-6.0, -6.0]
        walker.optimizer.pull()
        assert walker.place == [-4.0, -4.0]
        assert walker.walk(2) == [-6.0, -6.0]
        walker.optimizer.pull()
        assert walker.place == [-6.0, -6.0]


def test_without_rounds_each_difference_is_applied_as_it_comes(cluster: Any) -> None:
    servers = cluster(2).servers
    local = psd.Local(steps=2, outer=SUM)
    with psd_client.connect(servers, 0, 2) as ps, psd_client.connect(servers, 1, 2) as peer:
        walkers: dict[int, Walker] = {}

        def begin(rank: int, connection: ParameterServer) -> None:
            walkers[rank] = Walker(connection, local, consistency="async")

        threads = [threading.Thread(target=begin, args=pair) for pair in enumerate((ps, peer))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert walkers[0].walk(2) == [-2.0, -2.0]
        assert walkers[1].walk(3) == [-5.0, -5.0]  # both learners' steps, and one more of its own
        assert walkers[0].walk(2) == [-6.0, -6.0]


def test_a_grad_scaler_skips_local_steps(cluster: Any) -> None:
    """An infinite gradient makes no step, and so no exchange; loss scaling stays the learner's own."""
    with psd_client.connect(cluster(1).servers, 0, 1) as ps:
        walker = Walker(ps, psd.Local(steps=1, outer=SUM))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))
        for gradient in (4.0, float("inf"), 2.0):
            for parameter in walker.model.parameters():
                parameter.grad = torch.full_like(parameter, gradient)
            scaler.step(walker.optimizer)
            scaler.update()

        assert walker.place == [-2.0, -2.0]
        assert (walker.optimizer.local_step, ps.clock, scaler.get_scale()) == (2, 2, 2.0)


def test_buffers_are_stored_and_are_there_for_a_learner_that_comes_later(cluster: Any) -> None:
    def model() -> Any:
        return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))

    servers = cluster(1).servers
    local = psd.Local(steps=2, outer=SUM)
    with psd_client.connect(servers, 0, 1) as ps:
        first = model()
        optimizer = psd.distribute(first, optim.SGD(first.parameters(), lr=0.1), local=local, ps=ps)
        for _ in range(4):
            first(torch.randn(8, 3)).sum().backward()
            optimizer.step()
    assert first[1].num_batches_tracked == 4

    with psd_client.connect(servers, 0, 1) as ps:
        second = model()
        psd.distribute(second, optim.SGD(second.parameters(), lr=0.1), local=local, ps=ps)
        assert second[1].num_batches_tracked == 4
        torch.testing.assert_close(second[1].running_mean, first[1].running_mean, rtol=0, atol=0)


def test_fragments_travel_one_at_a_time(cluster: Any) -> None:
    """An exchange of one of two equal fragments moves half of the bytes."""
    with psd_client.connect(cluster(1).servers, 0, 1) as ps:
        walker = Walker(ps, psd.Local(steps=4, outer=SUM, fragments=2))
        seen = []
        for _ in range(8):
            before = ps.stats()["sent_bytes"]
            walker.walk()
            seen.append(ps.stats()["sent_bytes"] - before)

        assert seen == [0, 16, 0, 16, 0, 16, 0, 16]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"steps": 0}, InvalidRequest, "local.steps: must be at least 1, got 0"),
        ({"steps": 2.5}, InvalidRequest, "local.steps"),
        ({"steps": 4, "fragments": 5}, InvalidRequest, r"local.fragments: must be 1 to steps \(4\), got 5"),
        ({"steps": 4, "delay": 5}, InvalidRequest, "local.delay: must be 0 to 4, .* and the next, got 5"),
        (
            {"steps": 8, "fragments": 4, "delay": 5},
            InvalidRequest,
            "local.delay: must be 0 to 4, .* next but one, got 5",
        ),
        ({"steps": 4, "alpha": 1.5}, InvalidRequest, "local.alpha: must be from 0 to 1, got 1.5"),
        ({"steps": 4, "pattern": "random"}, InvalidRequest, "local.pattern"),
        ({"steps": 4, "merge": "sum"}, InvalidRequest, 'local.merge: must be "mean", "rda" or "heloco"'),
        ({"steps": 4, "outer": "sgd"}, TypeError, "local.outer"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        psd.Local(**options)


def test_what_local_steps_do_not_go_with_is_refused() -> None:
    model = network()
    local = psd.Local(steps=4)
    for change, error, text in (
        ({"overlap": True}, InvalidRequest, "local: not with overlap"),
        ({"optimizer": psd_client.Lion()}, TypeError, "optimizer: expected one of torch's, which steps in this process"),
        ({"model": psd.Embedding("rows", 4)}, InvalidRequest, "embedding 'rows': its rows are on the shards"),
        ({"local": psd.Local(steps=9, fragments=9)}, InvalidRequest, "has no parameters to train; make fewer of them"),
        ({"local": psd.Local(steps=9, fragments=[[model[2]], [model[2]]])}, InvalidRequest, "'2.weight' is in an earlier one"),
        ({"local": psd.Local(steps=9, fragments=[[model[2]], [model[4]]])}, InvalidRequest, "'0.weight' is in none of them"),
    ):
        given: dict[str, Any] = {"model": model, "optimizer": adam(model), "local": local, "servers": "127.0.0.1:1"} | change
        if "model" in change:
            given["optimizer"] = optim.SGD(given["model"].parameters(), lr=1)
        with pytest.raises(error, match=text):
            psd.distribute(**given)


def test_the_given_optimizer_is_stepped_by_its_result_alone(cluster: Any) -> None:
    with psd_client.connect(cluster(1).servers, 0, 1) as ps:
        model = constant()
        given = optim.SGD(model.parameters(), lr=1.0)
        optimizer = psd.distribute(model, given, local=psd.Local(steps=2), ps=ps)
        with pytest.raises(InvalidRequest, match=r"SGD.step: .*step its result, which counts the local steps"):
            given.step()
        optimizer.step()
