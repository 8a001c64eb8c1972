"""Common part of everything that can be pushed to: its version, its open round, and which gradients it has counted.

`Trained` has what a block of parameters and a shard's part of the tables share: rounds, waits, and the dedup by the name of a
push. Its subclasses define what an update writes, and where the dedup window is kept: psd/state/aggregation/block.py for pages,
psd/state/tables/block.py for rows.

Every method runs under a lock that each block has for itself. The lock is held while the kernel works (the GIL is not), so
blocks proceed in parallel and a block is updated by one thread at a time. The dedup window has, per rank, the session and clock
of the last push counted. It changes with the parameters, in one step, so a push may be sent any number of times, also if the
shard was killed and came back. Calls that still use this arena when another one takes its place get StoreClosed.

No code takes the shard's lock while it holds a block's (see core.py). Must not know which sessions are valid, leases, messages,
pages or rows.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import InvalidRequest, OutOfSpace, RuleFailed, StateLost
from psd.contract.verdicts import Squares, Verdict
from psd.state import locks
from psd.state.aggregation.consistency import Policy
from psd.state.aggregation.lent_gradients import Loan
from psd.state.aggregation.rounds import Contribution, Outcome, Round, Taken, Unmeasured, Update
from psd.state.aggregation.rules import rule_failed
from psd.state.aggregation.sampling import Sampling
from psd.state.aggregation.staleness import Ages
from psd.state.aggregation.version_waits import Take, VersionWaits
from psd.state.counts import RoundTimes
from psd.state.pages import Counted
from psd.state.tickets import Ticket
from psd.state.workers.membership import Membership
from psd_core.arena import Page, StoreClosed


@dataclass(frozen=True, slots=True)
class RoundServices:
    """The facts and services that all blocks of a job, and its tables' block, share.

    Attributes:
        is_mean, sampling: as in RoundSetting.
        on_lost: called with the reason why an open round can never close; returns True if the shard will end the waits for it.
        on_passed: such a round is passed over instead: its version is never read, and the next round sets everything anew.
            Called with the version and the reason. None: rounds are not.
    """

    members: Membership
    policy: Policy
    is_mean: bool
    on_lost: Callable[[StateLost], bool]
    sampling: Sampling | None = None
    on_passed: Callable[[int, StateLost], None] | None = None


class Trained(ABC):
    """A block of parameters, or a shard's part of the tables (the tables' block).

    Args:
        open_round: makes the round with a given number.
        version: the version to begin with.

    Attributes:
        index: as pushes name it.
        is_trained: something is pushed to it. False of blocks of static groups.
        times: of its rounds.
        version: updates applied; under SYNC also the number of the open round.
        ratio_places: see RoundSetting; None unless a verdict has some for the block.
        lacks_space: a round is complete and could not be applied for lack of space; to be settled again when there is some.
        ages: of the gradients, where there are no rounds.
        pull_codec: form in which workers get its parameters; "": as they are.
    """

    is_trained = True
    pull_codec = ""
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
        self.lock = self._new_lock(index)
        self._members = services.members
        self._policy = services.policy
        self._on_lost = services.on_lost
        self._on_passed = services.on_passed
        self._passed: int | None = None  # the version of the last round that was lost
        self._open_round = open_round
        self._waits = VersionWaits()
        self._failure: RuleFailed | None = None  # why the open round could not be closed
        self.lacks_space = False
        self._open(version)

    def _new_lock(self, index: int) -> threading.Lock:
        return locks.new(locks.Level.BLOCK, index)

    def _open(self, version: int) -> None:
        self.version = version
        self._round = self._open_round(version)

    # -- what subclasses define --------------------------------------------------------------------------------------------

    @abstractmethod
    def _counted(self, rank: int) -> Counted:
        """The last push of a rank that an update has counted; the open round is left out."""

    @abstractmethod
    def last_counted(self, rank: int) -> Counted:
        """The last push of a rank that an update has counted. Takes no lock, which another call may hold for a whole update."""

    @abstractmethod
    def _alone(self, part: Contribution, age: int) -> Update:
        """Without rounds: the update that applies this push alone."""

    @abstractmethod
    def _write(self, update: Update, clock: int) -> int:
        """Write an update, and count the pushes of `clock` that it is made of; return the version that is current then."""

    @abstractmethod
    def _measured(self, under: Verdict | None) -> Squares | Unmeasured:
        """Sums of squares of the open round; see Round.measure."""

    @abstractmethod
    def read(self, version_min: int) -> tuple[int, Page] | tuple[int, None] | None:
        """The version, and what there is to give back of it; None while it is below `version_min`.

        Raises OutOfSpace if the version is there but for the room to write it; the same call may succeed later.
        """

    # -- gradients ---------------------------------------------------------------------------------------------------------

    def contribute(self, part: Contribution) -> Outcome:
        """Count one worker's gradient, and apply the update if it is complete then.

        If the contribution is lent, the update is left to the first call that asks for the result, or to `take_over`: so the
        threads that wait for a round's blocks share the work.

        If this raises (no memory, OutOfSpace), nothing was counted, and the push may be sent again.
        """
        with self.lock:
            if self._is_due:
                self._apply_due()
            elif self._failure is not None:
                self._settle()  # the round has all its gradients, but its rule has raised: try again
            session, clock = self._counted(part.rank)
            if session == part.session and clock > part.clock:
                return Outcome.DUPLICATE
            if session > part.session or self._members.session_of(part.rank) != part.sent_by:
                # The rank has joined again between the check of the session and now, and its new session has been told in which
                # round it begins (`entry_round`).
                return Outcome.LATE
            if not self._policy.has_rounds:
                if part.already:
                    raise not_counted(part)
                return self._apply_alone(part)
            if part.clock != self.version:
                return Outcome.EARLY if part.clock > self.version else Outcome.LATE
            round_ = self._round
            standing = round_.standing(part)
            if standing is not None:
                return standing
            if part.already:
                raise not_counted(part)
            self.times.on_gradient(part.rank, round_.asked)
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
        """Copy the gradients that a loan has lent to this round, unless the round has closed.

        A round that is due is applied. If there is no space for that, the next call that asks for the result tries again, and
        gets the error.
        """
        if self.version > round_:
            return  # without the lock, which another call may hold while its kernel works
        with self.lock:
            self._round.take_over(loan)
            self._settle()

    def entry_round(self, rank: int) -> int:
        """FAST: the first round in which a new session of the rank takes part: the open one, or the next if the open one has a
        gradient of the rank.

        Gradients of the rank's earlier sessions that are still on their way are refused from now on.
        """
        with self.lock:
            return self.version + (self._round.session_of(rank, is_committed=True) > 0)

    def has(self, rank: int, session: int, clock: int) -> bool:
        """True if the push of this name counts here already, or will when its round closes."""
        with self.lock:
            counted_as, counted_to = self._counted(rank)
            if counted_as == session and counted_to > clock:
                return True
            is_open = self._policy.has_rounds and clock == self.version
            return is_open and self._round.session_of(rank, is_committed=True) == session

    def counted(self, rank: int, *, is_committed: bool) -> Counted:
        """The last push of a rank that counts here, or will when the open round closes. is_committed: see Round.session_of."""
        with self.lock:
            session = self._round.session_of(rank, is_committed=is_committed)
            return (session, self.version + 1) if session else self._counted(rank)

    def decide(self, round_: int, members: int) -> None:
        """EXACT: note that the workers `members` (a bit mask) make up a round; it closes when their gradients are here."""
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
        """Sums of squares of a decided round (see Round.measure); StateLost if the round cannot be completed any more."""
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
        """Close the rounds that are complete now that a worker has left, expired or skipped rounds."""
        with self.lock:
            self._settle()

    def _settle(self) -> None:
        self._fail_if_lost()
        self.lacks_space = False
        try:
            while self._round.is_complete():
                self._close()
        except RuleFailed:
            return  # those who wait for the round have been told
        except OutOfSpace:
            # Wake the calls that wait for the round's result: they try again, and get the error if there is still no room.
            self.lacks_space = True
            self._waits.within_reach(self.version + 1)
        except StoreClosed:
            return  # those who wait have been told that the job goes back to a checkpoint

    def _fail_if_lost(self) -> None:
        """EXACT: end the waits for a round that cannot be completed any more."""
        error = self._round.loss()
        if error is None:
            return
        if self._on_passed is not None:
            self._on_passed(self.version + 1, error)
            self._pass()
        elif not self._on_lost(error):
            self._waits.fail(error)

    def _pass(self) -> None:
        """Go on with the next round. Nothing is written: a process that takes over finds out again that the round was lost."""
        closed = self._round
        self._passed = self.version + 1
        self._open(self.version + 1)
        self._waits.passed(self.version)
        closed.end()

    @property
    def has_version(self) -> bool:
        """False if the block's values are older than its version, because the round of that version was lost."""
        return self._passed != self.version

    @property
    def is_busy(self) -> bool:
        """True if some call is at work on the block, perhaps for a whole update. Takes no lock."""
        return self.lock.locked()

    @property
    def _is_due(self) -> bool:
        return self.lacks_space or self._round.is_due

    def _apply_due(self) -> None:
        """Apply the round that is complete, if it still is; may be called again after an error."""
        self.lacks_space = False
        if self._round.is_complete():
            try:
                self._close()
            except OutOfSpace:
                self.lacks_space = True
                raise
        self._settle()

    def _close(self) -> None:
        """Apply the open round, which is complete."""
        self._apply(self._round.update(None), self.version)

    def _apply(self, update: Update, clock: int) -> None:
        """Write an update, and open the next round."""
        version = self._write(update, clock)
        if not self._policy.has_rounds:
            self.version = version
            return
        closed, self._failure = self._round, None
        self._open(version)
        self._waits.reached(version)
        self.times.on_close(self._round.asked())
        closed.end()

    def _note_failed(self, cause: BaseException, rule: str, kind: str, name: str) -> RuleFailed:
        """The error for a user's rule that has raised; see rule_failed. The round stays open: calls that wait for it, now or
        later, get this error, and a push that is sent again makes the rule run again."""
        error = rule_failed(cause, rule, kind, name, self.version, is_known=self._failure is not None)
        if self._policy.has_rounds:
            self._failure = error
            self._waits.fail(error)
        return error

    # -- waits -------------------------------------------------------------------------------------------------------------

    def at_version(self, version: int, whose: object, take: Take) -> bool:
        """Call `take` under the block's lock when this version is reached; False if the block is already beyond it, or lost it.

        After `not_at_version` with the same two arguments `take` is not called any more.
        """
        with self.lock:
            if self.version > version or (self.version == version and not self.has_version):
                return False
            if self.version == version:
                take()
            else:
                self._waits.add_take(version, whose, take)
            return True

    def not_at_version(self, version: int, whose: object) -> None:
        """Cancel the wait that `at_version` began with these arguments."""
        with self.lock:
            self._waits.drop_take(version, whose)

    def _reach(self, version_min: int) -> bool:
        """True if the version is reached, if need be by applying the round that is due. Raises OutOfSpace as `read` does."""
        if self.version < version_min and self._is_due:
            self._apply_due()
        return self.version >= version_min

    def when(self, version: int, ticket: Ticket) -> None:
        """Resolve the ticket when the block reaches the version."""
        with self.lock:
            if self.version + self._is_due >= version:
                ticket.resolve()
            else:
                self._add_wait(version, ticket)
                self._fail_if_lost()
                if self._failure is not None:
                    ticket.fail(self._failure)

    def _add_wait(self, version: int, ticket: Ticket) -> None:
        self._waits.add(version, ticket)

    def missing_in(self, round_: int) -> int:
        """Mask of the workers whose gradients the open round lacks, for messages; 0 if `round_` has closed. Takes no lock."""
        if round_ < self.version:
            return 0
        return self._round.missing()


def not_counted(part: Contribution) -> InvalidRequest:
    """The error if the numbers of a part that would be counted now were not sent."""
    return InvalidRequest(f"already: a block has not counted the push of clock {part.clock} by worker {part.rank}")
