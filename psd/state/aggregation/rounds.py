"""The open round of a block: the gradients that it has, and how they are summed.

`Round` is the interface to the block. `FastRound` adds gradients as they arrive; psd/state/aggregation/exact_rounds.py keeps
them apart until shard 0 has decided on them. Used under the block's lock. Must not know versions, workers' leases or pages.
"""

from __future__ import annotations

import enum
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psd.contract.errors import StateLost
from psd.contract.verdicts import Squares, Verdict
from psd.state.aggregation.agreement import Voice
from psd.state.aggregation.consistency import Policy
from psd.state.aggregation.lent_gradients import Loan, RoundSum
from psd.state.aggregation.rules import Gradient, Rule
from psd.state.aggregation.sampling import Sampling
from psd.state.pages import Lender
from psd.state.workers.membership import Membership
from psd_core.arena import BlockCore, Page
from psd_core.codecs import Encoded
from psd_core.steps import TablesCore


class Contribution(NamedTuple):
    """One worker's part of a push for one block.

    Attributes:
        session: the session that began the push. Rank, session and clock are the push's name.
        weight: number of samples that the gradient was computed from; with 0 the worker takes part and adds nothing.
        values: (n,) gradient in the block's gradient_dtype, zero where not present; None: no gradient in this block at all.
            Or Encoded: one that is all present, still in its codec. For the tables' block, Gradients
            (psd/state/tables/rounds.py).
        present: (k,) uint8, the segments with a gradient; None: all.
        scalars: the scalars of the block's group; for the tables' block, those of all groups.
        version_read: version of the parameters that the gradient was computed from; None: not known.
        scale: without rounds: the gradient is multiplied by it.
        loan: allows the round to read the values later, where they lie; None: the values are gone when this call goes on.
        sent_by: the session that sends the push, which may be a later one.
        since: as in Voice.
        norms: norm of the gradient of each tensor that is merged by direction, by JobSpec.directed_tensors, over all shards.
        already: the numbers were not sent, because this block has the push.
    """

    rank: int
    session: int
    clock: int
    weight: float
    values: Any
    present: NDArray[np.uint8] | None
    scalars: Sequence[Any]
    version_read: int | None = None
    scale: float = 1.0
    loan: Loan | None = None
    sent_by: int = 0
    since: int = 0
    norms: Sequence[float] = ()
    already: bool = False

    @property
    def voice(self) -> Voice:
        """The scalars that this worker proposes for the round."""
        return Voice(self.since, self.rank, self.scalars)


class Outcome(enum.IntEnum):
    """The outcome of a contribution."""

    COUNTED = 0
    DUPLICATE = 1
    LATE = 2
    EARLY = 3  # its round is not open yet; nothing changed
    STAGED = 4  # EXACT: kept until it is decided whether it counts


class Taken(enum.Enum):
    """The state of a round after it was offered a contribution."""

    OPEN = enum.auto()  # it waits for others
    DUE = enum.auto()  # complete; the first call that asks for the result applies it
    COMPLETE = enum.auto()  # to be applied now
    LAST = enum.auto()  # to be applied now, with the contribution, which was not taken: if that fails, nothing has changed


class Unmeasured(enum.Enum):
    """The reason why a round cannot be measured here now."""

    OPEN = enum.auto()  # gradients are still to come
    CLOSED = enum.auto()


class Update(NamedTuple):
    """The update that a round makes: its gradient, the scalars to use, and by rank the sessions whose pushes it counts."""

    gradient: Gradient
    scalars: Sequence[Any]
    sessions: Mapping[int, int]


@functools.lru_cache(8192)
def segments(count: int, value: int) -> NDArray[np.uint8]:
    """A read-only array of `count` times `value` (1: all segments, 0: none). Cached: making it costs more than using it."""
    array = np.full(count, value, np.uint8)
    array.flags.writeable = False
    return array


