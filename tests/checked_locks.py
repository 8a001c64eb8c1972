"""Has every test check the rules of psd/state/locks.py: the order of locks, and which are held when a marked method is called.

A thread that breaks a rule gets an AssertionError, and so does the test in the end, since a shard answers such an error.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
import threading
from collections.abc import Callable
from typing import Any

import psd.state
from psd.state import locks
from psd.state.locks import Level


class _Held(threading.local):
    """The locks of each thread."""

    def __init__(self) -> None:
        self.locks: list[CheckedLock] = []


_plain = locks.new
_held = _Held()

broken: list[str] = []
"""The rules that were broken since the list was last cleared."""


class CheckedLock:
    """A lock that may be taken only by a thread that holds none of its level or below. `unchecked`: the lock itself."""

    def __init__(self, level: Level, index: int = 0, own: threading.Lock | None = None) -> None:
        self.level = level
        self.index = index
        self.unchecked = _plain(level, index, own)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        mine = _held.locks
        if mine and self not in mine and any((lock.level, lock.index) >= (self.level, self.index) for lock in mine):
            names = ", ".join(f"{lock.level.name} {lock.index}" for lock in mine)
            _fail(f"{self.level.name} {self.index} is taken by a thread that holds {names}")
        is_taken = self.unchecked.acquire(blocking, timeout)
        if is_taken:
            mine.append(self)
        return is_taken

    def release(self) -> None:
        _held.locks.remove(self)
        self.unchecked.release()

    def locked(self) -> bool:
        return self.unchecked.locked()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


def held() -> list[CheckedLock]:
    """The locks that this thread holds."""
    return _held.locks


def _fail(message: str) -> None:
    broken.append(message)
    raise AssertionError(message)


def _checked(method: Callable[..., Any], level: Level) -> Callable[..., Any]:
    own = method.__module__

    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        # A test that calls an object of its own needs no lock, and a method that calls another of its module holds it.
        is_bound = caller.startswith("psd.") and caller != own
        # The checker of the protocol has locks of its own.
        if is_bound and locks.new is CheckedLock and not any(lock.level is level for lock in held()):
            _fail(f"{method.__qualname__} is called by {caller} without the lock {level.name}")
        return method(*arguments, **named)

    return call


def install() -> None:
    """From now on all shards of this process are checked. To be called once, before the first one is made."""
    locks.new = CheckedLock  # type: ignore[assignment]
    for module in pkgutil.walk_packages(psd.state.__path__, "psd.state."):
        importlib.import_module(module.name)
    for guard in locks.GUARDS:
        for name in guard.methods:
            method = vars(guard.cls)[name]
            if not isinstance(method, (staticmethod, classmethod)):
                setattr(guard.cls, name, _checked(method, guard.level))
