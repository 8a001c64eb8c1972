"""The locks of a shard: the order in which they are taken, and which of them guards what.

A thread that holds a lock takes only such as stand below it; docs/design/life-of-a-push.md says what each is for, and how long
it is held. Nothing here costs a running shard anything: the tests put other locks in the place of these, which check the order,
and a check in the place of each method that is marked (tests/checked_locks.py).
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

ClassT = TypeVar("ClassT", bound=type)


class Level(enum.IntEnum):
    """Place of a lock in the order. No two of a level are held at once, but blocks' locks, in the order of the blocks."""

    JOB = 1
    ANNOUNCING = 2
    SHARD = 3
    BLOCK = 4
    CUTS = 5
    LEAF = 6


def new(level: Level, index: int = 0) -> threading.Lock:
    """A lock. Who holds a shard's may take it again. `index`: of the block."""
    del index
    return threading.RLock() if level is Level.SHARD else threading.Lock()  # type: ignore[return-value]


@dataclass(frozen=True)
class Guard:
    """The lock under which methods of a class are called."""

    cls: type
    level: Level
    methods: frozenset[str]


GUARDS: list[Guard] = []


def guarded_by(level: Level, *, only: Collection[str] = (), but: Collection[str] = ()) -> Callable[[ClassT], ClassT]:
    """Mark a class whose public methods, or only some, or all but some, are called with a lock of that level held."""

    def mark(cls: ClassT) -> ClassT:
        own = {name for name, value in vars(cls).items() if callable(value) and not name.startswith("_")}
        GUARDS.append(Guard(cls, level, frozenset(only or own - set(but))))
        return cls

    return mark
