"""Calls to several shards at once: in parallel, with retries where they can help, under one deadline. If one fails, all fail.

An `Operation` is one such call: its deadline, its scope and its retries. Only errors after which the same call may succeed are
retried, by exponential back-off with full jitter, until the retry timeout. That is safe for every call of psd: a push is named
by (rank, session, clock) and counted once however often it is sent; so is a barrier by its number; others only read, or set the
same again.

We don't use tenacity, or gRPC's own retry policy: here one deadline spans all shards, another shard's failure ends the wait,
and the error says which shard could not be reached for how long. gRPC's policy does not cover bulk connections.

The first failure cancels the calls to the other shards through their scope, so nothing hangs, and so does an interrupt of the
calling thread. Clock and randomness are passed in. Must not know what the calls are, or sessions or gradients.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from psd.contract.errors import Draining, Overloaded, PsdError, ShardRestarted, ShardUnavailable
from psd.contract.layout import Layout
from psd_client.lanes.daemon_threads import SIGNALS_S, Crew, Task
from psd_client.lanes.transport import CANCEL_S, Call, Cancelled, Lane, Scope
from psd_client.lanes.waiting import ShardHealth

RETRIED: tuple[type[PsdError], ...] = (ShardUnavailable, Overloaded, Draining)

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 0.5

ENDING_S = CANCEL_S + 1
"""Seconds to wait for calls that were cancelled. A call that ends later, because a name server does not answer, say, finds its
scope cancelled before it touches anything."""

THROUGHPUT_MIN = 10 << 20
"""Bytes a second that a connection must move at least. Timeouts are for waiting; the time for the data is added to them."""

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
        clock: returns monotonic seconds. uniform: returns a number from [0, 1).
    """

    timeout_s: float
    clock: Callable[[], float] = time.monotonic
    uniform: Callable[[], float] = random.random


class Outage:
    """The successive failures of one shard. If an attempt runs for longer than the retry timeout, it was served: that ends
    the outage."""

    def __init__(self, lane: Lane, policy: RetryPolicy) -> None:
        self._lane = lane
        self._policy = policy
        self._attempt_began = 0.0
        self._since: float | None = None
        self._failures = 0

    def on_attempt(self) -> None:
        """Note that an attempt begins."""
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
        action: makes the call to one shard; repeated after errors that are retried.
        timeout_s: limit for all attempts together. on_restart: as in Shards.
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
            failed: the error of the first attempt, if that was made elsewhere.

        Raises:
            ShardUnavailable: all attempts failed until the retry timeout. Errors that are not retried pass through.
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
        except BaseException:
            self.scope.cancel()  # the caller may be in a call of its own
            raise
        finally:
            self._health.end_asking(lane.shard, has_answered=has_answered)


