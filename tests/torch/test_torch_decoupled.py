"""Learners with a quorum, which wait for nobody: what counts, what comes late, and a replay of what has happened."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import assert_close  # noqa: E402
from learners import OUTER, SUM, Walker, adam, backward, merged, momentum_of, network, side_by_side  # noqa: E402
from torch import optim  # noqa: E402

import psd_client  # noqa: E402
import psd_client.torch as psd  # noqa: E402
from psd.contract.errors import InvalidRequest  # noqa: E402

BOTH = {"reduce": "sum", "quorum": 1}
"""Each difference that counts moves the job by as much as the learner has moved: what the job has is a count of steps."""


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """What the test opens; closed in the end."""
    with contextlib.ExitStack() as opened:
        yield opened


def walkers(servers: str, stack: Any, locals_: list[psd.Local], **options: Any) -> list[Walker]:
    world = len(locals_)
    connections = [psd_client.connect(servers, rank, world) for rank in range(world)]
    # One whose exchange waits for a quorum ends when the others have left.
    stack.callback(lambda: side_by_side(*(ps.close for ps in connections)))
    made: list[Walker] = side_by_side(
        *(
            lambda ps=ps, local=local: Walker(ps, local, **{**BOTH, **options})
            for ps, local in zip(connections, locals_, strict=True)
        )
    )
    return made


def account(walker: Walker) -> list[float]:
    """By fragment, what the learner has learned and no merge has counted."""
    optimizer = walker.optimizer
    return [float(optimizer._base[index][0] - walker.place[index]) for index in range(2)]


@pytest.mark.parametrize("slow_steps", [4, "auto:4"])
def test_every_step_of_a_learner_four_times_slower_counts_once(cluster: Any, stack: Any, slow_steps: int | str) -> None:
    """Fixed steps or not, of both fragments: what the job has, and what the learners still have, is what they have made."""
    local = psd.Local(steps=slow_steps, outer=SUM, fragments=2)
    fast, slow = walkers(cluster(2).servers, stack, [local, local])
    exchanges: list[Any] = []
    slow.optimizer.on_exchange = exchanges.append
    if slow_steps != 4:  # what it would find by its clock
        for walker, seconds in ((fast, 1.0), (slow, 4.0)):
            walker.optimizer._step_s.add = lambda _: None
            walker.optimizer._step_s.seconds = seconds

    for turn in range(64):
        fast.walk()
        if turn % 4 == 3:
            slow.walk()

    counted = [each for each in exchanges if each.is_counted]
    assert {each.fragment for each in counted} == {0, 1}
    assert len(counted) >= (4 if slow_steps == 4 else 8)
    left = [sum(each) for each in zip(account(fast), account(slow), strict=True)]
    fast.optimizer.pull()
    assert [-value + rest for value, rest in zip(fast.place, left, strict=True)] == [64 + 16, 64 + 16]


def test_a_late_difference_travels_with_the_next_one_and_weighs_both(cluster: Any, stack: Any) -> None:
    """A round closes between the learner's look at the clock and its push."""
    local = psd.Local(steps=2, outer=SUM)
    fast, slow = walkers(cluster(1).servers, stack, [local, local])
    exchanges: list[Any] = []
    slow.optimizer.on_exchange = exchanges.append
    slow.walk()
    chosen = slow.optimizer._next_clock

    def overtaken() -> int | None:
        clock = chosen()
        fast.walk(2)
        return clock

    slow.optimizer._next_clock = overtaken
    assert slow.walk() == [-4.0, -4.0], "its two steps, on top of the other's"
    slow.optimizer._next_clock = chosen
    assert slow.walk(2) == [-6.0, -6.0]

    late, next_ = exchanges
    assert (late.is_counted, next_.is_counted) == (False, True)
    assert next_.weight == 2 * late.weight, "of four steps with one token each"
    fast.optimizer.pull()
    assert fast.place == [-6.0, -6.0]


def test_a_learner_that_vanishes_and_comes_back_costs_the_others_nothing(cluster: Any, stack: Any) -> None:
    """It goes on at the job's last exchange; its step for the fragment that it had not exchanged is gone with it."""
    servers = cluster(2).servers
    local = psd.Local(steps=2, outer=SUM, fragments=2)
    fast, slow = walkers(servers, stack, [local, local])
    fast.walk(8)
    slow.walk(1)
    slow.optimizer.ps.close()
    fast.walk(8)

    with psd_client.connect(servers, 1, 2) as again:
        walker = Walker(again, local, **BOTH)
        assert walker.place == [-17.0, -15.0], (
            "all of one fragment; of the other neither the fast one's last step, nor the slow one's"
        )
        walker.walk(2)
        fast.walk(2)
        left = [sum(each) for each in zip(account(fast), account(walker), strict=True)]
        walker.optimizer.pull()
        assert [-value + rest for value, rest in zip(walker.place, left, strict=True)] == [16 + 1 + 2 + 2, 16 + 2 + 2]


