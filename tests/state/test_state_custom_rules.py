"""A user's own rule on a shard: what it is given, that its failure changes nothing, and that nobody waits in vain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from shard_driver import Driver, tables_spec

from psd.contract.config import ConfigError
from psd.contract.consistency import Consistency
from psd.contract.errors import InvalidRequest, RuleFailed
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.state.tickets import Ticket

calls: list[dict[str, Any]] = []
failing: list[BaseException] = []


class Leaky:
    """Keeps a sum of the gradients; fails, when told to, after it has written everywhere."""

    slots = {"total": 0.25}
    hyper = {"lr": 1.0}

    def apply(self, param: Any, grad: Any, slots: Any, hyper: Any) -> Any:
        calls.append({"size": len(param), "grad": grad.tolist(), **hyper})
        slots["total"] += grad
        param -= hyper["lr"] * slots["total"]
        if failing:
            raise failing[0]


class Returning(Leaky):
    def apply(self, param: Any, grad: Any, slots: Any, hyper: Any) -> Any:
        return param - grad


class Greedy(Leaky):
    def apply(self, param: Any, grad: Any, slots: Any, hyper: Any) -> Any:
        grad *= 2


PATH = f"{__name__}:Leaky"


@pytest.fixture(autouse=True)
def _forget() -> None:
    calls.clear()
    failing.clear()


def spec_of(path=PATH, *, workers=2, mode="sync", aggregation="fast", tensors=(3,), **group) -> JobSpec:
    return JobSpec(
        workers,
        tuple(TensorSpec(f"t{i}", (size,), "float64") for i, size in enumerate(tensors)),
        (GroupSpec(path, (), (0.25,), ("total",), ("lr",), **group),),
        Consistency.parse(mode),
        aggregation=aggregation,
    )


def driver_of(spec=None, **config) -> Driver:
    spec = spec or spec_of()
    return Driver(spec, rules=(spec.groups[0].rule,), **config)


LR = {"scalars": (1.0,)}


def test_a_round_is_reduced_before_the_rule_sees_it():
    """The weighted mean, with the number of the update; slots begin as the class says."""
    driver = driver_of()
    a, b = driver.start()

    driver.push(a, 0, 4.0, weight=1, **LR)
    driver.push(b, 0, 8.0, weight=3, **LR)

    assert calls == [{"size": 3, "grad": [7.0] * 3, "lr": 1.0, "step": 1, "age": 0}]
    assert driver.values() == [-7.25] * 3


def test_neighbours_at_the_same_step_are_one_run_and_untouched_tensors_none():
    """Four tensors in one block: the second has no gradient in the first update, and is at another step in the second."""
    driver = driver_of(spec_of(mode="async", tensors=(1, 2, 3, 4)))
    a, _ = driver.start()

    push = driver.begin_push(a, 0, **LR)
    driver.push_block(push, 0, [1.0, 0, 0, 1, 1, 1, 1, 1, 1, 1], present=bytes([0b1101]))
    driver.shard.exchange.end_push(push)
    driver.push(a, 1, 1.0, **LR)

    assert [(call["size"], call["step"]) for call in calls] == [(1, 1), (7, 1), (1, 2), (2, 1), (7, 2)]
    assert driver.values() == [-3.5, -1.25, -1.25, *[-3.5] * 7]


@pytest.mark.parametrize("mode", ["async", "ssp:3"])
def test_without_rounds_the_rule_knows_the_age(mode):
    """How many updates the block has seen since the worker read it."""
    driver = driver_of(spec_of(mode=mode))
    a, b = driver.start()

    driver.push(a, 0, 1.0, versions=[0], **LR)
    driver.push(a, 1, 1.0, versions=[1], **LR)
    driver.push(b, 0, 1.0, versions=[0], **LR)

    assert [call["age"] for call in calls] == [0, 0, 2]


@pytest.mark.parametrize("error", [ValueError("nope"), SystemExit(3), MemoryError()])
def test_async_when_the_rule_raises_then_the_block_is_as_it_was(error):
    """Parameters, slots, version, dedup window: the rule had written to a page that is given up. The push may come again."""
    driver = driver_of(spec_of(mode="async"))
    a, _ = driver.start()
    driver.push(a, 0, 1.0, **LR)
    before = driver.fingerprint()
    failing.append(error)

    with pytest.raises(
        RuleFailed, match=rf"rule '{PATH}' failed in tensor 't0' at version 1, .*{type(error).__name__}"
    ) as raised:
        driver.push(a, 1, 1.0, **LR)

    assert raised.value.detail == {"rule": PATH, "tensor": "t0", "version": 1}
    assert driver.fingerprint(but=0)[0] == before[0]
    failing.clear()
    assert driver.push(a, 1, 1.0, **LR).blocks_counted == 1
    assert driver.values() == [-3.5] * 3


@pytest.mark.parametrize("aggregation", ["fast", "exact"])
def test_sync_when_the_rule_raises_then_all_who_wait_are_told(aggregation):
    """Those who wait already, those who come later, and whoever completed the round. Nobody waits until the deadline."""
    driver = driver_of(spec_of(aggregation=aggregation))
    a, b = driver.start()
    failing.append(ValueError("nope"))
    driver.push(a, 0, 1.0, **LR)
    waiting = driver.pull(a, 1)[0]
    assert isinstance(waiting, Ticket)

    if aggregation == "exact":
        driver.push(b, 0, 1.0, **LR)
        driver.core.job.participant.follow([(0, 0b11)])
    else:
        with pytest.raises(RuleFailed):
            driver.push(b, 0, 1.0, **LR)

    later = driver.pull(b, 1)[0]
    for ticket in (waiting, later):
        assert isinstance(ticket.future.exception(timeout=0), RuleFailed)
    assert driver.version() == 0
    assert driver.values() == [0.0] * 3


def test_sync_when_the_failure_was_passing_then_the_round_closes_with_each_gradient_once():
    """The worker that sends again tries again."""
    driver = driver_of()
    a, b = driver.start()
    driver.push(a, 0, 1.0, **LR)
    failing.append(MemoryError())
    with pytest.raises(RuleFailed):
        driver.push(b, 0, 3.0, **LR)
    failing.clear()

    driver.push(a, 0, 1.0, **LR)
    driver.push(b, 0, 3.0, **LR)

    assert driver.values() == [-2.25] * 3
    assert driver.pull(a, 1)[0].tolist() == [-2.25] * 3


def test_a_worker_can_leave_or_expire_although_the_rule_fails():
    """Its end completes the round, whose rule raises: that is nothing to the one that ends, nor to the clock of the leases."""
    driver = driver_of(spec_of(workers=3))
    a, b, c = driver.start()
    failing.append(ValueError("nope"))
    driver.push(a, 0, 1.0, **LR)
    waiting = driver.pull(a, 1)[0]

    driver.leave(b)
    driver.expire(c, keep=[a])

    assert isinstance(waiting.future.exception(timeout=0), RuleFailed)
    assert driver.version() == 0


def test_a_rule_that_returns_something_has_not_understood():
    """Else its update would be lost in silence."""
    driver = driver_of(spec_of(f"{__name__}:Returning", mode="async"))
    a, _ = driver.start()

    with pytest.raises(RuleFailed, match="must update param and slots in place and return None, got ndarray"):
        driver.push(a, 0, 1.0, **LR)


def test_a_rule_cannot_change_the_gradient():
    """It may be somebody else's memory."""
    driver = driver_of(spec_of(f"{__name__}:Greedy", mode="async"))
    a, _ = driver.start()

    with pytest.raises(RuleFailed, match=r"ValueError: .*read-only"):
        driver.push(a, 0, 1.0, **LR)