@dataclass(frozen=True, slots=True)
class RoundSetting:
    """The facts that all rounds of a block share.

    Attributes:
        segment_ends, rule: those of the block.
        is_mean: True: an update applies the mean of the gradients, weighted by samples. False: their sum.
        ratio_places: (k,), for a layer-wise rule, or tensors that have a merge of their own: for each segment of the block, the
            place of its tensor in a verdict; -1: it has none.
        momentum: returns, for the scalars of the round, the slot with the mean of the gradients so far, as the open round finds
            it, and the factor by which it is that mean; None if the rule has no such slot.
        sampling: chooses who takes part in a round; None: everybody does.
    """

    segment_ends: NDArray[np.uint32]
    rule: Rule
    is_mean: bool
    policy: Policy
    accumulators: Lender
    members: Membership
    ratio_places: NDArray[np.intp] | None = None
    momentum: Callable[[Sequence[Any]], tuple[NDArray[Any], float]] | None = None
    sampling: Sampling | None = None


class Round(ABC):
    """An open round of one block.

    Args:
        number: the round's number; also the block's version while it is open.

    Attributes:
        is_due: True if it is complete, and the first call that asks for its result is to apply it.
        is_staging: True while it is not known whether the gradients that it takes count.
    """

    is_due = False
    is_staging = False

    def __init__(self, number: int, setting: RoundSetting) -> None:
        self._number = number
        self._setting = setting
        self._touched = segments(len(setting.segment_ends), 0)

    # -- gradients -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def standing(self, part: Contribution) -> Outcome | None:
        """None if the round takes this contribution; else why not: it is LATE, or has come before (DUPLICATE, STAGED)."""

    @abstractmethod
    def take(self, part: Contribution) -> Taken:
        """Take a contribution. If it fails, nothing has changed."""

    @abstractmethod
    def is_complete(self) -> bool:
        """True if the round is to be applied now, with what it has."""

    @abstractmethod
    def update(self, last: Contribution | None) -> Update:
        """The update that the round makes, with `last`, the contribution that completes it but was not taken, if there is one.

        If this fails, nothing has changed.
        """

    @abstractmethod
    def missing(self) -> int:
        """Mask of the workers that the round waits for. Also asked without the lock."""

    @abstractmethod
    def end(self) -> None:
        """Give the memory back."""

    def waited(self) -> int:
        """Mask of the workers that are waited for in this round, whether they have contributed or not."""
        return self._setting.members.waited_in(self._number)

    def asked(self) -> int:
        """Mask of the workers that are to contribute to this round."""
        setting = self._setting
        return setting.members.waited_in(self._number) if setting.sampling is None else setting.sampling.chosen_in(self._number)

    @abstractmethod
    def session_of(self, rank: int, *, is_committed: bool) -> int:
        """The session of this rank whose gradient counts in this round, unless the process dies before it closes; 0: none.

        Args:
            is_committed: EXACT: shard 0 knows that all shards have the gradient.
        """

    # -- what only some kinds of rounds do -----------------------------------------------------------------------------

    def take_over(self, loan: Loan) -> None:
        """FAST: copy the gradients of this loan that are still needed. If this fails, nothing has changed."""
        del loan

    def decide(self, members: int) -> None:
        """EXACT: note that these workers (a bit mask) are the round's members."""
        raise NotImplementedError

    def loss(self) -> StateLost | None:
        """EXACT: the error if the round can never close, because gradients of members that are gone are lost; else None."""
        return None

    def measure(self, page: Page | None, under: Verdict | None) -> Squares | Unmeasured:
        """EXACT, with verdicts: the sum of squares of the gradient; or, `under` a verdict, two sums for each segment."""
        raise NotImplementedError

    def judge(self, verdict: Verdict) -> None:
        """EXACT, with verdicts: note the verdict, as which the round is to be applied."""
        raise NotImplementedError

    # -- sums ----------------------------------------------------------------------------------------------------------

    def _weight(self, part: Contribution) -> float:
        return part.weight if self._setting.is_mean else 1.0

    def _values(self, part: Contribution) -> Any:
        return part.values if part.weight else None

    def _grown(self, touched: NDArray[np.uint8], part: Contribution) -> NDArray[np.uint8]:
        if self._values(part) is None:
            return touched
        return segments(len(touched), 1) if part.present is None else np.maximum(touched, part.present)

    def _reduced(
        self,
        accumulator: Any,
        last: Any,
        weight: float,
        total_weight: float,
        touched: NDArray[np.uint8],
    ) -> Gradient:
        """The mean, or the sum, of the accumulator, which is weighted already, and of `weight` times `last`."""
        scale = 1.0
        if self._setting.is_mean and total_weight > 0:
            if accumulator is None and weight == total_weight:
                weight = 1.0  # a single gradient is its own mean, to the bit
            else:
                scale = 1.0 / total_weight
        return Gradient(accumulator, last, weight, scale, touched)


