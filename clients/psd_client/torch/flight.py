"""One exchange of a learner, and what it counts and measures of its own steps.

Exchanges are made one after the other, each by a thread in its turn, and a learner may have departed with the next one before
the first has landed: so an exchange takes what it has brought out of the connection's buffers before its turn ends. Must not
know how parameters are changed, or when an exchange is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
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


@dataclass(frozen=True)
class FreshValues:
    """The parameters that an exchange has brought. They are the learner's own: the next one writes to the connection's buffers.

    Attributes:
        groups: those that have changed. values: by index of the tensor, of these groups and of the exchange's own.
        versions: by fragment, as in Exchanged.
    """

    groups: frozenset[int]
    values: Mapping[int, torch.Tensor]
    versions: tuple[int, ...]


class HeldBack(Exception):
    """The reason why an exchange is not made: the one before it has failed, and is to be made again first."""


@dataclass
class Departure:
    """An exchange of a fragment that has departed, however often it is tried.

    Attributes:
        exchange: makes it, with the same difference each time. bring: takes what it has brought, given whether it came late.
        counts: behind the difference. spare: until when nobody waits for it, and the clock of its round, as far as is known.
        at, due: local steps after which it began, and after which what comes back is to be mixed in.
        late_before: blocks that had come late when it was first made; None: it was not. is_made: it has not failed.
        is_late: the shards have closed the round without the difference. brought: what it has brought; None: not yet.
    """

    exchange: Callable[[Turn], None]
    bring: Callable[[bool], FreshValues]
    fragment: int
    counts: Counts
    spare: Spare
    at: int
    due: int
    late_before: int | None = None
    is_made: bool = False
    is_late: bool = False
    brought: FreshValues | None = None


class Flight(BackgroundCall):
    """An exchange under way.

    Args:
        ahead: the exchange that has departed before and has not landed; this one is held if that fails.

    Attributes:
        departure: the exchange. is_repeated: it was made before, and has failed. is_told: its error has been raised.
    """

    is_told = False

    def __init__(self, worker: FlatCalls, departure: Departure, ahead: Flight | None, *, is_repeated: bool = False) -> None:
        self.departure, self.is_repeated = departure, is_repeated
        self._worker, self._ahead = worker, ahead
        super().__init__(worker, self._make)

    def _make(self, turn: Turn) -> None:
        departure, ahead, self._ahead = self.departure, self._ahead, None
        if ahead is not None and ahead.error is not None:
            raise HeldBack
        if departure.late_before is None:
            departure.late_before = self._late
        if not departure.is_made:
            departure.exchange(turn)
            departure.is_made, departure.is_late = True, self._late > departure.late_before
        departure.brought = departure.bring(departure.is_late)

    @property
    def _late(self) -> int:
        return self._worker.stats()["blocks_late"]

    def again(self, ahead: Flight | None) -> Flight:
        """Make it again, after another one."""
        self.ended.wait()
        return Flight(self._worker, self.departure, ahead, is_repeated=self.is_repeated or not isinstance(self.error, HeldBack))

    @property
    def is_failed(self) -> bool:
        """True once the call has ended with an error."""
        return self.ended.is_set() and self.error is not None

    @override
    def wait(self) -> None:
        self.ended.wait()
        self.is_told = self.error is not None
        super().wait()
