"""A whole job on several shards, without gRPC: trained, stored as a checkpoint, and restored as another one.

Worker r's gradient is r + 1 everywhere and the rule is plain SGD with a rate of 1, so that what must have been applied can be
read off the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from shard_driver import Driver, Seat, job_spec

from psd.checkpoint import CheckpointDirectory, Cut
from psd.contract.jobspec import JobSpec
from psd.v1 import control_pb2

MODES = ("sync", "exact", "async", "ssp:1")
STEP = 3
"""At which jobs are stored: steps that the slowest worker has finished."""

SIZE = 3000
"""Elements of each of two tensors: of a length that every number of shards cuts differently."""


def spec_of(mode: str, world_size: int) -> JobSpec:
    exact = mode == "exact"
    return job_spec(
        world_size, blocks=2, size=SIZE, mode="sync" if exact else mode, aggregation="exact" if exact else "fast", quorum=0
    )


@dataclass
class Cluster:
    """The shards of one job, and its workers' seats on each: seats[rank][shard]."""

    mode: str
    drivers: list[Driver]
    seats: list[list[Seat]]

    @property
    def has_rounds(self) -> bool:
        return self.drivers[0].core.declared().policy.has_rounds

    def blocks(self) -> Iterator[tuple[Driver, Any]]:
        for driver in self.drivers:
            for block in driver.core.declared().blocks.values():
                yield driver, block

    def parameters(self) -> list[NDArray[Any]]:
        """Of each space, whole."""
        found = [np.full(SIZE, np.nan) for _ in range(2)]
        for _, block in self.blocks():
            found[block.plan.space][block.plan.offset : block.plan.offset + block.plan.length] = block._page.parameter
        return found

    def versions(self) -> set[int]:
        return {block.version for _, block in self.blocks()}

    def steps(self) -> dict[int, list[int]]:
        """By block, the updates that each segment has seen."""
        return {block.plan.index: block._page.steps.tolist() for _, block in self.blocks()}

    def clocks(self) -> set[int]:
        return {worker.clock for driver in self.drivers for worker in driver.core.members.workers}

    def push(self, rank: int, clock: int) -> list[Any]:
        """One worker's push to all shards; what they answer. With exact aggregation, not committed."""
        return [driver.push(self.seats[rank][driver.config.shard_index], clock, rank + 1.0) for driver in self.drivers]

    def close_round(self, clock: int) -> None:
        """Exact aggregation: commit for everybody, and tell all shards the decision."""
        for seats in self.seats:
            self.drivers[0].shard.settlement.commit(control_pb2.CommitRequest(caller=seats[0].caller, clock=clock))
        everybody = (1 << len(self.seats)) - 1
        for driver in self.drivers[1:]:
            driver.core.declared().participant.follow([(clock, everybody)])

    def train(self, clock: int) -> list[Any]:
        """One step of every worker; the shards' answers."""
        replies = [reply for rank in range(len(self.seats)) for reply in self.push(rank, clock)]
        if self.mode == "exact":
            self.close_round(clock)
        return replies

    @property
    def update(self) -> float:
        """By how much a step of all workers changes the parameters."""
        gradients = [rank + 1.0 for rank in range(len(self.seats))]
        return -sum(gradients) / (len(gradients) if self.has_rounds else 1)


def enter(mode: str, drivers: list[Driver]) -> Cluster:
    """Join everybody everywhere, as the client does: shard 0 first, which issues the sessions."""
    world_size = drivers[0].spec.world_size
    cluster = Cluster(mode, drivers, [])
    for rank in range(world_size):
        first = drivers[0].join(rank)
        others = [driver.join(rank, session=first.session, run_id=first.caller.run_id) for driver in drivers[1:]]
        cluster.seats.append([first, *others])
    return cluster


def drivers_of(mode: str, workers: int, shards: int, **config: Any) -> list[Driver]:
    return [Driver(spec_of(mode, workers), shard=shard, shards=shards, run_id="mine", **config) for shard in range(shards)]


def trained(mode: str, workers: int, shards: int, ahead_s: float = 0.0) -> Cluster:
    """A job at STEP. Without rounds: worker 1 is a step ahead, and worker 0's next push has come to the first block only.

    ahead_s: by which its machines' clocks are ahead of those of the clusters that restore it.
    """
    drivers = drivers_of(mode, workers, shards)
    for driver in drivers:
        driver.time.value += ahead_s
    cluster = enter(mode, drivers)
    for seats in cluster.seats:
        for driver, seat in zip(cluster.drivers, seats, strict=True):
            driver.declare(seat)
    for driver, seat in zip(cluster.drivers, cluster.seats[0], strict=True):
        assert driver.initialize(seat, 5.0)
    for clock in range(STEP):
        cluster.train(clock)
    if not cluster.has_rounds:
        if workers > 1:
            cluster.push(1, STEP)
        half = cluster.drivers[0].begin_push(cluster.seats[0][0], STEP)
        cluster.drivers[0].push_block(half, 0, 1.0)
        assert len(cluster.versions()) > 1
    return cluster


def store(cluster: Cluster, directory: CheckpointDirectory, cut_id: str = "a1") -> str:
    """Write all shards' parts as they are; the checkpoint's name."""
    for driver in cluster.drivers:
        cut = Cut(cut_id, STEP, 0, driver.core.run_id, 5.0, driver.core.declared().layout)
        driver.write_part(directory, cut)
    assert directory.complete(cut)
    return cut.name


def begun(directory: CheckpointDirectory, name: str, mode: str, workers: int, shards: int, **config: Any) -> list[Driver]:
    """New shards, for another kind of job, on the timeline that begins with the checkpoint. Nobody has declared it yet."""
    drivers = drivers_of(mode, workers, shards, directory=directory, **config)
    enter(mode, drivers)  # finds them tentative
    for driver in drivers:
        driver.rollback(name, 1)
    return drivers


def restored(directory: CheckpointDirectory, name: str, mode: str, workers: int, shards: int) -> Cluster:
    """What a new cluster makes of the checkpoint once all workers have declared the job anew, one after the other."""
    drivers = begun(directory, name, mode, workers, shards)
    cluster = enter(mode, drivers)
    for seats in cluster.seats:
        for driver, seat in zip(drivers, seats, strict=True):
            driver.heartbeat(seat, clock=max(s.clock for s in seats))  # what the client's other thread does meanwhile
            reply, ticket = driver.declare(seat)
            assert (reply.initialized, ticket) == (True, None)
            seat.clock = reply.clock
    return cluster
