"""The learners of a job, as they speak of themselves with their pushes, and how their differences fared. In memory alone.

Under the shard's lock. Must not know blocks or rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from psd.contract.errors import InvalidRequest
from psd.state import locks
from psd.v1 import data_pb2

_NUMBERS = ("tokens", "step_s", "of_tokens")


@dataclass(slots=True)
class HeardLearner:
    """One learner.

    Attributes:
        note: what it has said last. clock: of that push. weight: its difference's.
        merge_percent: its part, by weight, in the last merge that has its difference. rounds_missed: rounds that were decided
            without one of its, since it first sent one, and in which it was to take part.
        merge_cosine_percent: how far the directions agreed in that merge, if it was one of several by direction: the mean
            cosine of two members' differences, weighted, over the tensors; else None.
    """

    note: data_pb2.LearnerNote
    clock: int
    weight: float
    merge_percent: int = 0
    rounds_missed: int = 0
    merge_cosine_percent: int | None = None

    @property
    def base_age(self) -> int:
        """Exchanges of the job between the base of the last difference and its push."""
        return max(0, self.clock - self.note.base)


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
        self._last: tuple[int, list[int], float] = (-1, [], 1.0)  # round, members, and the sum of the squares of their shares

    def on_push(self, rank: int, note: data_pb2.LearnerNote, clock: int, weight: float) -> None:
        """Note what a learner says."""
        before = self._by_rank.get(rank)
        heard = self._by_rank[rank] = HeardLearner(note, clock, weight)
        if before is not None:
            heard.merge_percent, heard.rounds_missed = before.merge_percent, before.rounds_missed
            heard.merge_cosine_percent = before.merge_cosine_percent

    def on_decided(self, decided: Iterable[tuple[int, int]], absent_in: Callable[[int], int]) -> None:
        """Note the members (a bit mask) of rounds, and who was to be one and was not."""
        for round_, members in decided if self._by_rank else ():
            counted = {rank: one for rank, one in self._by_rank.items() if members >> rank & 1 and one.clock == round_}
            total = sum(one.weight for one in counted.values())
            squares = sum((one.weight / total) ** 2 for one in counted.values()) if total else 1.0
            self._last = round_, list(counted), squares
            for rank, one in self._by_rank.items():
                if rank in counted:
                    one.merge_percent = round(100 * one.weight / total) if total else 0
                elif absent_in(round_) >> rank & 1:
                    one.rounds_missed += 1

    def on_directions(self, round_: int, lengths: Sequence[float]) -> None:
        """Note the norms of a decided round's mean directions, by tensor; 0: nothing was sent of it.

        Of unit vectors with shares s and cosines c it is the root of sum(s s) + sum(s s' c), over all and over all pairs.
        """
        last, members, squares = self._last
        sent = [length for length in lengths if length]
        if last != round_ or squares >= 1 or not sent:
            return
        mean = sum((length * length - squares) / (1 - squares) for length in sent) / len(sent)
        for rank in members:
            if rank in self._by_rank:
                self._by_rank[rank].merge_cosine_percent = round(100 * mean)

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
