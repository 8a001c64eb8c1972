"""What a shard's process tells the rest of the world: of an event, and of its state. Must not know how it comes about."""

from __future__ import annotations

from typing import Any, NamedTuple

from cut_parts import CutPart

Key = tuple[Any, ...]
"""Of a call: see shard_process.py."""


class ShardTold(NamedTuple):
    """What an event has led to.

    Attributes:
        replies: keys of calls that have ended, with their outcomes. crash_points: those at which there is something else on the
            disk than before. locks: that the call has taken. wrong: broken invariants.
    """

    replies: tuple[tuple[Key, int], ...]
    crash_points: tuple[int, ...]
    locks: int
    wrong: tuple[str, ...]


class ShardView(NamedTuple):
    """What the rest of the world needs to know of a shard.

    Attributes:
        is_up: its process runs. lives: how often it has been started. is_blank: it has once been without what it held.
        has_lost_round: the next tick will see to that.
        handlers: keys of waiting calls; True: it may go on. live: by rank, the live session, else 0.
        history, ahead, carried: see History. cuts: parts of cuts that are complete. announced, reads: how many cuts, readers.
        told: what readers of a publication have heard here. can_be_read: a reader finds something.
        armed: ranks whose steps it takes.
        holds: it holds pushes for a cut. is_graced: the open round has its quorum, and waits on for others.
    """

    is_up: bool
    lives: int
    is_blank: bool
    has_lost_round: bool
    handlers: tuple[tuple[Key, bool], ...]
    live: tuple[int, ...]
    history: tuple[Any, ...]
    ahead: tuple[Any, ...]
    carried: tuple[Any, ...]
    cuts: tuple[CutPart, ...] = ()
    announced: int = 0
    reads: int = 0
    told: tuple[tuple[int, bytes], ...] = ()
    can_be_read: bool = False
    holds: bool = False
    is_graced: bool = False
    armed: tuple[int, ...] = ()
