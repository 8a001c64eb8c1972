"""Threads that run tasks, and for which the program does not wait when it ends.

concurrent.futures refuses work once the interpreter exits, and waits for all its threads first. But a worker that ends still
has something to send, and must not wait for a shard that never answers. Threads that run already go on until the very end; not
every Python starts new ones then. Must not know lanes or shards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

from typing_extensions import override

ResultT = TypeVar("ResultT")

SIGNALS_S = 1.0
"""Seconds after which a main thread that waits looks for signals: one that comes just before it sleeps does not wake it."""

_exiting = threading.Event()
# Python has no public name for this: functions to call before it waits for non-daemon threads, and ends executors.
threading._register_atexit(_exiting.set)  # type: ignore[attr-defined]  # noqa: SLF001


def can_start_threads() -> bool:
    """False if the interpreter exits and starts no more threads, like Python 3.12.1."""
    if not _exiting.is_set():
        return True
    try:
        threading.Thread(target=int, daemon=True).start()
    except RuntimeError:
        return False
    return True


class End(threading.Event):
    """An event for which the main thread may wait without a limit: Ctrl-C ends that."""

    @override
    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None:
            return super().wait(timeout)
        while not super().wait(SIGNALS_S):
            pass
        return True


class Task(Generic[ResultT]):
    """A function that is run once, in any thread.

    Args:
        done: a queue that gets the task once it has run; None: one of the task's own, for `wait`.

    Attributes:
        error: the exception that the function has raised, or None.
    """

    def __init__(self, function: Callable[[], ResultT], done: SimpleQueue[Task[Any]] | None = None) -> None:
        self.error: BaseException | None = None
        self._function: Callable[[], ResultT] | None = function
        self._value: ResultT | None = None
        self._done: SimpleQueue[Task[Any]] = SimpleQueue() if done is None else done

    def run(self, then: Callable[[], None] = lambda: None) -> None:
        """Run the function; call `then`; put the task into `done`."""
        assert self._function is not None
        try:
            self._value = self._function()
        except BaseException as error:  # noqa: BLE001 - for callers of `wait` and `result`
            self.error = error
        self._function = None
        then()
        self._done.put(self)

    def wait(self) -> BaseException | None:
        """Wait for the end of the task; return the error that the function raised, or None. Call it once."""
        return self._done.get().error

    @property
    def result(self) -> ResultT:
        """The function's result; raises its error. Only after the task has run."""
        if self.error is not None:
            raise self.error
        return cast(ResultT, self._value)


class Crew:
    """Daemon threads, as many as tasks run at once. They start when needed, and stay until `close`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: SimpleQueue[Task[Any] | None] = SimpleQueue()
        self._threads = 0
        self._idle = 0  # idle threads, without those for which a task is queued

    def begin(self, task: Task[Any]) -> None:
        """Run a task in a thread.

        Raises:
            RuntimeError: no thread is idle, and none can be started, because the interpreter exits.
        """
        with self._lock:
            if self._idle == 0:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._threads += 1
            else:
                self._idle -= 1
        self._waiting.put(task)

    def close(self) -> None:
        """End the threads, each after its current task."""
        with self._lock:
            threads, self._threads = self._threads, 0
        for _ in range(threads):
            self._waiting.put(None)

    def _run(self) -> None:
        while (task := self._waiting.get()) is not None:
            task.run(self._on_idle)
            del task  # else what it refers to is kept until the next task

    def _on_idle(self) -> None:
        with self._lock:
            self._idle += 1
