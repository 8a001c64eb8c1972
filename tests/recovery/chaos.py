"""Disturbs a job while it trains, by a seed: kill -9 of shards that are started again, and faults of workers' connections.

Kills strike at random instants, on purpose: a test that passes for one instant only has found nothing. The seed is printed, and
makes the sequence of disturbances, though not their exact instants, the same again.
"""

from __future__ import annotations

import functools
import math
import operator
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from proxy import DIRECTIONS, Fault, Proxy
from shard_processes import ShardProcess, servers_of

from psd.checkpoint import CheckpointDirectory
from psd.contract.layout import Layout

WITH_CONNECTIONS = ("grpc", "tcp")
"""Transports whose data a proxy can cut."""

STEPS_BETWEEN_MAX = 3
AHEAD_MAX = 6
"""Steps that a job may make while what should strike after one of them has not, however fast it is."""
INSTANT_MAX_S = 0.03


def steps_for(kills: int, faults: int) -> int:
    """Steps of a job that is sure to last until everything has struck: three are left then, at least."""
    return STEPS_BETWEEN_MAX * (kills + faults) + AHEAD_MAX + 4


class Chaos:
    """Kills and faults in random order, each after a few more steps of the job.

    Args:
        proxies: one per shard, for all workers. directions: in which bulk data flows. workers: their number.

    Attributes:
        done: everything has struck.
    """

    def __init__(
        self,
        shards: Sequence[ShardProcess],
        proxies: Sequence[Proxy],
        *,
        seed: int,
        kills: int,
        faults: int,
        directions: Sequence[str] = DIRECTIONS,
        workers: int = 1,
    ) -> None:
        self.kills = 0
        self.done = threading.Event()
        self._shards = shards
        self._proxies = proxies
        self._directions = directions
        self._random = random.Random(seed)
        self._events = ["kill"] * kills + ["fault"] * faults
        self._random.shuffle(self._events)
        self._steps = threading.Semaphore(0)
        self._made = [0] * workers
        self._allowed: float = STEPS_BETWEEN_MAX + AHEAD_MAX
        self._may_go_on = threading.Condition()
        self._step_ends: list[float] = []
        print(f"chaos: seed {seed}, {self._events}")  # noqa: T201 - for whoever has to repeat a failure

    def on_step(self, rank: int = 0) -> None:
        """A worker has finished a step; it waits if it is too far ahead of what should have struck. Worker 0's steps count."""
        if rank == 0:
            self._step_ends.append(time.monotonic())
            self._steps.release()
        self._made[rank] += 1
        with self._may_go_on:
            may = self._may_go_on.wait_for(lambda: self._made[rank] <= self._allowed, 100)
        assert may, f"nothing has struck; {self.kills} kills so far"

    def _allow(self, steps: float) -> None:
        """So many more to each worker."""
        with self._may_go_on:
            self._allowed += steps
            self._may_go_on.notify_all()

    def run(self) -> None:
        """Returns when everything has struck, or raises."""
        try:
            self._run()
        finally:
            self._allow(math.inf)  # the job goes on undisturbed
            self.done.set()

    def _run(self) -> None:
        for event in self._events:
            for _ in range(self._random.randrange(1, STEPS_BETWEEN_MAX + 1)):
                assert self._steps.acquire(timeout=100), f"the job has stopped; {self.kills} kills so far"
            if event == "fault":
                self._random.choice(self._proxies).arm(Fault.drawn(self._random, self._directions))
                self._allow(STEPS_BETWEEN_MAX)
                continue
            threading.Event().wait(self._random.random() * self._instant_max_s())  # the instant itself is random
            shard = self._random.choice(self._shards)
            shard.kill()
            self._allow(STEPS_BETWEEN_MAX)
            shard.start()
            self.kills += 1
        self._allow(math.inf)  # only a step lets a fault strike
        for proxy in self._proxies:
            proxy.wait_until_all_fired(60)

    def _instant_max_s(self) -> float:
        """The time of two steps of this job on this machine, so that an instant is in one of the next two."""
        ends = self._step_ends[:]
        return min(INSTANT_MAX_S, 2 * median(map(operator.sub, ends[1:], ends))) if len(ends) > 1 else 0.0


@contextmanager
def proxies_of(shards: Sequence[ShardProcess]) -> Iterator[list[Proxy]]:
    """One in front of each shard."""
    proxies = [Proxy(shard.address, shard.bulk_port) for shard in shards]
    try:
        yield proxies
    finally:
        for proxy in proxies:
            proxy.close()


def run_disturbed(
    shards: Sequence[ShardProcess],
    world_size: int,
    work: Callable[..., Any],
    *,
    transport: str,
    kills: int,
    faults: int,
    **disturbances: Any,
) -> list[Any]:
    """Run work(servers, rank, on_step, transport=transport) for each rank, in threads; return its results after every
    disturbance has struck.

    The workers call on_step() after each step; it returns True when everything has struck. No proxy can come between a worker
    and a shard that share memory, so there are no faults then.
    """
    assert transport in WITH_CONNECTIONS or faults == 0
    with proxies_of(shards) if transport in WITH_CONNECTIONS else nullcontext([]) as proxies:
        chaos = Chaos(shards, proxies, kills=kills, faults=faults, workers=world_size, **disturbances)

        def on_step(rank: int) -> bool:
            chaos.on_step(rank)
            return chaos.done.is_set()

        servers = ",".join(proxy.address for proxy in proxies) or servers_of(shards)
        with ThreadPoolExecutor(world_size + 1) as pool:
            disturbing = pool.submit(chaos.run)
            doing = functools.partial(work, transport=transport)
            jobs = [pool.submit(doing, servers, rank, functools.partial(on_step, rank)) for rank in range(world_size)]
            results = [job.result() for job in jobs]
            disturbing.result()
        assert chaos.kills == kills
        assert sum(len(proxy.fired) for proxy in proxies) == faults
    return results


def final_state(shards: Sequence[ShardProcess], url: str) -> dict[str, NDArray[Any]]:
    """Parameters, slots and update counts of a job that has ended, from the checkpoint that it has left at `url`.

    Equal however many shards there were, because spaces are put together again.
    """
    for shard in shards:
        assert shard.wait() == 0
    directory = CheckpointDirectory(url)
    manifest = directory.newest()
    assert manifest is not None
    assert directory.verify(manifest.name) == []
    state: dict[str, NDArray[Any]] = {}
    for stored in directory.read_blocks(manifest, Layout(manifest.spec, 1), 0):
        where = f"{stored.block.space}/{stored.block.offset}"
        state[f"{where}/version"] = np.array(stored.version)
        state[f"{where}/parameter"] = np.array(stored.parameter)
        state[f"{where}/steps"] = np.array(stored.steps)
        state |= {f"{where}/{name}": np.array(values) for name, values in stored.slots.items()}
    return state


def assert_same_bits(left: dict[str, NDArray[Any]], right: dict[str, NDArray[Any]]) -> None:
    """Compares as bytes, so that -0.0 differs from 0.0."""
    assert left.keys() == right.keys()
    for name, values in left.items():
        assert values.tobytes() == right[name].tobytes(), name