def test_no_learner_waits_for_a_quorum_that_does_not_come(cluster: Any, stack: Any) -> None:
    """Two of three are needed, and one is there: it goes on, beyond the delay. What it learns meanwhile is not mixed away."""
    local = psd.Local(steps=2, outer=SUM, delay=1)
    first, second, third = walkers(cluster(1).servers, stack, [local] * 3, quorum=2)
    exchanges: list[Any] = []
    first.optimizer.on_exchange = exchanges.append
    until_departed(first)
    departed = first.optimizer.local_step
    assert first.walk(20) == [-departed - 20.0] * 2
    assert exchanges == []
    deadline = time.monotonic() + 100
    while not exchanges and time.monotonic() < deadline:
        second.walk()
        first.walk()

    (found, *_) = exchanges
    assert found.is_counted
    assert not found.is_mixed
    assert found.landed > departed + 20
    assert third.place == [0.0, 0.0]


def until_departed(walker: Walker) -> None:
    """Step until the first exchange has begun; the learner asks for the clock before, in the background."""
    while not walker.optimizer._flights:
        if walker.optimizer._look is not None:
            walker.optimizer._look.ended.wait()
        walker.walk()


@pytest.mark.parametrize(("step_s", "clocks"), [(1000.0, [0, 0]), (0.0, [0, 1])])
def test_a_round_waits_for_others_while_its_learners_have_time(
    cluster: Any, stack: Any, step_s: float, clocks: list[int]
) -> None:
    """With a quorum of one: steps of a quarter of an hour leave time for the other one; those of no time do not."""
    local = psd.Local(steps=4, outer=SUM, delay=3)
    exchanges: list[list[Any]] = [[], []]
    both = walkers(cluster(2).servers, stack, [local, local], grace="auto")
    for walker, seen in zip(both, exchanges, strict=True):
        walker.optimizer._step_s.add = lambda _: None
        walker.optimizer._step_s.seconds = step_s
        walker.optimizer.on_exchange = seen.append
    first, second = both
    until_departed(first)
    steps = first.optimizer.local_step
    if step_s == 0:
        first.optimizer._flights[0].ended.wait()
    first.walk(1)
    assert first.optimizer.local_step == steps + 1, "it goes on"

    until_departed(second)
    for walker in both:
        walker.optimizer._settle()

    assert [seen[0].clock for seen in exchanges] == clocks
    assert all(seen[0].is_counted for seen in exchanges)


@pytest.mark.parametrize(("merge", "delay"), [("mean", 2), ("rda", 2), ("heloco", 2), ("mean", 4), ("rda", 4)])
def test_a_recorded_schedule_replayed_in_one_process_gives_the_same_parameters(
    cluster: Any, stack: Any, merge: str, delay: int
) -> None:
    """Four learners of different speed, one of which comes late; in fragments, with a delay, in the background. With the longer
    ones two exchanges of a learner may be under way at once."""
    servers, world = cluster(2).servers, 4
    local = psd.Local(steps=6, outer=OUTER, fragments=3, delay=delay, merge=merge)
    recorded: list[list[Any]] = [[] for _ in range(world)]
    barrier = threading.Barrier(world)
    steps = [30, 30, 24, 8]

    def learn(rank: int) -> Any:
        with psd_client.connect(servers, rank, world) as ps:
            model = network()
            optimizer = psd.distribute(model, adam(model), local=local, ps=ps, quorum=2, grace=0.02)
            optimizer.on_exchange = recorded[rank].append
            barrier.wait()
            for step in range(1, steps[rank] + 1):
                backward(model, step, rank)
                optimizer.step(tokens=1 + rank)
                for flight in optimizer._flights if delay > 2 else ():  # so that the next one departs before it lands
                    flight.ended.wait(0.1)
            optimizer._settle()
            return [parameter.detach().clone() for parameter in model.parameters()]

    found = side_by_side(*(lambda rank=rank: learn(rank) for rank in range(world)))

    assert any(each.is_counted for records in recorded for each in records)
    for mine, right in zip(found, replayed(local, recorded, steps), strict=True):
        assert_close(mine, right, 1e-5)