class CoreRound(Round):
    """A round whose contributors are known to a core in C, which steps change, too; it is the one that the core has open."""

    _core: BlockCore | TablesCore
    _members: Membership

    @override
    def waited(self) -> int:
        return self._members.waited_in(self._core.version)

    @override
    def asked(self) -> int:
        return self.waited()

    @override
    def missing(self) -> int:
        return self.waited() & ~self._core.contributors

    @override
    def session_of(self, rank: int, *, is_committed: bool) -> int:
        del is_committed
        return self._core.session_of(rank)


class FastRound(Round):
    """Adds contributions as they arrive. Closes when the policy says so, given its contributors and who is waited for.

    If the contribution that completes it is lent, it is not added: the first call that asks for the result applies the update.

    Attributes:
        sessions: the sessions of the contributions, by rank.
    """

    def __init__(self, number: int, setting: RoundSetting) -> None:
        super().__init__(number, setting)
        self.sessions: dict[int, int] = {}
        self._contributors = 0
        self._voice: Voice | None = None  # of the contributors' voices, the one that holds
        self._total_weight = 0.0
        self._sum = self._new_sum()

    def _new_sum(self) -> RoundSum:
        return RoundSum(self._setting.accumulators)

    @override
    def standing(self, part: Contribution) -> Outcome | None:
        """Standing of a gradient. A rank has one gradient in a round; one that an earlier session has pushed stays."""
        session = self.sessions.get(part.rank)
        if session is None:
            return None
        return Outcome.DUPLICATE if session == part.session else Outcome.LATE

    @override
    def session_of(self, rank: int, *, is_committed: bool) -> int:
        del is_committed
        return self.sessions.get(rank, 0)

    @override
    def take(self, part: Contribution) -> Taken:
        values, weight, noted = self._values(part), self._weight(part), self._noted(part)
        is_last, is_encoded = self._closes_with(part), isinstance(values, Encoded)
        if not is_last or is_encoded:
            self._sum.add(values, weight, part.loan)
            self.is_due = is_last and part.loan is not None
        elif part.loan is not None:
            self._sum.complete(values, weight, part.loan)
            self.is_due = True
        else:
            return Taken.LAST
        self._note(part, *noted)
        return Taken.DUE if self.is_due else Taken.COMPLETE if is_last else Taken.OPEN

    def _closes_with(self, part: Contribution) -> bool:
        return self._setting.policy.closes(self._contributors | 1 << part.rank, self.waited())

    def _noted(self, part: Contribution) -> tuple[NDArray[np.uint8], Voice]:
        """Arguments for `_note`, which take memory: made before the sum changes, because nothing can be taken back from it."""
        return self._grown(self._touched, part), self._voice_with(part)

    def _note(self, part: Contribution, touched: NDArray[np.uint8], voice: Voice) -> None:
        self._touched, self._voice = touched, voice
        self._contributors |= 1 << part.rank
        self._total_weight += part.weight
        self.sessions[part.rank] = part.session

    def _voice_with(self, part: Contribution) -> Voice:
        return part.voice if self._voice is None else min(self._voice, part.voice)

    @override
    def is_complete(self) -> bool:
        """True if the round closes now: because it has its contributors, or is void (everybody has skipped it)."""
        if self.is_due:
            return True
        if self._contributors:
            return self._setting.policy.closes(self._contributors, self.waited())
        return self._setting.members.is_void(self._number)

    @override
    def update(self, last: Contribution | None) -> Update:
        accumulator, values, weight = self._sum.terms
        if last is None:
            gradient = self._reduced(accumulator, values, weight, self._total_weight, self._touched)
            return Update(gradient, () if self._voice is None else self._voice.scalars, self.sessions)
        values, weight = self._values(last), self._weight(last)
        total_weight, touched = self._total_weight + last.weight, self._grown(self._touched, last)
        gradient = self._reduced(accumulator, values, weight, total_weight, touched)
        return Update(gradient, self._voice_with(last).scalars, {**self.sessions, last.rank: last.session})

    @override
    def missing(self) -> int:
        return self.waited() & ~self._contributors

    @override
    def take_over(self, loan: Loan) -> None:
        self._sum.take_over(loan)

    @override
    def end(self) -> None:
        self._sum.end()
