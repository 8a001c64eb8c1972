"""The open round of a block: the gradients that it has, and how they are summed.

`FastRound` adds them as they arrive. `ExactRound` keeps them apart, takes them only from the workers that shard 0 has decided
on, and adds them in the order of the ranks, so that the result depends on nothing else. Under the block's lock; must not know
versions, workers' leases or pages.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import psd_core
from psd.contract.errors import StateLost
from psd.state.consistency import Policy
from psd.state.rules import Gradient
from psd.state.voices import Voice

HALF_BYTES = 2
"""Bytes of an element that a sum cannot have: gradients of 16 bits are widened as they are added."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """One worker's part of a push for one block.

    Attributes:
        weight: samples behind it; 0 takes part and adds nothing.
        values: (n,) gradient in the block's gradient_dtype, zero where not present; None: no gradient in this block at all.
        present: (k,) uint8, the segments with a gradient; None: all.
        scalars: of the block's group.
        version_read: of the parameters that the gradient was computed from; None: not known.
        scale: without rounds: by which the gradient is multiplied.
        is_lent: `values` stay as they are until the round has closed, or `BlockState.take_over` was called.
        session: as which the push was begun; with rank and clock, its name. sent_by: the session that sends it.
        since: see Voice.
    """

    rank: int
    session: int
    clock: int
    weight: float
    values: NDArray[Any] | None
    present: NDArray[np.uint8] | None
    scalars: Sequence[float]
    version_read: int | None = None
    scale: float = 1.0
    is_lent: bool = False
    sent_by: int = 0
    since: int = 0

    @property
    def voice(self) -> Voice:
        """The worker's say in the scalars of the round."""
        return Voice(self.since, self.rank, self.scalars)


class Outcome(enum.IntEnum):
    """The outcome of a contribution."""

    COUNTED = 0
    DUPLICATE = 1
    LATE = 2
    EARLY = 3  # its round is not open yet; nothing changed
    STAGED = 4  # EXACT: kept until it is decided whether it counts


class Accumulators(Protocol):
    """Lends arrays to sum gradients in, of the block's shape."""

    def lend(self) -> NDArray[Any]:
        """An array with undefined contents."""
        ...

    def give_back(self, array: NDArray[Any]) -> None:
        """Give back a lent array."""
        ...


class Round(Protocol):
    """An open round.

    Attributes:
        scalars: of the update, once `gradient` was asked for: of the workers that it counts, those whose voice holds.
        sessions: by rank, of the workers that the update will count.
    """

    scalars: Sequence[float]
    sessions: dict[int, int]

    def standing(self, part: Contribution) -> Outcome | None:
        """DUPLICATE if the round has this very push, LATE if it can no longer take it, None if it takes it."""
        ...

    def is_complete_with(self, part: Contribution) -> bool:
        """True if this contribution is the last one that the round needs."""
        ...

    def is_complete(self) -> bool:
        """True if the round needs no further contribution."""
        ...

    def add(self, part: Contribution) -> None:
        """Take a contribution that does not complete the round. If it fails, nothing has changed."""
        ...

    def gradient(self, last: Contribution | None) -> Gradient:
        """The round's gradient, with the contribution that completes it. If it fails, nothing has changed."""
        ...

    def missing(self) -> int:
        """Mask of the workers that the round waits for."""
        ...

    def end(self) -> None:
        """Give the memory back."""
        ...


@functools.lru_cache(4096)
def _all(segment_count: int) -> NDArray[np.uint8]:
    """All segments, shared by rounds: making arrays costs more than what is done with them."""
    return _shared(np.ones(segment_count, np.uint8))


@functools.lru_cache(4096)
def _none(segment_count: int) -> NDArray[np.uint8]:
    return _shared(np.zeros(segment_count, np.uint8))


