"""The locks of a shard: the order in which they are taken, and which methods are called under which lock.

A thread that holds a lock takes only locks of later levels; docs/design/life-of-a-push.md says what each is for, and how long
it is held. Nothing here costs a running shard anything: the tests replace these locks by others that check the order, and wrap
each method that is marked in a check (tests/checked_locks.py).
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

ClassT = TypeVar("ClassT", bound=type)


class Level(enum.IntEnum):
    """Place of a lock in the order. A thread holds one lock of a level at most; of BLOCK more, in the order of the blocks."""

    JOB = 1
    ANNOUNCING = 2
    SHARD = 3
    BLOCK = 4
    CUTS = 5
    LEAF = 6


def new(level: Level, index: int = 0, own: threading.Lock | None = None) -> threading.Lock:
    """A new lock. A thread that holds a shard's lock may take it again. `index`: the block's index, for a block's lock.

    own: the lock itself, of a block that others lock without Python.
    """
    del index
    if own is not None:
        return own
    return threading.RLock() if level is Level.SHARD else threading.Lock()  # type: ignore[return-value]


@dataclass(frozen=True)
class Guard:
    """Methods of a class that are called with a lock of this level held."""

    cls: type
    level: Level
    methods: frozenset[str]


GUARDS: list[Guard] = []


def guarded_by(level: Level, *, only: Collection[str] = (), but: Collection[str] = ()) -> Callable[[ClassT], ClassT]:
    """Mark a class: its public methods (`only` some of them, or all `but` some) are called with a lock of that level held."""

    def mark(cls: ClassT) -> ClassT:
        own = {name for name, value in vars(cls).items() if callable(value) and not name.startswith("_")}
        GUARDS.append(Guard(cls, level, frozenset(only or own - set(but))))
        return cls

    return mark
