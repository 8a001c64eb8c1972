"""Greenlets in place of the client's threads: whatever blocks in psd_client hands over to the checker instead.

A `Fibers` holds the fibers of one process. `run` lets each of them go on until all are parked: in a call, in a sleep, or for
one
another. Nothing else runs meanwhile, so a process is a function of what it is told. `green` puts stand-ins into psd_client's
modules for as long as the checker runs. Must not know psd's protocol.
"""

from __future__ import annotations

import concurrent.futures
import queue
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from greenlet import GreenletExit, getcurrent, greenlet

from psd_client.lanes import daemon_threads


class Fiber(greenlet):
    """One thread of control.

    Attributes:
        thread: what it is part of: "op" for a call of the program, with its helpers; "beat" for the heartbeats.
        last_shard: whose call has failed last; a sleep after that waits for that shard.
        awaits: what it is parked for. now: its time.
    """

    now = 0.0

    thread: str
    fibers: Fibers
    last_shard: int | None = None
    awaits: Any = None


class Fibers:
    """The fibers of one process, which has a number. owner: that process, for stand-ins that find it by the fiber that runs."""

    active: ClassVar[Fibers | None] = None

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.owner: Any = None
        self._ready: deque[tuple[Fiber, Any]] = deque()
        self.alive: list[Fiber] = []
        self.is_over = False

    def spawn(self, function: Callable[[], None], thread: str) -> Fiber:
        """A fiber that runs when its turn comes. `function` must not raise."""

        def body(_: Any) -> None:
            try:
                function()
            finally:
                self.alive.remove(fiber)

        fiber = Fiber(body)
        fiber.thread, fiber.fibers = thread, self
        self.alive.append(fiber)
        self.wake(fiber)
        return fiber

    def wake(self, fiber: Fiber, value: Any = None) -> None:
        """Let a parked fiber go on: `park` returns `value`."""
        fiber.awaits = None
        self._ready.append((fiber, value))

    def run(self) -> None:
        """Until every fiber is parked."""
        before, Fibers.active = Fibers.active, self
        try:
            while self._ready:
                fiber, value = self._ready.popleft()
                if not fiber.dead:
                    fiber.parent = getcurrent()
                    fiber.switch(value)
        finally:
            Fibers.active = before

    def end(self) -> None:
        """Let go of all fibers: whatever they still do on their way out waits for nothing."""
        self.is_over = True
        before, Fibers.active = Fibers.active, self
        try:
            for fiber in list(self.alive):
                if fiber and not fiber.dead:
                    fiber.parent = getcurrent()
                    fiber.throw(GreenletExit)
            self.alive.clear()
            self._ready.clear()
        finally:
            Fibers.active = before


def current() -> Fiber:
    """The fiber that runs."""
    fiber = getcurrent()
    assert isinstance(fiber, Fiber)
    return fiber


def park(awaits: Any) -> Any:
    """Hand over until somebody wakes this fiber; what it is woken with."""
    fiber = current()
    if fiber.fibers.is_over:
        raise GreenletExit
    fiber.awaits = awaits
    parent = fiber.parent
    assert parent is not None
    return parent.switch()


class Sleep:
    """What a fiber is parked for that sleeps. `shard`: that has just failed, if it waits for another attempt there."""

    def __init__(self, seconds: float, shard: int | None) -> None:
        self.seconds = seconds
        self.shard = shard


class Waiters:
    """Fibers that wait for one event of their own process."""

    def __init__(self) -> None:
        self._entries: list[tuple[Fiber, Any]] = []

    def add(self, awaits: Any) -> None:
        """This fiber is about to park for `awaits`; `wake` ends that."""
        self._entries.append((current(), awaits))

    def wait(self) -> None:
        """Park until `wake`."""
        awaits = object()
        self.add(awaits)
        park(awaits)

    def wake(self) -> None:
        """Let all go on."""
        entries, self._entries = self._entries, []
        for fiber, awaits in entries:
            if fiber.awaits is awaits:  # else something else has woken it
                fiber.fibers.wake(fiber)


