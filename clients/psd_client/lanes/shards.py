"""Calls to several shards at once: in parallel, each repeated where that helps, under one deadline; all succeed, or an error.

An `Operation` is one such call: its deadline, its scope and its retries. Only errors after which the same call may succeed are
retried, by exponential back-off with full jitter, until the retry timeout. That is safe for every call of psd: a push is named
by (rank, session, clock) and counted once however often it is sent, a barrier by its number, and the others only read or state.

Ours, not tenacity, or gRPC's own retry policy: one deadline spans all shards, another shard's failure ends the wait, and the
error says which shard could not be reached for how long. gRPC's policy covers no bulk connection.

The first failure cancels the calls to the other shards through their scope, so nothing hangs, and so does an interrupt of the
calling thread. Clock and randomness are passed in. Must not know what the calls are, nor sessions or gradients.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from psd.contract.errors import Draining, Overloaded, PsdError, ShardRestarted, ShardUnavailable
from psd.contract.layout import Layout
from psd_client.lanes.crew import Crew, Task
from psd_client.lanes.transport import CANCEL_S, Call, Cancelled, Lane, Scope
from psd_client.lanes.waiting import ShardHealth

RETRIED: tuple[type[PsdError], ...] = (ShardUnavailable, Overloaded, Draining)

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 0.5

ENDING_S = CANCEL_S + 1
"""Seconds to wait for calls that were cancelled. What ends later, as a name server that does not answer lets it, finds its
scope cancelled before it touches anything."""

THROUGHPUT_MIN = 10 << 20
"""Bytes a second that a connection is expected to move at least. Deadlines are for waiting; this much is added for the data."""

_REPEATED: tuple[type[PsdError], ...] = (*RETRIED, ShardRestarted)

ResultT = TypeVar("ResultT")
OnRestart = Callable[[Lane, Call, ShardRestarted], None]


def transfer_s(layout: Layout, lanes: Sequence[Lane]) -> float:
    """Seconds that the slowest of these lanes may take to move all its blocks."""
    return max((sum(b.nbytes for b in layout.blocks_of(lane.shard)) for lane in lanes), default=0) / THROUGHPUT_MIN


@dataclass(frozen=True)
class RetryPolicy:
    """The limits of retries.

    Attributes:
        timeout_s: how long a shard may fail; 0: no second attempt.
        clock: seconds, monotonic. uniform: a number from [0, 1).
    """

    timeout_s: float
    clock: Callable[[], float] = time.monotonic
    uniform: Callable[[], float] = random.random


class Outage:
    """The failures of one shard in a row, which an attempt ends that ran for longer than the retry timeout: it was served."""

    def __init__(self, lane: Lane, policy: RetryPolicy) -> None:
        self._lane = lane
        self._policy = policy
        self._attempt_began = 0.0
        self._since: float | None = None
        self._failures = 0

    def on_attempt(self) -> None:
        """An attempt begins."""
        self._attempt_began = self._policy.clock()

    def pause_after(self, error: PsdError) -> float:
        """Seconds to wait after a failure. Raises ShardUnavailable if the outage would be longer than the retry timeout."""
        policy, now = self._policy, self._policy.clock()
        if self._since is None or now - self._attempt_began > policy.timeout_s:
            self._since, self._failures = now, 0
        pause: float = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(self._failures, 10)) * policy.uniform()
        self._failures += 1
        if now - self._since + pause < policy.timeout_s:
            return pause
        shard, address = self._lane.shard, self._lane.address
        raise ShardUnavailable(
            f"shard {shard} at {address} could not be reached for {now - self._since:.0f} s, "
            f"in {self._failures} attempts; the last one said: {error}",
            shard=shard,
            address=address,
        ) from error


class Operation(Generic[ResultT]):
    """One call to some shards.

    Args:
        action: makes the call to one shard; repeated as the class says.
        timeout_s: for all attempts together. on_restart: see Shards.
    """

    def __init__(
        self,
        action: Callable[[Lane, Call], ResultT],
        timeout_s: float,
        policy: RetryPolicy,
        health: ShardHealth,
        on_restart: OnRestart | None = None,
    ) -> None:
        self.scope = Scope()
        self._action = action
        self._timeout_s = timeout_s
        self._policy = policy
        self._health = health
        self._on_restart = on_restart
        self._deadline = policy.clock() + timeout_s

    def call(self) -> Call:
        """The conditions of an attempt that begins now."""
        # A late attempt still gets a moment: the shard's answer says more than a deadline that passed on the way.
        return Call(max(self._deadline - self._policy.clock(), min(self._timeout_s, 1.0)), self.scope)

    def at(self, lane: Lane, failed: PsdError | None = None) -> ResultT:
        """The result of the call to one shard, after as many attempts as it takes.

        Args:
            failed: how the first attempt has ended, if it was made elsewhere.

        Raises:
            ShardUnavailable: every attempt failed, for the retry timeout. Errors that are not retried pass.
        """
        outage, has_answered = Outage(lane, self._policy), False
        self._health.begin_asking(lane.shard)
        try:
            while True:
                outage.on_attempt()
                try:
                    while True:
                        try:
                            if failed is not None:
                                raise failed
                            result = self._action(lane, self.call())
                        except ShardRestarted as error:
                            failed = None
                            if self._on_restart is None:
                                raise
                            self._on_restart(lane, self.call(), error)
                        else:
                            has_answered = True
                            return result
                except RETRIED as error:
                    failed = None
                    self._health.failed(lane.shard)
                    pause = outage.pause_after(error)
                self.scope.sleep(pause)
        finally:
            self._health.end_asking(lane.shard, has_answered=has_answered)


class Shards:
    """The lanes of a job, in the order of its shards.

    Attributes:
        on_restart: called where a shard has come back as another incarnation. If it returns, the attempt is repeated.
    """

    def __init__(self, lanes: Sequence[Lane], policy: RetryPolicy, health: ShardHealth) -> None:
        self.lanes = lanes
        self.on_restart: OnRestart | None = None
        self._policy = policy
        self._health = health
        self._crew = Crew("psd-shard")

    def run(
        self,
        action: Callable[[Lane, Call], ResultT],
        timeout_s: float,
        lanes: Sequence[Lane] | None = None,
        *,
        is_bulk: bool = False,
    ) -> list[ResultT]:
        """Make one call to `lanes` (default: all); the results in their order, or the first error after the retries.

        is_bulk: `action` makes bulk calls only.
        """
        lanes = self.lanes if lanes is None else lanes
        operation = Operation(action, timeout_s, self._policy, self._health, self.on_restart)
        failed: PsdError | None = None
        if is_bulk and len(lanes) == 1 and lanes[0].is_interruptible:
            # Handing a small call to another thread and back costs as much as the call. So the first attempt is made here.
            (lane,) = lanes
            has_answered = False
            self._health.begin_asking(lane.shard)
            try:
                results = [action(lane, operation.call())]
                has_answered = True
            except _REPEATED as error:
                failed = error
            else:
                return results
            finally:
                self._health.end_asking(lane.shard, has_answered=has_answered)
        return self._in_parallel(partial(operation.at, failed=failed), lanes, operation.scope)

    def run_once(self, action: Callable[[Lane], None]) -> None:
        """Have `action`, which raises nothing, done at all shards."""
        self._in_parallel(action, self.lanes, Scope())

    def _in_parallel(self, action: Callable[[Lane], ResultT], lanes: Sequence[Lane], scope: Scope) -> list[ResultT]:
        # One shard needs no thread of its own, except that Ctrl-C strikes the main thread, wherever that is: in the middle of
        # gRPC's Python code it leaves a lock behind that nobody releases. So the main thread only ever waits here.
        if len(lanes) == 1 and threading.current_thread() is not threading.main_thread():
            return [action(lanes[0])]
        done: SimpleQueue[Task[Any]] = SimpleQueue()
        tasks = [Task(partial(action, lane), done) for lane in lanes]
        ended: list[Task[Any]] = []
        begun, is_failed = 0, False
        try:
            for task in tasks:
                try:
                    self._crew.begin(task)
                except RuntimeError:  # the interpreter exits, and no longer has threads for anybody
                    task.run()
                begun += 1
            while len(ended) < len(tasks) and not is_failed:
                ended.append(done.get())
                is_failed = ended[-1].error is not None
        except BaseException:  # Ctrl-C: leave no thread behind that still writes into the caller's buffers
            _cancel(scope, done, begun - len(ended))
            raise
        if is_failed:
            ended += _cancel(scope, done, begun - len(ended))
            raise _first_cause([task for task in tasks if task in ended])
        return [task.result for task in tasks]

    def close(self) -> None:
        """End the threads and the connections."""
        for lane in self.lanes:
            lane.close()
        self._crew.close()


def _cancel(scope: Scope, done: SimpleQueue[Task[Any]], count: int) -> list[Task[Any]]:
    """Cancel the tasks; the results of those of the `count` that end in time."""
    scope.cancel()
    deadline = time.monotonic() + ENDING_S
    ended: list[Task[Any]] = []
    while len(ended) < count:
        try:
            ended.append(done.get(timeout=max(0.0, deadline - time.monotonic())))
        except Empty:
            break
    return ended


def _first_cause(tasks: Sequence[Task[Any]]) -> BaseException:
    """The error of the lowest shard that was not merely cancelled."""
    errors = [task.error for task in tasks if task.error is not None]
    return next((error for error in errors if not isinstance(error, Cancelled)), errors[0])
