"""Explains a worker's long waits in the log: which workers are missing, or which shard does not answer.

`WaitReporter` knows the current operation and when to explain it next: after report_after_s, then each time the wait has
doubled. heartbeat.py asks it whether that is due, and gives it the shards' reports. `ShardHealth` lists the shards that do not
answer. Messages are whole sentences that name the worker: an application that configures no logging still sees warnings on
stderr, without any prefix. Must not know lanes or sessions.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from psd.contract.wording import describe_wait
from psd.v1 import control_pb2

logger = logging.getLogger("psd_client")


class ShardHealth:
    """The times at which shards stopped answering. All threads of a client use it.

    Attributes:
        failing_since: by shard, if it could not be reached, since when; only to be looked at.
    """

    def __init__(self, addresses: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._addresses = addresses
        self._clock = clock
        self.failing_since: dict[int, float] = {}
        self._asked_since: dict[int, float] = {}
        self._lock = threading.Lock()

    def answered(self, shard: int) -> None:
        """Note that the shard has answered."""
        with self._lock:
            self.failing_since.pop(shard, None)

    def begin_asking(self, shard: int) -> None:
        """Note that the shard has a call of the worker's operation until `end_asking`."""
        with self._lock:
            self._asked_since.setdefault(shard, self._clock())

    def end_asking(self, shard: int, *, has_answered: bool = False) -> None:
        """Note that the shard's call has ended."""
        with self._lock:
            self._asked_since.pop(shard, None)
            if has_answered:
                self.failing_since.pop(shard, None)

    def failed(self, shard: int, since: float | None = None) -> None:
        """Note that the shard could not be reached, from the time `since` on; None: from now on."""
        with self._lock:
            self.failing_since.setdefault(shard, self._clock() if since is None else since)

    def silent(self, *, is_joining: bool = False) -> list[str]:
        """A clause for each shard that does not answer, such as "shard 1 at 10.0.0.7:7000 has not answered for 7 s".

        is_joining: True while the worker joins: shards answer these calls at once, and heartbeats do not ask all shards yet,
        so each shard that has a call is silent.
        """
        with self._lock:
            return self._clauses({**(self._asked_since if is_joining else {}), **self.failing_since}, "has not answered for")

    def asked_s(self, shard: int) -> float:
        """Seconds for which the shard has had a call; 0: it has none."""
        began = self._asked_since.get(shard)
        return 0.0 if began is None else self._clock() - began

    def asked(self, progress: Callable[[int, float], str] | None = None) -> list[str]:
        """A clause for each shard that has a call, such as "shard 1 at 10.0.0.7:7000 has had a call for 7 s".

        progress: how far a shard's call has come in so many seconds; empty: not known.
        """
        with self._lock:
            return self._clauses(self._asked_since, "has had a call for", progress)

    def _clauses(
        self,
        since: Mapping[int, float],
        what: str,
        more: Callable[[int, float], str] | None = None,
    ) -> list[str]:
        now = self._clock()
        clauses = []
        for shard, began in sorted(since.items()):
            told = more(shard, now - began) if more is not None else ""
            clauses.append(f"shard {shard} at {self._addresses[shard]} {what} {now - began:.0f} s{told and f': {told}'}")
        return clauses


@dataclass
class _Current:
    what: str
    step: int
    began: float
    report_at_s: float  # length of the wait when it is explained next


class WaitReporter:
    """Watches the operations of a worker, which run one at a time.

    Attributes:
        report_after_s: length from which a wait is explained.
        last_text, last_missing: the last report on the current operation, for its error if it fails; empty at first.
    """

    def __init__(self, rank: int, report_after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._prefix = f"psd: worker {rank}: "
        self.report_after_s = report_after_s
        self._clock = clock
        self._current: _Current | None = None
        self.last_text = ""
        self.last_missing: list[int] = []

    def begin(self, what: str, step: int) -> None:
        """Watch the operation `what`, at the worker's clock `step`, until `end`."""
        self.last_text, self.last_missing = "", []
        self._current = _Current(what, step, self._clock(), self.report_after_s)

    def end(self) -> None:
        """Note that the operation has ended."""
        self._current = None

    def due_in_s(self) -> float | None:
        """Seconds until the current operation must be explained, 0 or less if that is due; None if none runs."""
        current = self._current
        return None if current is None else current.began + current.report_at_s - self._clock()

    @property
    def is_overdue(self) -> bool:
        """True if the current operation has run for report_after_s."""
        current = self._current
        return current is not None and self._clock() >= current.began + self.report_after_s

    def report(self, waits: Iterable[control_pb2.Wait], silent: Sequence[str], asked: Sequence[str] = ()) -> None:
        """Log why the current operation takes long: the waits that the shards report, and the shards that do not answer.

        asked: the shards that have a call. Logged without other reasons: data is being sent, or its connection is dead.
        """
        current = self._current
        if current is None:
            return
        waited_s = self._clock() - current.began
        while current.report_at_s <= waited_s:
            current.report_at_s *= 2
        merged = merge(waits)
        self.last_missing = sorted({worker.rank for wait in merged for worker in wait.missing})
        clauses = [describe_wait(wait) for wait in merged] + list(silent)
        self.last_text = "; ".join(clauses)
        for clause in clauses:
            self._warn(clause)
        if not clauses:
            what = f"step {current.step}: {current.what} has taken {waited_s:.0f} s"
            self._warn("; ".join([what, "no shard reports a wait", *asked]))

    def _warn(self, text: str) -> None:
        logger.warning("%s%s", self._prefix, text)


def merge(waits: Iterable[control_pb2.Wait]) -> list[control_pb2.Wait]:
    """Merge waits: one for each kind, name and clock, with the missing workers of all shards in the order of their ranks."""
    merged: dict[tuple[control_pb2.WaitKind, str, int], dict[int, control_pb2.WorkerStatus]] = {}
    for wait in waits:
        workers = merged.setdefault((wait.kind, wait.name, wait.clock), {})
        for worker in wait.missing:
            workers.setdefault(worker.rank, worker)
    return [
        control_pb2.Wait(kind=kind, name=name, clock=clock, missing=[workers[rank] for rank in sorted(workers)])
        for (kind, name, clock), workers in merged.items()
    ]
