"""An operation at several shards: in parallel, each with its retries, under one deadline, all or an error.

Joins fanout.py (threads, cancelling) with retry.py and the record of which shards answer. Must not know what the operations
are, nor sessions or clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from psd.contract.errors import PsdError, ShardRestarted
from psd.contract.layout import Layout
from psd_client.fanout import Fanout
from psd_client.retry import RETRIED, RetryPolicy
from psd_client.transport import Call, Lane, Scope
from psd_client.waiting import Health

ResultT = TypeVar("ResultT")

THROUGHPUT_MIN = 10 << 20
"""Bytes a second that a connection is expected to move at least. Deadlines are for waiting; this much is added for the data."""

_LEFT_TO_RUN: tuple[type[PsdError], ...] = (*RETRIED, ShardRestarted)


def transfer_s(layout: Layout, lanes: Sequence[Lane]) -> float:
    """Seconds that the slowest of these lanes may take to move all its blocks."""
    return max((sum(b.nbytes for b in layout.blocks_of(lane.shard)) for lane in lanes), default=0) / THROUGHPUT_MIN


class Shards:
    """The lanes of a job, in the order of its shards.

    Attributes:
        on_restart: called where a shard has come back as another incarnation. If it returns, the attempt is repeated.
    """

    def __init__(self, lanes: Sequence[Lane], policy: RetryPolicy, health: Health) -> None:
        self.lanes = lanes
        self._policy = policy
        self._health = health
        self._fanout = Fanout()
        self.on_restart: Callable[[Lane, Call, ShardRestarted], None] | None = None

    def run_bulk(self, operation: Callable[[Lane, Call], ResultT], timeout_s: float, lanes: Sequence[Lane]) -> list[ResultT]:
        """`run`, for operations that make bulk calls only: those to a single shard begin in the calling thread.

        Handing a small call to another thread and back costs as much as the call. What goes wrong is left to `run`.
        """
        if len(lanes) == 1 and lanes[0].is_interruptible:
            (lane,) = lanes
            try:
                with self._health.asking(lane.shard):
                    result = operation(lane, Call(timeout_s, Scope()))
            except _LEFT_TO_RUN:
                pass
            else:
                self._health.answered(lane.shard)
                return [result]
        return self.run(operation, timeout_s, lanes)

    def run(
        self, operation: Callable[[Lane, Call], ResultT], timeout_s: float, lanes: Sequence[Lane] | None = None
    ) -> list[ResultT]:
        """Run `operation` at `lanes` (default: all); return its results in their order, or raise the first error after the
        retries."""
        scope = Scope()
        clock = self._policy.clock
        deadline = clock() + timeout_s

        def at(lane: Lane) -> ResultT:
            def attempt() -> ResultT:
                while True:
                    # A late attempt still gets a moment: the shard's answer says more than a deadline that passed on the way.
                    call = Call(max(deadline - clock(), min(timeout_s, 1.0)), scope)
                    try:
                        return operation(lane, call)
                    except ShardRestarted as error:
                        if self.on_restart is None:
                            raise
                        self.on_restart(lane, call, error)

            with self._health.asking(lane.shard):
                result = self._policy.run(
                    attempt,
                    shard=lane.shard,
                    address=lane.address,
                    sleep=scope.sleep,
                    on_failure=lambda _: self._health.failed(lane.shard),
                )
            self._health.answered(lane.shard)
            return result

        return self._fanout.run(at, self.lanes if lanes is None else lanes, scope)

    def run_once(self, operation: Callable[[Lane], None]) -> None:
        """Run `operation`, which raises nothing, at all shards, without retries."""
        self._fanout.run(operation, self.lanes, Scope())

    def close(self) -> None:
        """End the threads and the connections."""
        for lane in self.lanes:
            lane.close()
        self._fanout.close()
