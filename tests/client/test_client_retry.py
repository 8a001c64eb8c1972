"""Retries: what is sent again, when, and for how long; with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from psd.contract.errors import Draining, InvalidRequest, Overloaded, PsdError, SessionFenced, ShardUnavailable
from psd_client.lanes.shards import BACKOFF_MAX_S, Operation, RetryPolicy
from psd_client.lanes.waiting import ShardHealth


class World:
    """A clock that only sleeping and working move, and an attempt that fails for some time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []
        self.attempts = 0

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def failing(self, error: PsdError, times: int, lasts_s: float = 0.0) -> Callable[[], str]:
        def attempt() -> str:
            self.attempts += 1
            if self.attempts <= times:
                self.now += lasts_s
                raise error
            return "done"

        return attempt

    def run(self, attempt: Callable[[], str], timeout_s: float = 30.0, uniform: float = 1.0) -> str:
        policy = RetryPolicy(timeout_s, clock=lambda: self.now, uniform=lambda: uniform)
        operation = Operation(lambda lane, call: attempt(), 1000, policy, ShardHealth([""] * 4))
        operation.scope.sleep = self.sleep  # type: ignore[method-assign]
        lane: Any = SimpleNamespace(shard=3, address="10.0.0.1:7000")
        return operation.at(lane)


@pytest.mark.parametrize("error", [ShardUnavailable("x"), Overloaded("x"), Draining("x")])
def test_run_when_the_failure_is_transient_then_sends_again(error: PsdError) -> None:
    """A shard that cannot answer now is asked again."""
    world = World()

    assert world.run(world.failing(error, times=3)) == "done"

    assert world.attempts == 4


@pytest.mark.parametrize("error", [InvalidRequest("x"), SessionFenced("x"), PsdError("x")])
def test_run_when_the_shard_refused_then_raises_at_once(error: PsdError) -> None:
    """What the same call would meet again is not retried."""
    world = World()

    with pytest.raises(type(error)):
        world.run(world.failing(error, times=1))

    assert world.attempts == 1


def test_run_when_failing_on_then_pauses_grow_to_a_limit() -> None:
    """Exponential, and never longer than the maximum."""
    world = World()

    world.run(world.failing(ShardUnavailable("x"), times=9))

    assert world.pauses == [0.05, 0.1, 0.2, 0.4, *[BACKOFF_MAX_S] * 5]


def test_run_when_jittered_then_pauses_lie_below_the_exponential() -> None:
    """Full jitter: a random share of the pause, so that workers do not come back all at once."""
    world = World()

    world.run(world.failing(ShardUnavailable("x"), times=3), uniform=0.5)

    assert world.pauses == [0.025, 0.05, 0.1]


def test_run_when_the_timeout_has_passed_then_names_shard_and_address() -> None:
    """The error says which shard, where, for how long, and what it last said."""
    world = World()

    with pytest.raises(ShardUnavailable, match=r"shard 3 at 10\.0\.0\.1:7000 .* refused") as caught:
        world.run(world.failing(ShardUnavailable("connection refused"), times=1000), timeout_s=10)

    assert caught.value.detail == {"shard": 3, "address": "10.0.0.1:7000"}
    assert sum(world.pauses) <= 10


def test_run_when_the_timeout_is_zero_then_does_not_send_again() -> None:
    """A retry timeout of 0 switches retries off."""
    world = World()

    with pytest.raises(ShardUnavailable):
        world.run(world.failing(ShardUnavailable("x"), times=1), timeout_s=0)

    assert world.pauses == []


def test_run_when_jitter_is_tiny_and_the_outage_long_then_does_not_overflow() -> None:
    """Story: 2**failures became too large for a float after a thousand quick failures."""
    world = World()

    assert world.run(world.failing(ShardUnavailable("x"), times=2000), uniform=1e-9) == "done"


def test_run_when_attempts_were_served_for_long_then_each_failure_is_a_new_outage() -> None:
    """A pull that waits for minutes may lose its connection several times: the shard was there in between."""
    world = World()

    assert world.run(world.failing(ShardUnavailable("x"), times=5, lasts_s=60)) == "done"
