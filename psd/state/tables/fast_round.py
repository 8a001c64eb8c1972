"""The open round of tables under fast aggregation: gradients are summed by id as they arrive, in psd_core's core of the tables.

Who has contributed, weights, scalars and sums are the core's, so that pushes and steps (psd_core/steps.py) are in one round, in
any order. Gradients that are lent (lent_gradients.py) are here: while there are some no step counts, and once steps were
offered none are lent any more. Used under the lock of the tables' block. Must not know versions, leases or stores.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from typing_extensions import override

from psd.state.aggregation.agreement import Voice
from psd.state.aggregation.lent_gradients import Lent, Loan
from psd.state.aggregation.rounds import Contribution, CoreRound, Outcome, RoundSetting, Taken, Update
from psd.state.tables.rounds import Gradients, TableSums
from psd_core.steps import TablesCore


class FastRowsRound(CoreRound):
    """A round of rows that adds contributions as they arrive, as FastRound does those of a block.

    Args:
        core: of the tables; the round that it has open. sums: that core's. scalars: how many each group has.
    """

    _core: TablesCore

    def __init__(self, setting: RoundSetting, core: TablesCore, sums: TableSums, scalars: Sequence[int]) -> None:
        super().__init__(core.version, setting)
        self._core, self._members = core, setting.members
        self._sums = sums
        self._scalars = scalars
        self._first: Lent | None = None  # stands for the sums, as long as these have nothing
        self._last: Lent | None = None  # to be added to them
        core.open()

    @property
    def is_due(self) -> bool:  # type: ignore[override]
        """True if it is complete, and the first call that asks for its result is to apply it."""
        return self._core.is_due

    @override
    def standing(self, part: Contribution) -> Outcome | None:
        """Standing of a gradient. A rank has one gradient in a round; one that an earlier session has pushed stays."""
        session = self._core.session_of(part.rank)
        if not session:
            return None
        return Outcome.DUPLICATE if session == part.session else Outcome.LATE

    @override
    def take(self, part: Contribution) -> Taken:
        """Take a contribution. The last of several, if it is not lent, is added to the sums, and cannot be taken back from
        them; so it counts at once, even if there is no space for the update."""
        values: Gradients | None = self._values(part)
        weight, loan = self._weight(part), None if self._core.has_steps else part.loan
        scalars = tuple(itertools.chain(*part.scalars))  # before the sums change: nothing can be taken back from them
        has_others = self._core.has_sum or self._first is not None
        is_last = self._setting.policy.closes(self._core.contributors | 1 << part.rank, self.waited())
        if is_last and loan is None and not has_others:
            return Taken.LAST
        if is_last and loan is not None and not self._core.has_sum and (self._first is None or weight == 1):
            self._last = None if values is None else Lent(values, weight, loan)
        else:
            self._add(values, weight, None if is_last else loan)
        self._core.note(part.rank, part.session, part.since, part.weight, scalars)
        self._core.is_lent = self._is_lent
        if is_last and loan is not None:
            self._core.is_due = True
            return Taken.DUE
        return Taken.COMPLETE if is_last else Taken.OPEN

    @override
    def is_complete(self) -> bool:
        """True if the round closes now: because it has its contributors, or is void (everybody has skipped it)."""
        if self._core.is_due:
            return True
        if contributors := self._core.contributors:
            return self._setting.policy.closes(contributors, self.waited())
        return self._members.is_void(self._core.version)

    @override
    def update(self, last: Contribution | None) -> Update:
        sessions, total_weight, held = self._core.round
        voice = None if held is None else Voice(held[0], held[1], self._by_group(held[2]))
        sums = self._sums if self._core.has_sum else None if self._first is None else self._first.values
        values, weight = (None, 0.0) if self._last is None else (self._last.values, self._last.weight)
        if last is not None:
            values, weight = self._values(last), self._weight(last)
            total_weight += last.weight
            voice = last.voice if voice is None else min(voice, last.voice)
            sessions[last.rank] = last.session
        gradient = self._reduced(sums, values, weight, total_weight, self._touched)
        return Update(gradient, () if voice is None else voice.scalars, sessions)

    def _by_group(self, scalars: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        rest = iter(scalars)
        return tuple([tuple(itertools.islice(rest, count)) for count in self._scalars])

    # -- sums ----------------------------------------------------------------------------------------------------------

    @property
    def _is_lent(self) -> bool:
        return self._first is not None or self._last is not None

    def _add(self, values: Gradients | None, weight: float, loan: Loan | None) -> None:
        """Add gradients; None adds nothing. If this fails, the sums are the same, though the first ones may now be copies."""
        if values is None:
            return
        self._take_over_first()
        if loan is not None and weight == 1 and not self._core.has_sum:
            self._first = Lent(values, weight, loan)
        else:
            self._sums.add(values, weight)
            self._core.has_sum = True

    def _take_over_first(self) -> None:
        if self._first is not None:
            self._sums.add(self._first.values, self._first.weight)
            self._core.has_sum, self._first = True, None

    @override
    def take_over(self, loan: Loan) -> None:
        """Copy, or add to the sums, the gradients of this loan. If this fails, the sums are the same, and may still read
        them."""
        if self._first is not None and self._first.loan is loan:
            self._take_over_first()
        if self._last is not None and self._last.loan is loan:
            self._add(self._last.values, self._last.weight, None)
            self._last = None
        self._core.is_lent = self._is_lent

    @override
    def end(self) -> None:
        self._first = self._last = None  # the core has forgotten the rest
