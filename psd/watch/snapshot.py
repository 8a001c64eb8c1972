"""A snapshot of a job: plain values, ready to be shown, and their JSON. psdctl status, top and workers and the dashboard all
use it. Must not know where the values come from.

Words are attributes of the classes here; numbers are those of the catalogue (psd/contract/facts.py). Totals are those that the
shards report, so that they agree with the metrics. Rates are those of the last seconds (`RATE_S` in psd/watch/sampler.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, ClassVar

from psd.contract import facts
from psd.contract.fact import Fact

WAIT_S = 0.5
"""Shorter waits are part of every step, and are not shown one by one."""


@dataclass(frozen=True)
class CallTimes:
    """Calls of one kind: how many a second, and how long one takes, including waits for other workers."""

    call: str
    count: int
    per_s: float
    mean_s: float


class Numbers:
    """Base of objects with numbers. Each number is an attribute, and a key in the JSON, by its name in the catalogue; 0 if
    unknown.

    Attributes:
        numbers: the known numbers, by name.
        catalogue: rows of the catalogue for all numbers of this kind, by name.
    """

    numbers: Mapping[str, float]
    catalogue: ClassVar[Mapping[str, Fact]]

    def __getattr__(self, name: str) -> Any:
        if name not in type(self).catalogue:
            raise AttributeError(name)
        return self.numbers.get(name, 0)


@dataclass(frozen=True)
class TableTotals(Numbers):
    """A sparse table: totals over all shards that answer."""

    catalogue = facts.by_name(facts.TABLE)

    name: str
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class RelaySnapshot(Numbers):
    """A relay, as it says of itself.

    Attributes:
        of: the servers that it follows. problem: why it cannot follow; empty: it can.
    """

    catalogue = facts.by_name(facts.RELAY)

    of: str
    problem: str
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class ShardSnapshot(Numbers):
    """One shard, or a relay.

    Attributes:
        state: "serving", "empty", "draining", "restoring" or "no answer"; if "no answer", `error` says why, and totals are
            those of the last answer.
        detail: the phase of its life cycle, if that says more.
        psd_version: version of its program. state_dir: directory of its arena.
        checkpoint_dir: where it stores checkpoints; empty: it takes none. checkpoint_last: name of the last one; empty: none
            yet. checkpoint_error: why the last attempt failed; empty: it did not.
        ages: numbers of gradients by age: 0, 1, 2, 3 to 4, 5 to 8, and so on.
        relay: what a relay says of itself; None of a shard.
    """

    catalogue = facts.by_name(facts.SHARD)

    index: int
    address: str
    state: str
    numbers: Mapping[str, float]
    detail: str = ""
    error: str = ""
    incarnation: str = ""
    psd_version: str = ""
    state_dir: str = ""
    checkpoint_dir: str = ""
    checkpoint_last: str = ""
    checkpoint_error: str = ""
    calls: tuple[CallTimes, ...] = ()
    ages: tuple[int, ...] = ()
    relay: RelaySnapshot | None = None


@dataclass(frozen=True)
class WorkerSnapshot(Numbers):
    """One worker, as all shards together know it.

    Attributes:
        state: "live", "absent", "expired", "failed" or "finished".
        transport: transport of its data to all shards; with the reason if it is not the best one.
        waits: what the worker waits for, in words; empty: nothing.
    """

    catalogue = facts.by_name(facts.WORKER)

    rank: int
    state: str
    host: str
    pid: int
    session: str
    transport: str
    numbers: Mapping[str, float]
    waits: str


@dataclass(frozen=True)
class ReaderSnapshot(Numbers):
    """One reader, as all shards together know it.

    Attributes:
        id: a 53-bit name, in hexadecimal. name: as it calls itself.
        state: "waiting" for a version that is not there yet; "fetching" one; "stuck", fetching for too long; "behind", if there
            is a newer version, and it has not asked for too long; else "idle".
        transport: the lane by which it reads: "grpc", "tcp" or "shm"; those of all shards, if they differ.
    """

    catalogue = facts.by_name(facts.READER)

    id: str
    name: str
    state: str
    transport: str
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class WaitSnapshot:
    """A worker's wait.

    Attributes:
        kind: "round", "earlier_round", "staleness", "barrier", "initial_values" or "cut". name: name of the barrier.
        missing: ranks of the workers that it waits for. shards: shards on which the worker waits.
    """

    rank: int
    kind: str
    name: str
    clock: int
    waited_s: float
    missing: tuple[int, ...]
    shards: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Event:
    """Something that has happened between two snapshots.

    Attributes:
        at: seconds since 1970. kind: "join", "leave", "lost", "restart", "checkpoint", "refused", "order", "state" or "run".
        level: "info", "warning" or "error".
        step: step of the job, or of the checkpoint.
    """

    at: float
    kind: str
    level: str
    text: str
    step: int


@dataclass(frozen=True)
class CurvePoint:
    """A number that a worker has logged."""

    rank: int
    step: int
    value: float
    at: float

    @property
    def place(self) -> float:
        """The step: the horizontal axis of curves."""
        return self.step


@dataclass(frozen=True)
class OrderedRate:
    """An order of an operator to scale the learning rate, from a step on."""

    clock: int
    scale: float


@dataclass(frozen=True)
class JobSnapshot(Numbers):
    """The job at one moment.

    Attributes:
        at: seconds since 1970.
        has_rates: False in a first snapshot, which has no rates.
        state: "training", "starting", "waiting", "stalled", "finished" or "unreachable"; "looking" in a first snapshot, from
            which the state cannot be told.
        headline: the state in a sentence. limit: what limits the job's speed, in a sentence; empty if the job does not train.
        slow: ranks of workers that hold others back.
        lagging: readers that are stuck or behind, a sentence for each, the worst first.
        waits: all waits. waiting: long waits, a sentence for each group of workers that wait for the same.
        orders: an operator's orders that are, or will be, in effect, a sentence for each: those of learning_rates and ends_at.
        ends_at: step at which the job is to end; 0: none.
        problems: shards that do not answer, or do not belong together, a sentence for each.
    """

    catalogue = facts.by_name(facts.JOB)

    at: float
    has_rates: bool
    run_id: str
    state: str
    headline: str
    limit: str
    slow: tuple[int, ...]
    consistency: str
    reduction: str
    aggregation: str
    compression: str
    restored_from: str
    numbers: Mapping[str, float]
    shards: tuple[ShardSnapshot, ...]
    workers: tuple[WorkerSnapshot, ...]
    tables: tuple[TableTotals, ...]
    waits: tuple[WaitSnapshot, ...]
    waiting: tuple[str, ...]
    orders: tuple[str, ...]
    learning_rates: tuple[OrderedRate, ...]
    ends_at: int
    problems: tuple[str, ...]
    readers: tuple[ReaderSnapshot, ...] = ()
    lagging: tuple[str, ...] = ()


def as_json(value: Any, *, has_rates: bool = True) -> Any:
    """Convert to values of JSON. An object has all numbers of its kind. A number is null if it is unknown, if it is not finite
    (JSON has no such numbers), or if it is a rate and `has_rates` is False."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, JobSnapshot):
        has_rates = value.has_rates
    if isinstance(value, Numbers):
        known = {name: value.numbers.get(name) for name, fact in value.catalogue.items() if has_rates or fact.kind != "rate"}
        numbers = {name: as_json(known.get(name)) for name in value.catalogue}
        words = {name: as_json(item, has_rates=has_rates) for name, item in vars(value).items() if name != "numbers"}
        return {**words, **numbers}
    if is_dataclass(value):
        return {name: as_json(item, has_rates=has_rates) for name, item in vars(value).items()}
    if isinstance(value, tuple | list):
        return [as_json(item, has_rates=has_rates) for item in value]
    return value