def _shared(array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    array.flags.writeable = False
    return array


class _Sum:
    """Weighted sums, shared by both kinds of round."""

    def __init__(self, segment_count: int, *, is_mean: bool) -> None:
        self.scalars: Sequence[float] = ()
        self.sessions: dict[int, int] = {}
        self._touched = _none(segment_count)
        self._is_mean = is_mean

    def _weight(self, part: Contribution) -> float:
        return part.weight if self._is_mean else 1.0

    def _values(self, part: Contribution) -> NDArray[Any] | None:
        return part.values if part.weight else None

    def _grown(self, touched: NDArray[np.uint8], part: Contribution) -> NDArray[np.uint8]:
        if self._values(part) is None:
            return touched
        return _all(len(touched)) if part.present is None else np.maximum(touched, part.present)

    def _reduced(
        self,
        accumulator: NDArray[Any] | None,
        last: Contribution | None,
        total_weight: float,
        touched: NDArray[np.uint8],
    ) -> Gradient:
        """The mean, or the sum, of the accumulator and the last contribution."""
        values = None if last is None else self._values(last)
        weight = 0.0 if last is None else self._weight(last)
        scale = 1.0
        if self._is_mean and total_weight > 0:
            if accumulator is None and weight == total_weight:
                weight = 1.0  # a single gradient is its own mean, to the bit
            else:
                scale = 1.0 / total_weight
        return Gradient(accumulator, values, weight, scale, touched)


class FastRound(_Sum):
    """Adds contributions as they arrive. Closes when the policy says so of those that are waited for.

    The first one is not copied if it is lent: the kernel that adds the second one reads it where it lies, unless it is to be
    widened. Nor is the last one, if it is lent: the update may be applied later, from where it lies, by whoever asks for its
    result first.

    Attributes:
        is_due: the round is complete, and yet to be applied.
    """

    def __init__(
        self,
        segment_count: int,
        *,
        is_mean: bool,
        accumulators: Accumulators,
        policy: Policy,
        waited: Callable[[], int],
    ) -> None:
        super().__init__(segment_count, is_mean=is_mean)
        self.is_due = False
        self._accumulators = accumulators
        self._policy = policy
        self._waited = waited
        self._contributors = 0
        self._voice: Voice | None = None  # the one that holds, of the contributors
        self._total_weight = 0.0
        self._accumulator: NDArray[Any] | None = None
        self._lent: Contribution | None = None
        self._last: Contribution | None = None

    def standing(self, part: Contribution) -> Outcome | None:
        """See Round. What an earlier session of the rank has pushed stays; a rank has no second gradient in a round."""
        session = self.sessions.get(part.rank)
        if session is None:
            return None
        return Outcome.DUPLICATE if session == part.session else Outcome.LATE

    def is_complete_with(self, part: Contribution) -> bool:
        """See Round."""
        return self._policy.closes(self._contributors | 1 << part.rank, self._waited())

    def is_complete(self) -> bool:
        """See Round."""
        return self._contributors != 0 and self._policy.closes(self._contributors, self._waited())

    def add(self, part: Contribution) -> None:
        """See Round."""
        is_first = self._accumulator is None and self._lent is None
        values = self._values(part)
        is_sum = values is not None and values.itemsize > HALF_BYTES and self._weight(part) == 1
        if is_first and part.is_lent and is_sum:
            self._lent = part
        else:
            self._add_values(part)
        self._count(part)

    def _add_values(self, part: Contribution) -> None:
        values = self._values(part)
        if values is None:
            return
        if self._lent is not None:
            self.take_over(self._lent.rank)
        if self._accumulator is not None:
            psd_core.accumulate(self._accumulator, values, self._weight(part))
        else:
            self._begin_sum(values, self._weight(part))

    def _count(self, part: Contribution) -> None:
        self._touched = self._grown(self._touched, part)
        self._contributors |= 1 << part.rank
        self._voice = self._voice_with(part)
        self._total_weight += part.weight
        self.sessions[part.rank] = part.session

    def _voice_with(self, part: Contribution) -> Voice:
        return part.voice if self._voice is None else min(self._voice, part.voice)

    def complete(self, part: Contribution) -> None:
        """Take the contribution that completes the round; it is lent, and added when the round is applied."""
        self._count(part)
        self._last = part
        self.is_due = True

    def take_over(self, rank: int) -> None:
        """Copy the gradient that this worker has lent. If it fails, nothing has changed."""
        if self._lent is not None and self._lent.rank == rank:
            assert self._lent.values is not None
            self._begin_sum(self._lent.values, 1.0)
            self._lent = None
        if self._last is not None and self._last.rank == rank:
            self._add_values(self._last)
            self._last = None

    def _begin_sum(self, values: NDArray[Any], weight: float) -> None:
        accumulator = self._accumulators.lend()
        psd_core.scaled_copy(accumulator, values, weight)
        self._accumulator = accumulator

    def gradient(self, last: Contribution | None) -> Gradient:
        """See Round."""
        sum_ = self._accumulator if self._lent is None else self._lent.values
        voice = self._voice if last is None else self._voice_with(last)
        self.scalars = () if voice is None else voice.scalars
        if last is None:
            return self._reduced(sum_, self._last, self._total_weight, self._touched)
        touched = self._grown(self._touched, last)
        return self._reduced(sum_, last, self._total_weight + last.weight, touched)

    def missing(self) -> int:
        """See Round."""
        return self._waited() & ~self._contributors

    def end(self) -> None:
        """See Round."""
        self._lent = self._last = None
        if self._accumulator is not None:
            self._accumulators.give_back(self._accumulator)
            self._accumulator = None


class ExactRound(_Sum):
    """Keeps contributions apart until shard 0 has decided which of them count.

    Attributes:
        members: mask of the workers that were decided on; None: not known here yet.
    """

    def __init__(
        self,
        segment_count: int,
        *,
        is_mean: bool,
        accumulators: Accumulators,
        waited: Callable[[], int],
    ) -> None:
        super().__init__(segment_count, is_mean=is_mean)
        self.members: int | None = None
        self._accumulators = accumulators
        self._waited = waited
        self._parts: dict[int, Contribution] = {}
        self._sum: NDArray[Any] | None = None

    def standing(self, part: Contribution) -> Outcome | None:
        """See Round. A half push of an earlier session does not count: its successor's replaces it, until that is decided."""
        staged = self._parts.get(part.rank)
        if self.members is not None and not self.members >> part.rank & 1:
            return Outcome.LATE
        if staged is not None and staged.session == part.session:
            return Outcome.STAGED if self.members is None else Outcome.DUPLICATE
        is_final = staged is not None and (staged.session > part.session or self.members is not None)
        return Outcome.LATE if is_final else None

    def is_complete_with(self, part: Contribution) -> bool:
        """See Round."""
        return self.members is not None and not self.members & ~(self._staged() | 1 << part.rank)

    def is_complete(self) -> bool:
        """See Round."""
        return self.members is not None and not self.members & ~self._staged()

    def add(self, part: Contribution) -> None:
        """See Round."""
        values = self._values(part)
        kept = None
        if values is not None:
            kept = self._accumulators.lend()
            psd_core.scaled_copy(kept, values)
        self._drop(part.rank)
        self._parts[part.rank] = Contribution(
            part.rank, part.session, part.clock, part.weight, kept, part.present, part.scalars, since=part.since
        )

    def gradient(self, last: Contribution | None) -> Gradient:
        """See Round. The sum runs in the order of the ranks, in double precision for the weights."""
        assert self.members is not None
        parts = dict(self._parts)
        if last is not None:
            parts[last.rank] = last
        counted = [parts[rank] for rank in sorted(parts) if self.members >> rank & 1]
        self.sessions = {part.rank: part.session for part in counted}
        if counted:
            self.scalars = min(part.voice for part in counted).scalars
        touched = self._touched
        for part in counted:
            touched = self._grown(touched, part)
        total_weight = sum(part.weight for part in counted)
        summands = [(part, values) for part in counted if (values := self._values(part)) is not None]
        if len(summands) < 2:
            return self._reduced(None, summands[0][0] if summands else None, total_weight, touched)
        if self._sum is None:
            self._sum = self._accumulators.lend()
        (first, first_values), *middle, (final, _) = summands
        psd_core.scaled_copy(self._sum, first_values, self._weight(first))
        for part, values in middle:
            psd_core.accumulate(self._sum, values, self._weight(part))
        return self._reduced(self._sum, final, total_weight, touched)

    def missing(self) -> int:
        """See Round."""
        return (self._waited() if self.members is None else self.members) & ~self._staged()

    def loss(self, round_: int, waited: int) -> StateLost | None:
        """The reason why the round can never close, or None: it lacks gradients of members that are no longer waited for."""
        lost = 0 if self.members is None else self.members & ~self._staged() & ~waited
        if not lost:
            return None
        ranks = [rank for rank in range(lost.bit_length()) if lost >> rank & 1]
        return StateLost(
            f"round {round_} cannot be completed: the gradients of workers {ranks} were decided to count, but were "
            "lost when this shard was killed, and those workers are gone",
            ranks=ranks,
        )

    def end(self) -> None:
        """See Round."""
        for rank in list(self._parts):
            self._drop(rank)
        if self._sum is not None:
            self._accumulators.give_back(self._sum)
            self._sum = None

    def _staged(self) -> int:
        return sum(1 << rank for rank in list(self._parts))  # of a copy: `missing` is asked without the lock

    def _drop(self, rank: int) -> None:
        part = self._parts.pop(rank, None)
        if part is not None and part.values is not None:
            self._accumulators.give_back(part.values)
