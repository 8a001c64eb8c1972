"""The life cycle of a shard's parameters: no values, values, values of a checkpoint. One table has the allowed transitions.

Thread-safe. Must not know jobs, workers, or how a checkpoint is read.
"""

from __future__ import annotations

import enum

from psd.contract.errors import InternalError
from psd.state import locks


class Life(enum.Enum):
    """State in the life cycle. Values are those of psd.v1.LifeCycle, which describes each."""

    EMPTY = 1
    UNREAD = 2
    SERVING = 3
    DAMAGED = 4
    STRANDED = 5
    LOADING = 6
    LOST = 7
    TENTATIVE = 8
    RESTORED = 9


_GOES_BACK = "Rollback names a checkpoint"
_RECOVERED = "at the start: an earlier process has left it so"
_GROWS = "a job of vectors alone is declared with tensors or tables"
_LOSES = "a round cannot be completed any more (exact aggregation)"

TRANSITIONS: dict[Life, dict[Life, str]] = {
    Life.EMPTY: {
        Life.UNREAD: "all initial values are there, from a worker or --from-checkpoint; or, at the start: an earlier process "
        "has left them",
        Life.SERVING: _RECOVERED,
        Life.TENTATIVE: _RECOVERED,
        Life.RESTORED: _RECOVERED,
        Life.LOADING: f"at the start: there is a checkpoint; or {_GOES_BACK}",
    },
    Life.UNREAD: {
        Life.UNREAD: "the worker that was chosen later brings its values",
        Life.SERVING: "a worker reads, or pushes",
        Life.EMPTY: _GROWS,
        Life.DAMAGED: _LOSES,
        Life.LOADING: _GOES_BACK,
    },
    Life.SERVING: {
        Life.EMPTY: _GROWS,
        Life.DAMAGED: _LOSES,
        Life.LOADING: _GOES_BACK,
    },
    Life.DAMAGED: {
        Life.LOADING: f"the next tick finds a checkpoint; or {_GOES_BACK}",
        Life.STRANDED: "the next tick finds none that can be read",
    },
    Life.STRANDED: {
        Life.SERVING: "a worker joins: the next wait for the round has the shard look for a checkpoint again",
        Life.LOADING: _GOES_BACK,
    },
    Life.LOADING: {
        Life.TENTATIVE: "the newest checkpoint is loaded",
        Life.RESTORED: "the checkpoint that Rollback names, or the job is declared for, is loaded",
        Life.LOST: "the checkpoint cannot be read to its end, or there is no room for it",
    },
    Life.LOST: {
        Life.EMPTY: "there is no older checkpoint",
        Life.LOADING: f"there is an older checkpoint; or {_GOES_BACK}",
    },
    Life.TENTATIVE: {
        Life.RESTORED: "Rollback names the checkpoint that is loaded",
        Life.LOADING: "Rollback names another checkpoint",
    },
    Life.RESTORED: {
        Life.SERVING: "a worker declares the job",
        Life.DAMAGED: _LOSES,
        Life.LOADING: f"the job is declared in another way than it was stored; or {_GOES_BACK}",
    },
}
"""Transitions: for each state, the states that may follow it, and when they do."""


class LifeCycle:
    """The present state of a shard in its life cycle.

    Attributes:
        now: may be read without a lock. has_values: True if the shard holds a whole set of parameters; likewise.
    """

    def __init__(self) -> None:
        self.now = Life.EMPTY
        self.has_values = False
        self._lock = locks.new(locks.Level.LEAF)

    def to(self, following: Life) -> None:
        """Enter another state; InternalError if the table does not allow that."""
        if not self.try_to(following):
            raise InternalError(f"a shard that is {self.now.name} cannot become {following.name}")

    def try_to(self, following: Life) -> bool:
        """Enter another state if the table allows that; False if it does not."""
        with self._lock:
            is_known = following in TRANSITIONS[self.now]
            if is_known:
                self.now = following
                self.has_values = following not in (Life.EMPTY, Life.LOADING, Life.LOST)
        return is_known
