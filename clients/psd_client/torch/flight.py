"""One exchange of a learner, and what it counts and measures of its own steps.

Must not know parameters, or when an exchange is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from typing_extensions import override

from psd_client.worker.background_call import BackgroundCall
from psd_client.worker.exchange.sent_push import Spare
from psd_client.worker.flat_calls import FlatCalls
from psd_client.worker.worker import Turn

_WEIGHT_UNIT = 2.0**-20
"""Weights are multiplied by this: they are squares of numbers of tokens, and a push's weight is at most 10^15."""

_NEWEST_SHARE = 0.2
"""Share of the newest value in a mean of times."""


@dataclass(frozen=True)
class Exchanged:
    """An exchange that has ended, for LocalOptimizer.on_exchange.

    Attributes:
        clock: of the job, at which the difference was pushed. fragment: of which. is_counted: False: it came late, and travels
            with the next difference of the fragment; with fast aggregation, in those blocks that have not counted it.
        departed, landed: local steps after which the difference was taken, and what came back was.
        weight: of the difference. is_mixed: what came back was mixed in by alpha; False: what the learner has learned since was
            carried over to it.
        versions: by fragment, of the parameters that it has come back with: the clock as of which they are.
    """

    clock: int
    fragment: int
    is_counted: bool
    departed: int
    landed: int
    weight: float
    is_mixed: bool
    versions: tuple[int, ...]


class Counts:
    """Counts of a learner's steps and tokens that no merge has counted yet."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0.0

    def add(self, steps: int, tokens: float) -> None:
        """Count steps, and what they have learned from."""
        self.steps += steps
        self.tokens += tokens

    @property
    def weight(self) -> float:
        """The learner's weight in a merge."""
        return self.tokens * (self.tokens / self.steps) * _WEIGHT_UNIT if self.steps else 0.0


class Smoothed:
    """A mean of times in which older ones count less and less; 0 before the first."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """Add a time."""
        self.seconds += (_NEWEST_SHARE if self.seconds else 1.0) * (seconds - self.seconds)


class Flight(BackgroundCall):
    """One exchange of a fragment.

    Args:
        call: makes the exchange; again, with the same difference, if it has failed.

    Attributes:
        counts: behind the difference. spare: until when nobody waits for it.
        departed, due: local steps after which it began, and after which what comes back is to be mixed in.
        is_repeated: it was made again. is_told: its error has been raised.
    """

    is_repeated = is_told = False

    def __init__(
        self,
        worker: FlatCalls,
        call: Callable[[Turn], None],
        *,
        fragment: int,
        counts: Counts,
        spare: Spare,
        departed: int,
        due: int,
        late_before: int | None = None,
    ) -> None:
        self.fragment, self.counts, self.spare, self.departed, self.due = fragment, counts, spare, departed, due
        self._worker = worker
        self._late_before = worker.stats()["blocks_late"] if late_before is None else late_before
        super().__init__(worker, call)

    def again(self) -> Flight:
        """Make the call again."""
        flight = Flight(
            self._worker,
            self._call,
            fragment=self.fragment,
            counts=self.counts,
            spare=self.spare,
            departed=self.departed,
            due=self.due,
            late_before=self._late_before,
        )
        flight.is_repeated = True
        return flight

    @property
    def is_failed(self) -> bool:
        """True once the call has ended with an error."""
        return self.ended.is_set() and self.error is not None

    @property
    def is_late(self) -> bool:
        """True if the shards have closed the round without the difference."""
        return self._worker.stats()["blocks_late"] > self._late_before

    @override
    def wait(self) -> None:
        self.ended.wait()
        self.is_told = self.error is not None
        super().wait()
