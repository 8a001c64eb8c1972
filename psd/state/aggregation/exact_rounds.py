"""The open round of a block with exact aggregation: it keeps gradients apart until it is settled how they count.

`ExactRound` counts only the gradients of the workers that shard 0 has decided on, and adds them in the order of the ranks, so
that the result depends on nothing else. `MeasuredRound` also waits for a verdict; jobs whose updates need norms over the whole
gradient use it. `WeighedRound` gives each member's gradient of each tensor a factor of its own.
psd/state/aggregation/settlement.py tells how rounds are decided and judged. Used under the block's lock; must not know
versions, workers' leases or shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import psd_core
from psd.contract.errors import StateLost
from psd.contract.verdicts import Squares, Verdict
from psd.state.aggregation.consistency import ranks_in
from psd.state.aggregation.lent_gradients import copy_of
from psd.state.aggregation.rounds import Contribution, Outcome, Round, RoundSetting, Taken, Unmeasured, Update
from psd.state.aggregation.rules import Gradient, Layerwise
from psd_core.arena import Page
from psd_core.codecs import Encoded


class ExactRound(Round):
    """Keeps contributions apart until it is decided which of them count."""

    def __init__(self, number: int, setting: RoundSetting) -> None:
        super().__init__(number, setting)
        self.is_staging = True
        self._decided: int | None = None  # mask of the workers that count; None: not known here yet
        self._parts: dict[int, Contribution] = {}
        self._sum: Any = None

    @override
    def decide(self, members: int) -> None:
        self._decided, self.is_staging = members, False

    @override
    def standing(self, part: Contribution) -> Outcome | None:
        """Standing of a gradient. Until the round is decided, a push of a later session replaces the half push of an earlier
        one."""
        if self._decided is not None and not self._decided >> part.rank & 1:
            return Outcome.LATE
        staged = self._parts.get(part.rank)
        if staged is None:
            return None
        if staged.session == part.session:
            return Outcome.STAGED if self._decided is None else Outcome.DUPLICATE
        return Outcome.LATE if staged.session > part.session or self._decided is not None else None

    @override
    def session_of(self, rank: int, *, is_committed: bool) -> int:
        part = self._parts.get(rank)
        counts = is_committed if self._decided is None else self._decided >> rank & 1
        return part.session if part is not None and counts else 0

    @override
    def take(self, part: Contribution) -> Taken:
        is_last = self._decided is not None and not self._decided & ~(self._staged() | 1 << part.rank)
        if is_last and not isinstance(part.values, Encoded):
            return Taken.LAST
        self._keep(part)
        return Taken.COMPLETE if is_last else Taken.OPEN

    def _keep(self, part: Contribution) -> None:
        values = self._values(part)
        kept = None if values is None else self._copied(values)
        self._drop(part.rank)
        self._parts[part.rank] = part._replace(values=kept, loan=None)

    def _copied(self, values: Any) -> Any:
        kept = self._setting.accumulators.lend()
        copy_of(kept, values)
        return kept

    @override
    def is_complete(self) -> bool:
        return self._has_all

    @property
    def _has_all(self) -> bool:
        """True with the gradients of all members."""
        return self._decided is not None and not self._decided & ~self._staged()

    @override
    def update(self, last: Contribution | None) -> Update:
        """The sum in the order of the ranks; weights are added in double precision."""
        counted = self._counted(last)
        touched = self._touched
        for part in counted:
            touched = self._grown(touched, part)
        total_weight = sum(part.weight for part in counted)
        summands = [(values, self._weight(part)) for part in counted if (values := self._values(part)) is not None]
        return self._update_of(counted, self._reduced(*self._summed(summands), total_weight, touched))

    def _counted(self, last: Contribution | None = None) -> list[Contribution]:
        """The members' contributions, in the order of the ranks."""
        assert self._decided is not None
        parts = dict(self._parts)
        if last is not None:
            parts[last.rank] = last
        return [parts[rank] for rank in sorted(parts) if self._decided >> rank & 1]

    @staticmethod
    def _scalars_of(counted: Sequence[Contribution]) -> Sequence[Any]:
        return min(part.voice for part in counted).scalars if counted else ()

    def _update_of(self, counted: Sequence[Contribution], gradient: Gradient) -> Update:
        return Update(gradient, self._scalars_of(counted), {part.rank: part.session for part in counted})

    def _summed(self, summands: list[tuple[Any, float]]) -> tuple[Any, Any, float]:
        """The weighted sum of all but the last, and the last with its weight."""
        final, weight = summands.pop() if summands else (None, 0.0)
        if not summands:
            return None, final, weight
        if self._sum is None:
            self._sum = self._setting.accumulators.lend()
        psd_core.scaled_copy(self._sum, *summands[0])
        for summand in summands[1:]:
            psd_core.accumulate(self._sum, *summand)
        return self._sum, final, weight

    @override
    def missing(self) -> int:
        return (self.asked() if self._decided is None else self._decided) & ~self._staged()

    @override
    def loss(self) -> StateLost | None:
        lost = 0 if self._decided is None else self._decided & ~self._staged() & ~self.waited()
        if not lost:
            return None
        ranks = ranks_in(lost)
        return StateLost(
            f"round {self._number} cannot be completed: the gradients of workers {ranks} were decided to count, but were "
            "lost when this shard was killed, and those workers are gone",
            ranks=ranks,
        )

    @override
    def end(self) -> None:
        for rank in list(self._parts):
            self._drop(rank)
        if self._sum is not None:
            self._setting.accumulators.give_back(self._sum)
            self._sum = None

    def _staged(self) -> int:
        return sum(1 << rank for rank in list(self._parts))  # over a copy, because `missing` is asked without the lock

    def _drop(self, rank: int) -> None:
        part = self._parts.pop(rank, None)
        if part is not None and part.values is not None:
            self._give_back(part.values)

    def _give_back(self, kept: Any) -> None:
        self._setting.accumulators.give_back(kept)


