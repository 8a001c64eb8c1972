"""The name of a run that nobody has named: shard 0 makes it, and it binds nobody before the job has begun."""

from __future__ import annotations

from typing import Any

import pytest
from shard_driver import Driver, Seat, job_spec

from psd.contract.errors import ForeignRun, ShardRestarted, StateLost


class World:
    """Two shards of an unnamed run, which workers join one after the other."""

    def __init__(self, **config: Any) -> None:
        self.shards = [Driver(job_spec(2, blocks=2), shard=index, shards=2, **config) for index in range(2)]

    def join(self, rank: int, run_id: str = "") -> list[Seat]:
        first = self.shards[0].join(rank, run_id=run_id)
        return [first, self.shards[1].join(rank, session=first.session, run_id=first.caller.run_id)]

    def restart_shard_0(self) -> None:
        """Without what it held."""
        self.shards[0].time.value += 1
        self.shards[0].restart()

    @property
    def run_ids(self) -> list[str]:
        return [driver.core.run_id for driver in self.shards]


def test_when_shard_zero_dies_before_the_job_has_begun_then_all_meet_under_its_new_name():
    """Its next life knows no name. A worker that it has not seen comes first, and gets another than the other shard knows."""
    world = World()
    early = world.join(0)
    world.restart_shard_0()
    late = world.join(1)

    with pytest.raises(ShardRestarted):
        world.shards[0].heartbeat(early[0])
    with pytest.raises(StateLost):
        world.shards[0].resume(early[0])
    again = world.join(0, early[0].caller.run_id)

    assert world.run_ids[0] == world.run_ids[1] > early[0].caller.run_id
    for driver, *seats in zip(world.shards, again, late, strict=True):
        for seat in seats:
            driver.heartbeat(seat)
            driver.declare(seat)


def test_when_a_worker_comes_late_with_the_name_of_before_then_the_new_one_stays():
    """Its call at the other shard does not turn the name back for those who know the new one."""
    world = World()
    first = world.shards[0].join(0)
    world.restart_shard_0()
    late = world.join(1)

    world.shards[1].join(0, session=first.session, run_id=first.caller.run_id)

    assert world.run_ids[0] == world.run_ids[1] == late[0].caller.run_id > first.caller.run_id


def test_when_values_were_set_but_not_read_then_the_name_may_still_change():
    """Shard 0 is initialized last: it has died before, and nobody can have built on what the other shard has."""
    world = World()
    early = world.join(0)
    world.shards[1].declare(early[1])
    assert world.shards[1].initialize(early[1], 1.0)
    world.restart_shard_0()

    late = world.join(1)
    world.shards[1].declare(late[1])

    assert world.shards[1].initialize(late[1], 2.0, choice=2)
    assert world.shards[1].values(1) == [2.0] * 3


def test_when_the_job_has_begun_then_another_name_is_foreign():
    """A shard 0 without its memory cannot take the others along."""
    world = World()
    (seat,) = world.join(0)[1:]
    world.shards[1].declare(seat)
    world.shards[1].initialize(seat, 1.0)
    world.shards[1].pull(seat, 0)
    world.restart_shard_0()

    with pytest.raises(ForeignRun, match=f"serves run '{seat.caller.run_id}'"):
        world.join(0)


@pytest.mark.parametrize("named", ["the shards'", "the worker's"])
def test_a_name_that_was_given_binds_at_once(named):
    """By --run-id, or by the first worker."""
    world = World(run_id="mine" if named == "the shards'" else "")
    world.join(0, "mine")

    for driver in world.shards:
        for other in ("other", "run-" + "f" * 16):
            with pytest.raises(ForeignRun, match="serves run 'mine'"):
                driver.join(1, session=driver.config.shard_index, run_id=other)
