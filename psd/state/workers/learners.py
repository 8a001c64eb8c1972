"""The learners of a job, as they speak of themselves with their pushes, and how their differences fared. In memory alone.

Under the shard's lock. Must not know blocks or rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from psd.contract.errors import InvalidRequest
from psd.state import locks
from psd.v1 import data_pb2

_NUMBERS = ("tokens", "step_s", "of_tokens")


@dataclass(slots=True)
class HeardLearner:
    """One learner.

    Attributes:
        session: that has spoken. note: what it has said last. clock: of that push. weight: its difference's. at: when.
    """

    session: int
    note: data_pb2.LearnerNote
    clock: int
    weight: float
    at: float


def check_note(note: data_pb2.LearnerNote) -> None:
    """Raise InvalidRequest for a number that no learner has."""
    for name in _NUMBERS:
        if not 0 <= getattr(note, name) < math.inf:
            raise InvalidRequest(f"learner.{name}: must be finite and >= 0, got {getattr(note, name)}")


@locks.guarded_by(locks.Level.SHARD)
class Learners:
    """The learners, by rank."""

    def __init__(self) -> None:
        self._by_rank: dict[int, HeardLearner] = {}

    def on_push(self, rank: int, learner: HeardLearner) -> None:
        """Note what a learner says."""
        self._by_rank[rank] = learner

    def on_gone(self, rank: int) -> None:
        """Forget a learner whose session has ended."""
        self._by_rank.pop(rank, None)

    def of(self, rank: int) -> HeardLearner | None:
        """All that is known of a learner; None: nothing."""
        return self._by_rank.get(rank)

    @property
    def fastest_step_s(self) -> float:
        """Seconds that a local step of the fastest one takes; 0: not known."""
        return min((one.note.step_s for one in self._by_rank.values() if one.note.step_s), default=0.0)