class Future:
    """concurrent.futures.Future for fibers."""

    def __init__(self) -> None:
        self.is_done = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.callbacks: list[Callable[[Any], object]] = []
        self.waiters = Waiters()

    def done(self) -> bool:
        return self.is_done

    def set_result(self, value: Any) -> None:
        self._finish(value, None)

    def set_exception(self, error: BaseException) -> None:
        self._finish(None, error)

    def _finish(self, value: Any, error: BaseException | None) -> None:
        if self.is_done:
            raise concurrent.futures.InvalidStateError
        self.is_done, self.value, self.error = True, value, error
        for callback in self.callbacks:
            callback(self)
        self.callbacks.clear()
        self.waiters.wake()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        if self.is_done:
            callback(self)
        else:
            self.callbacks.append(callback)

    def result(self, timeout: float | None = None) -> Any:
        self.await_done(timeout)
        if self.error is not None:
            raise self.error
        return self.value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.await_done(timeout)
        return self.error

    def await_done(self, timeout: float | None) -> None:
        while not self.is_done:
            self.waiters.wait()


class Crew:
    """psd_client.lanes.daemon_threads.Crew with a fiber for each task."""

    def __init__(self, name: str) -> None:
        del name

    def begin(self, task: Any) -> None:
        fiber = current()
        fiber.fibers.spawn(task.run, fiber.thread)

    def close(self) -> None:
        pass


class Queue:
    """queue.SimpleQueue for fibers. Whoever waits for long gets what it waits for in the end."""

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.waiters = Waiters()

    def put(self, item: Any) -> None:
        self.items.append(item)
        self.waiters.wake()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        del block, timeout
        while not self.items:
            self.waiters.wait()
        return self.items.popleft()


class Lock:
    """threading.Lock."""

    def __init__(self) -> None:
        self.is_held = False
        self.waiters = Waiters()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        del timeout
        while self.is_held:
            if not blocking:
                return False
            self.waiters.wait()
        self.is_held = True
        return True

    def release(self) -> None:
        self.is_held = False
        self.waiters.wake()

    def locked(self) -> bool:
        return self.is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Event:
    """threading.Event. A wait with a timeout is a sleep, which the checker ends."""

    def __init__(self) -> None:
        self.value = False
        self.waiters = Waiters()

    def is_set(self) -> bool:
        return self.value

    def set(self) -> None:
        self.value = True
        self.waiters.wake()

    def clear(self) -> None:
        self.value = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self.value:
            if timeout is None:
                self.waiters.wait()
            else:
                awaits = Sleep(timeout, current().last_shard)
                self.waiters.add(awaits)
                park(awaits)
        return self.value


def now() -> float:
    """Seconds. Time stands still, but for a fiber that is told that it has tried for too long."""
    fiber = getcurrent()
    return fiber.now if isinstance(fiber, Fiber) else 0.0


def sleep(seconds: float) -> None:
    """time.sleep."""
    park(Sleep(seconds, current().last_shard))


def _stand_ins() -> dict[Any, Any]:
    fake_threading = types.SimpleNamespace(**{name: getattr(threading, name) for name in threading.__all__})
    fake_threading.Lock, fake_threading.Event = Lock, Event
    fake_time = types.SimpleNamespace(monotonic=now, time=now, perf_counter=now, sleep=sleep)
    return {
        id(threading): fake_threading,
        id(time): fake_time,
        id(queue.SimpleQueue): Queue,
        id(daemon_threads.Crew): Crew,
    }


@contextmanager
def green(*others: tuple[Any, str, Any]) -> Iterator[None]:
    """Put the stand-ins into psd_client's modules, and `others` (where, name, what) wherever they belong."""
    stand_ins = _stand_ins()
    changes = list(others)
    for name, module in list(sys.modules.items()):
        if name.startswith("psd_client"):
            changes += [(module, key, stand_ins[id(value)]) for key, value in vars(module).items() if id(value) in stand_ins]
    before = [(where, name, getattr(where, name)) for where, name, _ in changes]
    try:
        for where, name, what in changes:
            setattr(where, name, what)
        yield
    finally:
        for where, name, what in reversed(before):
            setattr(where, name, what)