class MeasuredRound(ExactRound):
    """Also waits for a verdict. It can be measured once it has all members' gradients, and is complete with the verdict."""

    def __init__(self, number: int, setting: RoundSetting) -> None:
        super().__init__(number, setting)
        self._verdict: Verdict | None = None
        self._whole: Update | None = None
        self._squares: dict[bool, Squares] = {}

    @override
    def judge(self, verdict: Verdict) -> None:
        self._verdict = verdict

    @override
    def take(self, part: Contribution) -> Taken:
        """Keep the gradient. Never returns Taken.LAST, because all gradients have to be measured together."""
        self._keep(part)
        return Taken.COMPLETE if self.is_complete() else Taken.OPEN

    @override
    def is_complete(self) -> bool:
        """True once all members' gradients and the verdict are here. A round without members needs neither."""
        return self._has_all and (self._decided == 0 or self._verdict is not None)

    @override
    def update(self, last: Contribution | None) -> Update:
        """The update as the verdict has it: scaled, or with no gradient if the round is skipped."""
        assert last is None
        whole, verdict = self._gathered(), self._verdict
        if verdict is None:
            return whole
        if verdict.skip:
            return whole._replace(gradient=replace(whole.gradient, accumulator=None))
        places = self._setting.ratio_places
        ratios = None if places is None else np.array(verdict.ratios)[places]
        return whole._replace(gradient=replace(whole.gradient, scale=verdict.scale, ratios=ratios))

    @override
    def measure(self, page: Page | None, under: Verdict | None) -> Squares | Unmeasured:
        if not self._has_all:
            return Unmeasured.OPEN
        setting, of_gradient = self._setting, under is None
        if of_gradient not in self._squares:
            gradient, scalars, _ = self._gathered()
            if under is not None:
                assert isinstance(setting.rule, Layerwise)
                assert page is not None
                judged = replace(gradient, scale=under.scale)
                found = setting.rule.squares(page, judged, setting.segment_ends, scalars, setting.accumulators)
                self._squares[of_gradient] = found
            elif gradient.accumulator is None:
                self._squares[of_gradient] = [0]
            else:
                total = self._squares_of(gradient.accumulator)
                self._squares[of_gradient] = None if total is None else [total]
        return self._squares[of_gradient]

    def _squares_of(self, values: Any) -> int | None:
        return psd_core.square_sum(values)

    @override
    def end(self) -> None:
        self._whole = None
        super().end()

    def _gathered(self) -> Update:
        """The round's update with its gradient reduced to one array: the same numbers that the kernel would compute."""
        if self._whole is None:
            found = super().update(None)
            gradient = Gradient(self._reduced_to_one(found.gradient), None, 1.0, 1.0, found.gradient.touched)
            self._whole = found._replace(gradient=gradient)
        return self._whole

    def _reduced_to_one(self, found: Gradient) -> Any:
        values, last = found.accumulator, found.last
        if last is None or (values is None and (found.weight, found.scale) == (1.0, 1.0)):
            return values if last is None else last
        if values is None:
            values = self._sum = self._setting.accumulators.lend()
            psd_core.scaled_copy(values, last, found.weight)
        else:
            psd_core.accumulate(values, last, found.weight)
        psd_core.scaled_copy(values, values, found.scale)
        return values


class WeighedRound(MeasuredRound):
    """Adds the members' gradients with a factor for each member and segment."""

    def _weighed(self, counted: Sequence[Contribution], factors: NDArray[np.float64]) -> Gradient:
        """The sum of the members' gradients, in the order of the ranks. factors: (members, segments)."""
        touched = self._touched
        total: Any = None
        for part, row in zip(counted, np.ascontiguousarray(factors), strict=True):
            values = self._values(part)
            touched = self._grown(touched, part)
            if values is None:
                continue
            is_first, total = total is None, self._total()
            psd_core.weigh_segments(total, values, self._setting.segment_ends, row, add=not is_first)
        return Gradient(total, None, 1.0, 1.0, touched)

    def _total(self) -> Any:
        if self._sum is None:
            self._sum = self._setting.accumulators.lend()
        return self._sum


def shares_of(counted: Sequence[Contribution]) -> NDArray[np.float64]:
    """(members, 1) each member's part of the weight."""
    weights = np.array([part.weight for part in counted])
    return (weights / (weights.sum() or 1.0))[:, None]