def test_a_rule_that_is_not_listed_is_refused_with_what_is():
    """Naming the rule, the flag and the list; nothing is made."""
    driver = Driver(spec_of(), rules=(f"{__name__}:Greedy",))
    seat = driver.join(0)

    with pytest.raises(
        InvalidRequest, match=rf"groups\[0\]\.rule: '{PATH}' is not listed.*--rule {PATH}\. Listed: {__name__}:Greedy"
    ):
        driver.declare(seat)

    assert driver.core.job is None


def test_a_rule_of_another_version_is_refused():
    """The worker's class has another slot than the shard's."""
    spec = spec_of()
    other = replace(spec, groups=(replace(spec.groups[0], slots=("sum",)),))
    driver = Driver(other, rules=(PATH,))

    with pytest.raises(InvalidRequest, match=r"has slots \{'total': 0.25\} .* but \{'sum': 0.25\} .*is its code the same"):
        driver.declare(driver.join(0))


def test_a_shard_that_is_started_again_without_the_rule_says_so(tmp_path):
    """It could not go on with what its state directory holds."""
    driver = driver_of(state_dir=str(tmp_path / "state"))
    driver.start()
    driver.kill()

    driver.config = replace(driver.config, rules=())
    with pytest.raises(ConfigError, match=f"--rule: .*holds a job that needs it: .*'{PATH}' is not listed"):
        driver._start()


