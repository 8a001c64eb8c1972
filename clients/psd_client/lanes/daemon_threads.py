"""Threads that run tasks, and that nobody waits for when the program ends.

concurrent.futures takes no work any more once the interpreter exits, and waits for all its threads first. But a worker that
ends has something to send then, and must not wait for a shard that never answers. Threads that run already are there until the
very end; not every Python starts others then. Must not know lanes or shards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

ResultT = TypeVar("ResultT")

_exiting = threading.Event()
# Python has no public name for what is called before it waits for threads that are no daemons, and has an end of executors.
threading._register_atexit(_exiting.set)  # type: ignore[attr-defined]  # noqa: SLF001


def can_start_threads() -> bool:
    """False when the interpreter exits and starts no threads any more, as that of Python 3.12.1 does."""
    if not _exiting.is_set():
        return True
    try:
        threading.Thread(target=int, daemon=True).start()
    except RuntimeError:
        return False
    return True


class Task(Generic[ResultT]):
    """A function that is run once, in any thread.

    Args:
        done: is given the task when it has run; None: a queue of its own, for `wait`.

    Attributes:
        error: what the function has raised.
    """

    def __init__(self, function: Callable[[], ResultT], done: SimpleQueue[Task[Any]] | None = None) -> None:
        self.error: BaseException | None = None
        self._function: Callable[[], ResultT] | None = function
        self._value: ResultT | None = None
        self._done: SimpleQueue[Task[Any]] = SimpleQueue() if done is None else done

    def run(self, then: Callable[[], None] = lambda: None) -> None:
        """Run the function; call `then`; say that it is done."""
        assert self._function is not None
        try:
            self._value = self._function()
        except BaseException as error:  # noqa: BLE001 - for whoever asks for the result
            self.error = error
        self._function = None
        then()
        self._done.put(self)

    def wait(self) -> BaseException | None:
        """Wait for the end of the task; return the error that the function raised, or None. Once."""
        return self._done.get().error

    @property
    def result(self) -> ResultT:
        """The function's result, or raises its error; only after its end."""
        if self.error is not None:
            raise self.error
        return cast(ResultT, self._value)


class Crew:
    """Daemon threads, as many as tasks run at once. They start when they are needed, and stay until `close`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: SimpleQueue[Task[Any] | None] = SimpleQueue()
        self._threads = 0
        self._idle = 0  # less those that a task waits for already

    def begin(self, task: Task[Any]) -> None:
        """Run a task in a thread.

        Raises:
            RuntimeError: there is none, and none can be started any more, because the interpreter exits.
        """
        with self._lock:
            if self._idle == 0:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._threads += 1
            else:
                self._idle -= 1
        self._waiting.put(task)

    def close(self) -> None:
        """End the threads, each after its present task."""
        with self._lock:
            threads, self._threads = self._threads, 0
        for _ in range(threads):
            self._waiting.put(None)

    def _run(self) -> None:
        while (task := self._waiting.get()) is not None:
            task.run(self._on_idle)
            del task  # not to keep what it refers to until the next one

    def _on_idle(self) -> None:
        with self._lock:
            self._idle += 1
