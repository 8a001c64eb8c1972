"""The same operation at several shards at once: one thread each, all or an error.

The first failure cancels the others through their scope, so nothing hangs, and so does an interrupt of the calling thread.
Must not know what the operations are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from psd_client.transport import Cancelled, Lane, Scope

ResultT = TypeVar("ResultT")


class Fanout:
    """Threads that wait for the shards. They start when they are first needed."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._executor: ThreadPoolExecutor | None = None

    def run(self, operation: Callable[[Lane], ResultT], lanes: Sequence[Lane], scope: Scope) -> list[ResultT]:
        """The results in the order of the lanes, or the first error."""
        # One shard needs no thread of its own, except that Ctrl-C strikes the main thread, wherever that is: in the middle of
        # gRPC's Python code it leaves a lock behind that nobody releases. So the main thread only ever waits here.
        if len(lanes) == 1 and threading.current_thread() is not threading.main_thread():
            return [operation(lanes[0])]
        try:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self._width, thread_name_prefix="psd-shard")
            futures = [self._executor.submit(operation, lane) for lane in lanes]
        except RuntimeError:  # the interpreter exits, and no longer has threads for anybody
            return [operation(lane) for lane in lanes]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            is_failed = any(future.exception() is not None for future in done)
        except BaseException:  # Ctrl-C: leave no thread behind that still writes into the caller's buffers
            scope.cancel()
            wait(futures)
            raise
        if is_failed:
            scope.cancel()
            wait(futures)
            raise _first_cause(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None


def _first_cause(futures: Sequence[Future[ResultT]]) -> BaseException:
    """The error of the lowest shard that was not merely cancelled."""
    errors = [error for future in futures if (error := future.exception()) is not None]
    return next((error for error in errors if not isinstance(error, Cancelled)), errors[0])
