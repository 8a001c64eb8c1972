"""The same operation at several shards at once: one thread each, all or an error.

The first failure cancels the others through their scope, so nothing hangs, and so does an interrupt of the calling thread.
Must not know what the operations are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from psd_client.crew import Crew, Task
from psd_client.transport import CANCEL_S, Cancelled, Lane, Scope

ENDING_S = CANCEL_S + 1
"""Seconds to wait for operations that were cancelled. What ends later, as a name server that does not answer lets it, finds its
scope cancelled before it touches anything."""

ResultT = TypeVar("ResultT")


class Fanout:
    """Threads that wait for the shards. They start when they are first needed."""

    def __init__(self) -> None:
        self._crew = Crew("psd-shard")

    def run(self, operation: Callable[[Lane], ResultT], lanes: Sequence[Lane], scope: Scope) -> list[ResultT]:
        """The results in the order of the lanes, or the first error."""
        # One shard needs no thread of its own, except that Ctrl-C strikes the main thread, wherever that is: in the middle of
        # gRPC's Python code it leaves a lock behind that nobody releases. So the main thread only ever waits here.
        if len(lanes) == 1 and threading.current_thread() is not threading.main_thread():
            return [operation(lanes[0])]
        done: SimpleQueue[Task[Any]] = SimpleQueue()
        tasks = [Task(partial(operation, lane), done) for lane in lanes]
        ended: list[Task[Any]] = []
        begun, is_failed = 0, False
        try:
            for task in tasks:
                self._begin(task)
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

    def _begin(self, task: Task[ResultT]) -> None:
        try:
            self._crew.begin(task)
        except RuntimeError:  # the interpreter exits, and no longer has threads for anybody
            task.run()

    def close(self) -> None:
        """End the threads."""
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