def replayed(local: psd.Local, recorded: list[list[Any]], steps: list[int]) -> list[list[Any]]:
    """What each learner has, from what it has recorded, with torch's own SGD as the outer rule."""
    models = [network() for _ in recorded]
    inner = [adam(model) for model in models]
    parameters = [list(model.parameters()) for model in models]
    of_fragment = [
        [next(i for i, p in enumerate(parameters[0]) if p is one) for one in members]
        for members in local.split(models[0], parameters[0])
    ]
    job = [value.detach().clone().requires_grad_() for value in parameters[0]]
    outer = [
        optim.SGD([job[i] for i in members], lr=OUTER.lr, momentum=OUTER.momentum, nesterov=True) for members in of_fragment
    ]
    versions = [[value.detach().clone() for value in job]]  # as of each clock
    bases = [list(versions[0]) for _ in models]
    base_versions = [[0] * local.count for _ in models]
    pending: list[dict[int, tuple[Any, list[Any]]]] = [{} for _ in models]  # by clock: the record, and its difference
    at, departed, landed = [0] * len(models), [0] * len(models), [0] * len(models)  # steps, and of its records
    rounds: dict[int, set[int]] = {}
    for rank, each in enumerate(recorded):
        for record in each:
            if record.is_counted:
                rounds.setdefault(record.clock, set()).add(rank)

    def close(clock: int) -> bool:
        """The round, if all of its differences are taken."""
        members = sorted(rounds.get(clock, ()))
        if not members or not all(clock in pending[rank] for rank in members):
            return False
        fragment = clock % local.count
        weights = [pending[rank][clock][0].weight for rank in members]
        for place, i in enumerate(of_fragment[fragment]):
            differences = [pending[rank][clock][1][place] for rank in members]
            momentum = momentum_of(outer[fragment], job[i])
            job[i].grad = merged(local.merge if i else "mean", differences, weights, momentum)
        outer[fragment].step()
        versions.append([value.detach().clone() for value in job])
        return True

    def advance(rank: int) -> bool:
        """Make the learner's next step, and what it did after that; False if that needs rounds that are not closed yet."""
        model, records = models[rank], recorded[rank]
        if landed[rank] < departed[rank] and at[rank] == (record := records[landed[rank]]).landed:
            if max(record.versions) >= len(versions):
                return False
            differences = pending[rank][record.clock][1]
            for fragment, members in enumerate(of_fragment):
                is_own = fragment == record.fragment
                if not is_own and record.versions[fragment] == base_versions[rank][fragment]:
                    continue
                for place, i in enumerate(members):
                    value, own = versions[record.versions[fragment]][i], parameters[rank][i].data
                    if is_own and record.is_mixed:
                        own.copy_(local.share * own + (1 - local.share) * value)
                    else:
                        own.add_(value - bases[rank][i] + (differences[place] if is_own and record.is_counted else 0))
                    bases[rank][i] = value
                base_versions[rank][fragment] = record.versions[fragment]
            landed[rank] += 1
            return True
        if departed[rank] < len(records) and at[rank] == (record := records[departed[rank]]).departed:
            departed[rank] += 1
            members = of_fragment[record.fragment]
            pending[rank][record.clock] = record, [bases[rank][i] - parameters[rank][i].detach() for i in members]
            return True
        if at[rank] == steps[rank]:
            return False
        at[rank] += 1
        backward(model, at[rank], rank)
        inner[rank].step()
        return True

    while any(advance(rank) for rank in range(len(models))) or close(len(versions) - 1):
        pass
    assert at == steps
    assert landed == [len(records) for records in recorded]
    return [[value.detach() for value in each] for each in parameters]


def test_a_slower_learner_makes_fewer_steps_between_exchanges(cluster: Any, stack: Any) -> None:
    """By what all say of themselves, without rounds, too."""
    local = psd.Local(steps="auto:8", outer=SUM)
    fast, slow = walkers(cluster(1).servers, stack, [local, local], quorum=None, consistency="async")
    for walker, seconds in ((fast, 0.5), (slow, 2.0)):
        walker.optimizer._step_s.add = lambda _: None
        walker.optimizer._step_s.seconds = seconds
    fast.walk(8)
    exchanges: list[Any] = []
    slow.optimizer.on_exchange = exchanges.append

    slow.walk(8 + 2 + 2)

    assert [each.departed for each in exchanges] == [8, 10, 12]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"aggregation": "fast"}, r"aggregation: is fast, but with a quorum \(1 of 2\) a learner's difference must count as"),
        ({"grace": -1}, 'grace: must be seconds >= 0, or "auto", got -1'),
        ({"grace": "soon"}, "grace"),
        ({"grace": "auto", "quorum": None, "consistency": "async"}, "grace: is inf, but only rounds that shard 0 decides"),
    ],
)
def test_terms_that_do_not_go_together_are_refused(cluster: Any, options: dict[str, Any], words: str) -> None:
    with psd_client.connect(cluster(1).servers, 0, 2) as ps, pytest.raises((InvalidRequest, TypeError), match=words):
        Walker(ps, psd.Local(steps=2), **{**BOTH, **options})


@pytest.mark.parametrize("steps", ["auto:0", "auto:", "auto:x", "fast"])
def test_steps_that_are_no_number_are_refused(steps: str) -> None:
    with pytest.raises(InvalidRequest, match=r"local\.steps: must be"):
        psd.Local(steps=steps)