class Shards:
    """The lanes of a job, in the order of its shards.

    Attributes:
        health: as given.
        on_restart: called when a shard has come back as another incarnation. If it returns, the attempt is repeated.
    """

    def __init__(self, lanes: Sequence[Lane], policy: RetryPolicy, health: ShardHealth) -> None:
        self.lanes = lanes
        self.health = health
        self.on_restart: OnRestart | None = None
        self._policy = policy
        self._crew = Crew("psd-shard")

    def run(
        self,
        action: Callable[[Lane, Call], ResultT],
        timeout_s: float,
        lanes: Sequence[Lane] | None = None,
        *,
        is_bulk: bool = False,
    ) -> list[ResultT]:
        """Make one call to `lanes` (default: all). Returns the results in their order, or raises the first error after retries.

        is_bulk: True if `action` makes bulk calls only.
        """
        lanes = self.lanes if lanes is None else lanes
        operation = Operation(action, timeout_s, self._policy, self.health, self.on_restart)
        for lane in lanes:
            is_bulk = is_bulk and lane.is_interruptible
        if not is_bulk or not lanes:
            return self._in_parallel(operation.at, lanes, operation.scope)
        # Handing a small call to another thread and back costs as much as the call. So one is made here, the first time.
        own, *others = lanes
        calls: _Parallel[ResultT] | None = _Parallel(self._crew, operation.scope) if others else None
        has_answered = False
        try:
            if calls is not None:
                for lane in others:
                    calls.begin(partial(operation.at, lane))
            self.health.begin_asking(own.shard)
            try:
                result = action(own, operation.call())
                has_answered = True
            finally:
                self.health.end_asking(own.shard, has_answered=has_answered)
        except _REPEATED as error:
            at = partial(operation.at, failed=error)
        except BaseException as error:
            cause = calls.cancel() if calls is not None else None
            if isinstance(error, Cancelled) and cause is not None:
                raise cause from None
            raise
        else:
            return [result, *calls.results()] if calls is not None else [result]
        if calls is None:
            return self._in_parallel(at, lanes, operation.scope)
        calls.begin(partial(at, own))
        *results, result = calls.results()
        return [result, *results]

    def run_once(self, action: Callable[[Lane], None]) -> None:
        """Run `action`, which must not raise, at all shards, without retries."""
        self._in_parallel(action, self.lanes, Scope())

    def _in_parallel(self, action: Callable[[Lane], ResultT], lanes: Sequence[Lane], scope: Scope) -> list[ResultT]:
        # One shard needs no thread of its own, except that Ctrl-C strikes the main thread, wherever that is: in the middle of
        # gRPC's Python code it leaves a lock behind that nobody releases. So the main thread only ever waits here.
        if len(lanes) == 1 and threading.current_thread() is not threading.main_thread():
            return [action(lanes[0])]
        calls: _Parallel[ResultT] = _Parallel(self._crew, scope)
        try:
            for lane in lanes:
                calls.begin(partial(action, lane))
        except BaseException:  # Ctrl-C
            calls.cancel()
            raise
        return calls.results()

    def close(self) -> None:
        """End the threads and the connections."""
        for lane in self.lanes:
            lane.close()
        self._crew.close()


class _Parallel(Generic[ResultT]):
    """Calls to some shards, in their order, each in its own thread."""

    def __init__(self, crew: Crew, scope: Scope) -> None:
        self._crew = crew
        self._scope = scope
        self._done: SimpleQueue[Task[ResultT]] = SimpleQueue()
        self._tasks: list[Task[ResultT]] = []
        self._ended: list[Task[ResultT]] = []

    def begin(self, function: Callable[[], ResultT]) -> None:
        """Begin a call."""
        task = Task(function, self._done)
        try:
            self._crew.begin(task)
        except RuntimeError:  # the interpreter exits, and starts no threads any more
            task.run()
        self._tasks.append(task)

    def results(self) -> list[ResultT]:
        """Wait for all calls, and return their results; if one fails, cancel the others and raise its error."""
        try:
            while len(self._ended) < len(self._tasks):
                try:
                    self._ended.append(self._done.get(timeout=SIGNALS_S))
                except Empty:
                    continue
                if self._ended[-1].error is not None:
                    break
        except BaseException:  # Ctrl-C: leave no thread behind that still writes into the caller's buffers
            self.cancel()
            raise
        if self._ended and self._ended[-1].error is not None:
            cause = self.cancel()
            assert cause is not None
            raise cause
        return [task.result for task in self._tasks]

    def cancel(self) -> BaseException | None:
        """Cancel all calls, and wait for those that end in time. Returns the error of the lowest shard whose call failed by
        itself, or else some error."""
        self._scope.cancel()
        deadline = time.monotonic() + ENDING_S
        while len(self._ended) < len(self._tasks):
            try:
                self._ended.append(self._done.get(timeout=max(0.0, deadline - time.monotonic())))
            except Empty:
                break
        errors = [task.error for task in self._tasks if task in self._ended and task.error is not None]
        return next((error for error in errors if not isinstance(error, Cancelled)), errors[0] if errors else None)