def test_a_killed_shard_goes_on_with_slots_and_steps(tmp_path):
    """As with psd's own rules."""
    driver = driver_of(spec_of(workers=1), state_dir=str(tmp_path / "state"))
    (a,) = driver.start()
    driver.push(a, 0, 1.0, **LR)
    driver.restart(a)

    driver.push(a, 1, 1.0, **LR)

    assert calls[-1]["step"] == 2
    assert driver.values() == [-3.5] * 3


def test_a_reduced_gradient_has_the_bits_of_the_kernels():
    """Weights that do not divide: the same rounding, operation by operation, as psd_core.step_block."""
    rng = np.random.default_rng(3)
    values = [rng.standard_normal(3) for _ in range(3)]
    weights = [1.0, 3.0, 2.5]
    mine = Driver(spec_of(workers=3), rules=(PATH,))
    theirs = Driver(replace(spec_of(workers=3), groups=(GroupSpec("sgd"),)))

    for driver, header in ((mine, LR), (theirs, {})):
        for seat, value, weight in zip(driver.start(), values, weights, strict=True):
            driver.push(seat, 0, value, weight=weight, **header)

    gradient = np.array(calls[0]["grad"])
    assert (-gradient).tolist() == theirs.values()


def tables_driver(tmp_path, *, table=(), **fields) -> Driver:
    """Two tables of a user's own rule."""
    spec = tables_spec(table=table, **fields)
    return driver_of(replace(spec, groups=spec_of().groups), state_dir=str(tmp_path / "state"))


def test_rows_go_through_the_rule_in_batches_with_slots_of_their_own(tmp_path):
    """A round's mean, by (rows, dim); a killed shard goes on with the slots and the table's step."""
    driver = tables_driver(tmp_path)
    a, b = driver.start()

    driver.push_rows(a, 0, {0: ([7, 9, 7], [1.0, 4.0, 1.0])}, **LR)
    driver.push_rows(b, 0, {0: ([8], 6.0)}, weight=3.0, **LR)
    driver.restart(a, b)
    driver.push_rows(a, 1, {0: ([8, 8], 0.5)}, **LR)
    driver.push_rows(b, 1, {}, **LR)

    first, second = calls
    assert sorted(first["grad"]) == [[0.5] * 3, [1.0] * 3, [4.5] * 3]
    assert (second["size"], second["grad"], second["step"], second["age"]) == (1, [[0.5] * 3], 2, 0)
    assert driver.pull_rows(a, 2, 0, [7, 8, 9, 10]).tolist() == [[-0.75] * 3, [-4.75 - 5.25] * 3, [-1.25] * 3, [0.0] * 3]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_when_the_rule_raises_then_no_row_has_changed_and_the_push_may_come_again(tmp_path, mode):
    """All who wait are told, with the table's name; a later try counts each gradient once."""
    driver = tables_driver(tmp_path, mode=mode)
    a, b = driver.start()
    driver.push_rows(a, 0, {0: ([1], 1.0), 1: ([1], 1.0)}, **LR)
    waiting = driver.pull_rows(a, 1, 0, [1]) if mode == "sync" else None
    failing.append(ValueError("nope"))

    version = 0 if mode == "sync" else 1
    told = rf"rule '{PATH}' failed in table 's0' at version {version}, which stays as it is: ValueError: nope"
    for _ in range(2):
        if mode == "async":
            with pytest.raises(RuleFailed, match=told):
                driver.push_rows(b, 0, {0: ([1, 2], 3.0)}, **LR)
        else:
            driver.push_rows(b, 0, {0: ([1, 2], 3.0)}, **LR)
    if waiting is not None:
        for ticket in (waiting, driver.pull_rows(b, 1, 0, [1])):
            error = ticket.future.exception(timeout=0)
            assert isinstance(error, RuleFailed)
            assert error.detail == {"rule": PATH, "tensor": "s0", "version": 0}
        assert driver.rows(0, [1, 2]) == [0.0, 0.0]
    failing.clear()
    driver.push_rows(b, 0, {0: ([1, 2], 3.0)}, **LR)

    assert driver.rows(0, [1, 2]) == ([-2.25, -1.75] if mode == "sync" else [-1.25 - 4.25, -3.25])


def test_a_table_that_catches_up_takes_no_rule_of_ones_own():
    """Its steps with a gradient of zeros would be Python calls for each row and step."""
    with pytest.raises(InvalidRequest, match="table 's0': updates: must be lazy with a rule of your own, got 'catch_up'"):
        replace(tables_spec(table={"updates": "catch_up"}), groups=spec_of().groups)
