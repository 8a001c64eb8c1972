"""Common part of all that pushes cover: version, open round, and the gradients counted. The life of a gradient ends here.

`Trained` has what a block of parameters and a shard's part of the tables share: rounds, waits, the dedup by the name of a push.
What an update writes, and where the dedup window is kept, each of them says: psd/state/aggregation/block.py for pages,
psd/state/tables/block.py for rows.

Every method runs under the own lock of what is trained, which is held while the kernel works (the GIL is not), so blocks
proceed in parallel and a block is updated by one thread at a time. The dedup window has, per rank, the session and clock of the
last push counted. It changes with the parameters, in one step, so a push may be sent any number of times, also to a shard that
was killed and came back. When another arena has taken the place of this one, whoever is still about it gets StoreClosed.

Nothing under that lock takes the shard's (see core.py). Must not know sessions' validity, leases, messages, pages or rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import OutOfSpace, RuleFailed, StateLost
from psd.contract.verdicts import Squares, Verdict
from psd.state import locks
from psd.state.aggregation.consistency import Policy
from psd.state.aggregation.lent_gradients import Loan
from psd.state.aggregation.rounds import Contribution, Outcome, Round, Taken, Unmeasured, Update
from psd.state.aggregation.rules import rule_failed
from psd.state.aggregation.staleness import Ages
from psd.state.aggregation.version_waits import Take, VersionWaits
from psd.state.counts import RoundTimes
from psd.state.pages import Counted
from psd.state.tickets import Ticket
from psd.state.workers.membership import Membership
from psd_core.arena import Page, StoreClosed


@dataclass(frozen=True, slots=True)
class RoundServices:
    """The facts and services that all that is trained in a job shares.

    Attributes:
        is_mean: see RoundSetting.
        on_lost: told why an open round can never close; True if its waits will be ended by somebody else.
    """

    members: Membership
    policy: Policy
    is_mean: bool
    on_lost: Callable[[StateLost], bool]


class Trained(ABC):
    """A block, or a shard's part of the tables.

    Args:
        open_round: makes the round of that number.
        version: that it begins with.

    Attributes:
        index: as pushes name it.
        is_trained: something is pushed to it. False of blocks of static groups.
        times: of its rounds.
        version: updates applied; under SYNC also the number of the open round.
        ratio_places: see RoundSetting; None unless the rule is layer-wise.
        lacks_space: a round is complete and could not be applied for lack of space; to be settled again when there is some.
        ages: of the gradients, where there are no rounds.
    """

    is_trained = True
    ratio_places: NDArray[np.intp] | None = None

    def __init__(
        self,
        index: int,
        services: RoundServices,
        open_round: Callable[[int], Round],
        times: RoundTimes,
        version: int,
    ) -> None:
        self.index = index
        self.times = times
        self.ages = Ages(index)
        self.lock = locks.new(locks.Level.BLOCK, index)
        self._members = services.members
        self._policy = services.policy
        self._on_lost = services.on_lost
        self._open_round = open_round
        self._waits = VersionWaits()
        self._failure: RuleFailed | None = None  # why the open round could not be closed
        self.lacks_space = False
        self._open(version)

    def _open(self, version: int) -> None:
        self.version = version
        self._round = self._open_round(version)

    # -- what each says for itself ------------------------------------------------------------------------------------------

    @abstractmethod
    def _counted(self, rank: int) -> Counted:
        """The last push of a rank that counts, but for the open round."""

    @abstractmethod
    def last_counted(self, rank: int) -> Counted:
        """The last push of a rank that counts here by now. Takes no lock: another call may hold it while its kernel works."""

    @abstractmethod
    def _alone(self, part: Contribution, age: int) -> Update:
        """Without rounds: a push as an update of its own."""

    @abstractmethod
    def _write(self, update: Update, clock: int) -> int:
        """Write an update, with the sessions whose push of `clock` it counts, and make it current; the version with it."""

    @abstractmethod
    def _measured(self, under: Verdict | None) -> Squares | Unmeasured:
        """Sums of squares of the open round, see Round."""

    @abstractmethod
    def read(self, version_min: int) -> tuple[int, Page] | tuple[int, None] | None:
        """The version, and what there is to give back of it; None while it is below `version_min`.

        Raises OutOfSpace if the version is there but for the room to write it; the same call may succeed later.
        """

    # -- gradients ---------------------------------------------------------------------------------------------------------

    def contribute(self, part: Contribution) -> Outcome:
        """Count one worker's gradient, and apply the update if that completes one.

        If the contribution is lent, that is left to the first one who asks for the result, or to `take_over`: the threads that
        wait for a round's blocks then share the work.

        If it raises (no memory, OutOfSpace), nothing was counted, and the push may be sent again.
        """
        with self.lock:
            if self._is_due:
                self._apply_due()
            elif self._failure is not None:
                self._settle()  # a round that has all its gradients, and whose rule has raised, tries again
            session, clock = self._counted(part.rank)
            if session == part.session and clock > part.clock:
                return Outcome.DUPLICATE
            if session > part.session or self._members.session_of(part.rank) != part.sent_by:
                # The rank has joined again between the check of the session and now, and its new session has been told in which
                # round it begins: see `entry_round`.
                return Outcome.LATE
            if not self._policy.has_rounds:
                return self._apply_alone(part)
            if part.clock != self.version:
                return Outcome.EARLY if part.clock > self.version else Outcome.LATE
            round_ = self._round
            standing = round_.standing(part)
            if standing is not None:
                return standing
            self.times.on_gradient(part.rank, round_.waited)
            if part.loan is not None:
                part.loan.to(self.take_over, self.version)
            taken = round_.take(part)
            if taken is Taken.DUE:
                self._waits.within_reach(self.version + 1)
            elif taken is not Taken.OPEN:
                if taken is Taken.LAST:
                    self._apply(round_.update(part), self.version)
                self._settle()
            return Outcome.STAGED if round_.is_staging else Outcome.COUNTED

    def _apply_alone(self, part: Contribution) -> Outcome:
        """Without rounds: apply a push as an update of its own. The mean, or the sum, of one gradient is that gradient."""
        age = self.ages.age(part.rank, part.version_read, self.version)
        self._apply(self._alone(part, age or 0), part.clock)
        self.ages.count(age)
        return Outcome.COUNTED

    def take_over(self, loan: Loan, round_: int) -> None:
        """Copy what was lent by this loan to a round, unless that has closed.

        A round that is due is applied, unless there is no space: whoever asks for its result then tries again, and is told.
        """
        if self.version > round_:
            return  # without the lock, which another call may hold while its kernel works
        with self.lock:
            self._round.take_over(loan)
            self._settle()

    def entry_round(self, rank: int) -> int:
        """FAST: the first round in which a new session of the rank takes part: the one after the open round, if that has a
        gradient of it.

        Gradients of its earlier sessions that are still on their way are refused from now on.
        """
        with self.lock:
            return self.version + (self._round.session_of(rank, is_committed=True) > 0)

    def counted(self, rank: int, *, is_committed: bool) -> Counted:
        """The last push of a rank that counts here, or will when the open round closes. is_committed: see Round.session_of."""
        with self.lock:
            session = self._round.session_of(rank, is_committed=is_committed)
            return (session, self.version + 1) if session else self._counted(rank)

    def decide(self, round_: int, members: int) -> None:
        """EXACT: let the workers `members` (a bit mask) make up a round; it closes when their gradients are here."""
        with self.lock:
            if round_ == self.version:
                self._round.decide(members)
                self._settle()

    def judge(self, verdict: Verdict) -> None:
        """EXACT: apply a round by its verdict, once its members' gradients are here."""
        with self.lock:
            if verdict.round == self.version:
                self._round.judge(verdict)
                self._settle()

    def measure(self, round_: int, under: Verdict | None) -> Squares | Unmeasured:
        """Sums of squares of a decided round, see Round; StateLost if it cannot be completed any more."""
        with self.lock:
            if round_ < self.version:
                return Unmeasured.CLOSED
            found = Unmeasured.OPEN if round_ > self.version else self._measured(under)
            if found is Unmeasured.OPEN:
                error = self._round.loss()
                if error is not None and not self._on_lost(error):
                    raise error
            return found

    def settle(self) -> None:
        """Close the rounds that are complete now: somebody left, expired or skipped rounds."""
        with self.lock:
            self._settle()

    def _settle(self) -> None:
        self._fail_if_lost()
        self.lacks_space = False
        try:
            while self._round.is_complete():
                self._apply(self._round.update(None), self.version)
        except RuleFailed:
            return  # those who wait for the round have been told
        except OutOfSpace:
            # Whoever waits for the round's result asks now, which tries again, and is told if there is still no room.
            self.lacks_space = True
            self._waits.within_reach(self.version + 1)
        except StoreClosed:
            return  # those who wait have been told that the job goes back

    def _fail_if_lost(self) -> None:
        """EXACT: end the waits for a round that cannot be completed any more."""
        error = self._round.loss()
        if error is not None and not self._on_lost(error):
            self._waits.fail(error)

    @property
    def _is_due(self) -> bool:
        return self.lacks_space or self._round.is_due

    def _apply_due(self) -> None:
        """Apply the round that is complete, if it still is; may be called again after an error."""
        self.lacks_space = False
        if self._round.is_complete():
            try:
                self._apply(self._round.update(None), self.version)
            except OutOfSpace:
                self.lacks_space = True
                raise
        self._settle()

    def _apply(self, update: Update, clock: int) -> None:
        """Write an update, and open the next round."""
        version = self._write(update, clock)
        if not self._policy.has_rounds:
            self.version = version
            return
        closed, self._failure = self._round, None
        self._open(version)
        self._waits.reached(version)
        self.times.on_close(self._round.waited())
        closed.end()

    def _note_failed(self, cause: BaseException, rule: str, kind: str, name: str) -> RuleFailed:
        """The error for a user's rule that has raised; see rule_failed. A round stays open then: whoever waits for it, now or
        later, learns why, and a worker that sends again tries again."""
        error = rule_failed(cause, rule, kind, name, self.version, is_known=self._failure is not None)
        if self._policy.has_rounds:
            self._failure = error
            self._waits.fail(error)
        return error

    # -- waits -------------------------------------------------------------------------------------------------------------

    def at_version(self, version: int, whose: object, take: Take) -> bool:
        """Call `take` when the version is reached; False if it is passed.

        It runs under this lock; not any more after `not_at_version` with the same two arguments.
        """
        with self.lock:
            if self.version > version:
                return False
            if self.version == version:
                take()
            else:
                self._waits.add_take(version, whose, take)
            return True

    def not_at_version(self, version: int, whose: object) -> None:
        """Cancel the wait for that version."""
        with self.lock:
            self._waits.drop_take(version, whose)

    def _reach(self, version_min: int) -> bool:
        """True if the version is there, or is now: under the lock. Raises OutOfSpace as `read` does."""
        if self.version < version_min and self._is_due:
            self._apply_due()
        return self.version >= version_min

    def when(self, version: int, ticket: Ticket) -> None:
        """Resolve the ticket when the block reaches the version."""
        with self.lock:
            if self.version + self._is_due >= version:
                ticket.resolve()
            else:
                self._waits.add(version, ticket)
                self._fail_if_lost()
                if self._failure is not None:
                    ticket.fail(self._failure)

    def missing_in(self, round_: int) -> int:
        """Mask of the workers whose gradients the open round lacks; 0 if `round_` has closed. Takes no lock: for messages."""
        if round_ < self.version:
            return 0
        return self._round.missing()
