"""Counts of one shard: totals, latencies, and which workers keep others waiting. psdctl status and the metrics read them here.

Hot paths only add to integers and floats that exist already, under a lock that they hold anyway or one of their lane's own;
readers do the summing up. Must not know Prometheus, messages or how lanes carry data.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Sequence

from typing_extensions import override

from psd.contract.errors import PsdError
from psd.state import locks
from psd_core.arena import BlockCore
from psd_core.steps import TablesCore

LANES = ("shm", "tcp", "grpc")
DATA_CALLS = ("push", "pull", "push_pull", "batch")
"""Calls that every lane carries."""
GRPC_CALLS = ("commit", "measure")
"""Calls that gRPC alone carries: those of exact aggregation (psd/state/aggregation/settlement.py)."""

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the latencies' buckets: from a small step within a machine to a wait that needs attention."""

REFUSALS = frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE", "FAILED_PRECONDITION", "ALREADY_EXISTS"})
"""Codes of errors caused by the caller."""


class Histogram:
    """Counts of seconds in the buckets of SECONDS, and in one above them. The caller of `observe` holds a lock.

    Attributes:
        counts: per bucket, not cumulative. total: sum of the seconds observed.
    """

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(SECONDS, value)] += 1
        self.total += value

    def add(self, other: Histogram) -> None:
        """Add all counts of another histogram."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def copy(self) -> Histogram:
        """A copy of the present state."""
        return total([self])


class LaneCounts:
    """Traffic of one lane. Thread-safe.

    Attributes:
        received_bytes, sent_bytes: bytes of payload. saved_bytes: those that were not needed, by compression.
        calls: how long calls that did not fail took, by kind.
    """

    def __init__(self, lane: str) -> None:
        self.received_bytes = 0
        self.sent_bytes = 0
        self.saved_bytes = 0
        self.calls = {call: Histogram() for call in (*DATA_CALLS, *(GRPC_CALLS if lane == "grpc" else ()))}
        self._lock = locks.new(locks.Level.LEAF)

    def count_bytes(self, *, received: int = 0, sent: int = 0, saved: int = 0) -> None:
        """Add payload bytes to the totals."""
        with self._lock:
            self.received_bytes += received
            self.sent_bytes += sent
            self.saved_bytes += saved

    def count_steps(self, received: int, sent: int, took: Sequence[int], took_s: float) -> None:
        """Add calls of push_pull that were made as steps: bytes of payload, and how long they took, by bucket, and together."""
        with self._lock:
            self.received_bytes += received
            self.sent_bytes += sent
            histogram = self.calls["push_pull"]
            histogram.counts = [mine + more for mine, more in zip(histogram.counts, took, strict=True)]
            histogram.total += took_s

    def count_call(self, call: str, seconds: float) -> None:
        """Note that a call has succeeded."""
        with self._lock:
            self.calls[call].observe(seconds)

    def copy(self) -> LaneCounts:
        """A copy of the present state."""
        found = LaneCounts("")
        with self._lock:
            found.received_bytes, found.sent_bytes = self.received_bytes, self.sent_bytes
            found.saved_bytes = self.saved_bytes
            found.calls = {call: histogram.copy() for call, histogram in self.calls.items()}
        return found


class Counters:
    """Totals since the shard started, as StatusReply has them. Guarded by the shard's lock, except the lanes.

    Attributes:
        errors: calls that ended in an error, by its reason and code. barriers: how long workers were in barriers.
        leases_expired: workers that were silent for too long. sessions: workers' joins, repeated ones included.
    """

    def __init__(self) -> None:
        self.pushes_accepted = 0
        self.pushes_duplicate = 0
        self.pushes_late = 0
        self.pulls = 0
        self.leases_expired = 0
        self.sessions = 0
        self.errors: dict[tuple[str, str], int] = {}
        self.barriers = Histogram()
        self.lanes = {lane: LaneCounts(lane) for lane in LANES}

    def count_error(self, error: PsdError) -> None:
        """Note that a call has ended in an error. Each class of errors has one reason, so that the counts stay few."""
        key = (error.reason, error.code)
        self.errors[key] = self.errors.get(key, 0) + 1

    def copy(self) -> Counters:
        """A copy of the present state."""
        found = copy.copy(self)
        found.errors = dict(self.errors)
        found.barriers = self.barriers.copy()
        found.lanes = {name: lane.copy() for name, lane in self.lanes.items()}
        return found

    @property
    def requests_refused(self) -> int:
        """Calls that ended in an error caused by the caller."""
        return sum(count for (_, code), count in self.errors.items() if code in REFUSALS)

    @property
    def received_bytes(self) -> int:
        """Bytes received over all lanes."""
        return sum(lane.received_bytes for lane in self.lanes.values())

    @property
    def sent_bytes(self) -> int:
        """Bytes sent over all lanes."""
        return sum(lane.sent_bytes for lane in self.lanes.values())

    @property
    def saved_bytes(self) -> int:
        """Bytes saved over all lanes."""
        return sum(lane.saved_bytes for lane in self.lanes.values())


class RoundTimes:
    """Measures how long a block's rounds were open, and which workers they waited for. Used under the block's lock.

    Args:
        now: returns monotonic seconds.
        on_awaited: called with a rank, and the seconds by which its gradient came after the first of its round; may be None.

    Attributes:
        closed: seconds from a round's first gradient to its update. closed_at: when the last one closed; None: none has.
    """

    __slots__ = ("_awaited", "_now", "_on_awaited", "_opened_at", "closed", "closed_at")

    def __init__(self, now: Callable[[], float], on_awaited: Callable[[int, float], None] | None) -> None:
        self.closed = Histogram()
        self.closed_at: float | None = None
        self._now = now
        self._on_awaited = on_awaited
        self._opened_at: float | None = None
        self._awaited = 0

    @property
    def is_open(self) -> bool:
        """True if the open round has a gradient."""
        return self._opened_at is not None

    def on_gradient(self, rank: int, waited: Callable[[], int]) -> None:
        """Note a gradient that the open round is about to count.

        waited: returns the mask of the workers that the round waits for; called for its first gradient.
        """
        now = self._now()
        if self._opened_at is None:
            self._opened_at, self._awaited = now, waited()
        elif self._on_awaited is not None:
            self._on_awaited(rank, now - self._opened_at)
        self._awaited &= ~(1 << rank)

    def on_close(self, waited: int) -> None:
        """Note that the round has closed. Workers that it waited for, but that have gone since, count as awaited until now.

        waited: mask of the workers that are waited for now.
        """
        if self._opened_at is None:
            return
        self.closed_at = now = self._now()
        took_s, self._opened_at = now - self._opened_at, None
        self.closed.observe(took_s)
        gone = self._awaited & ~waited
        if gone and self._on_awaited is not None:
            for rank in range(gone.bit_length()):
                if gone >> rank & 1:
                    self._on_awaited(rank, took_s)


def total(histograms: Sequence[Histogram]) -> Histogram:
    """The sum of several histograms."""
    found = Histogram()
    for each in histograms:
        found.add(each)
    return found


class CoreTimes(RoundTimes):
    """The times of the rounds that are in a core in C, which measures them itself. Attributes: as of RoundTimes.

    Args:
        now: returns monotonic seconds.
    """

    def __init__(self, core: BlockCore | TablesCore, now: Callable[[], float]) -> None:
        self._core = core
        self._now = now

    @property
    def closed(self) -> Histogram:  # type: ignore[override]
        """Seconds from a round's first gradient to its update."""
        found = Histogram()
        _, _, found.counts, found.total = self._core.times
        return found

    @property
    def closed_at(self) -> float | None:  # type: ignore[override]
        """The time when the last one closed; None: none has."""
        return self._core.times[1]

    @property
    @override
    def is_open(self) -> bool:
        return self._core.times[0]

    @override
    def on_gradient(self, rank: int, waited: Callable[[], int]) -> None:
        self._core.on_gradient(rank, self._now(), waited())

    @override
    def on_close(self, waited: int) -> None:
        self._core.on_close(self._now(), waited)
