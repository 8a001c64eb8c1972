"""One block: its current page, its version, the open round, and the gradients counted. The life of a gradient ends here.

Every method runs under the block's own lock, which is held while the kernel works (the GIL is not), so blocks proceed in
parallel and a block is updated by one thread at a time. The dedup window is part of the page: per rank, the session and clock
of the last push counted. It changes with the parameters, in one step, so a push may be sent any number of times, also to a
shard that was killed and came back. When another arena has taken the place of this block's, whoever is still about it gets
ArenaClosed.

Nothing under that lock takes the shard's (see core.py). Must not know sessions' validity, leases or messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psd.checkpoint import RestoredBlock
from psd.contract import layout
from psd.contract.errors import OutOfSpace, RuleFailed, StateLost
from psd.contract.verdicts import Squares, Verdict
from psd.state import locks
from psd.state.aggregation import pages
from psd.state.aggregation.consistency import Policy
from psd.state.aggregation.lent import Loan
from psd.state.aggregation.offered import Offered
from psd.state.aggregation.rounds import Contribution, Outcome, Round, RoundSetting, Taken, Unmeasured, Update, segments
from psd.state.aggregation.rules import BoundRule, Gradient, SegmentFailed
from psd.state.aggregation.staleness import Readers
from psd.state.aggregation.version_waits import VersionWaits
from psd.state.counts import RoundTimes
from psd.state.tickets import Ticket
from psd.state.workers.membership import Membership
from psd_core.arena import Arena, ArenaClosed, ArenaFull, Page


class SetMark(NamedTuple):
    """One call that sets parameters: its session, and the session's count of such calls."""

    session: int
    seq: int


@dataclass(frozen=True, slots=True)
class BlockServices:
    """The facts and services that all blocks of a job share.

    Attributes:
        round_kind: of the rounds that they open, one after the other.
        is_mean: see RoundSetting.
        on_lost: told why a block's open round can never close; True if its waits will be ended by somebody else.
        tensor_at: names the tensor at an element of a block, for messages.
    """

    arena: Arena
    members: Membership
    policy: Policy
    round_kind: type[Round]
    is_mean: bool
    on_lost: Callable[[StateLost], bool]
    tensor_at: Callable[[layout.Block, int], str]


class BlockState:
    """A block of this shard.

    Args:
        slot: the block's index in the arena.
        times: of its rounds.

    Attributes:
        version: updates applied; under SYNC also the number of the open round.
        lacks_space: a round is complete and could not be applied for lack of space; to be settled again when there is some.
        readers: what the workers have read, where there are no rounds.
        ratio_places: see RoundSetting; None unless the rule is layer-wise.
        offered: of a block of buffers that holds the mean of the workers'; else None.
    """

    def __init__(
        self,
        plan: layout.Block,
        slot: int,
        bound: BoundRule,
        services: BlockServices,
        times: RoundTimes,
        ratio_places: NDArray[np.intp] | None = None,
        offered: Offered | None = None,
    ) -> None:
        self.plan = plan
        self.offered = offered
        self.times = times
        self.ratio_places = ratio_places
        self.lock = locks.new(locks.Level.BLOCK, plan.index)
        self.readers = Readers(plan.index, services.arena.unpin)
        self._slot = slot
        self._bound = bound
        self._rule = bound.rule
        self._services = services
        self._arena = services.arena
        self._setting = RoundSetting(
            plan.segment_ends,
            bound.rule,
            services.is_mean,
            services.policy,
            pages.BlockAccumulators(services.arena, slot),
            services.members,
            ratio_places,
        )
        self._waits = VersionWaits()
        self._failure: RuleFailed | None = None  # why the open round could not be closed
        self.lacks_space = False
        self._set_mark: SetMark | None = None  # of the call by which parameters were set last, in this life of the shard
        page = self._arena.current(slot)
        self._open(page.version if page is not None else 0)

    def _open(self, version: int) -> None:
        self.version = version
        self._round = self._services.round_kind(version, self._setting)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the block's slots."""
        return len(self._bound.slot_starts) * self.plan.nbytes

    def prepare(self, values: NDArray[Any]) -> Page:
        """A page with initial parameters, for `begin`, or to be discarded; slots begin as their rule says, all else as zero.

        Raises:
            OutOfSpace: the block is as it was.
        """
        return self._written(lambda page: pages.initialize(page, values, self._bound.slot_starts))

    def begin(self, page: Page, version: int = 0) -> None:
        """Let the block begin with a prepared page."""
        with self.lock:
            self._arena.publish(self._slot, page, version)
            self._open(version)

    def discard(self, page: Page) -> None:
        """Give back a prepared page that the block will not begin with."""
        self._arena.discard(page)

    def restore(self, stored: RestoredBlock) -> None:
        """Set everything from a checkpoint.

        Raises:
            OutOfSpace: the block is as it was.
        """
        self.begin(self._written(lambda page: pages.restore(page, stored)), stored.version)

    def store(self, rank: int, values: NDArray[Any], present: Collection[int]) -> None:
        """Replace the values of a block of buffers by this worker's, or by the mean over the ranks that are present.

        Raises:
            OutOfSpace: the block is as it was.
        """
        with self.lock:
            if self.offered is not None:
                values = self.offered.mean_with(rank, values, present)
            page = self._written(lambda page: pages.initialize(page, values, ()))
            self.version += 1
            self._arena.publish(self._slot, page, self.version)

    def set_values(self, values: NDArray[Any], mark: SetMark, clock: int) -> None:
        """Replace the parameters, and nothing else. The same call again changes nothing; nor, with rounds, does one that comes
        when the block is beyond its clock.

        Raises:
            OutOfSpace: the block is as it was.
        """
        with self.lock:
            is_beyond = self._services.policy.has_rounds and self.plan.trained and self.version > clock
            if self._set_mark == mark or is_beyond:
                return
            before = self._page
            page = self._written(lambda page: pages.set_parameters(before, page, values))
            self._arena.publish(self._slot, page, self.version)
            self._set_mark = mark

    def _written(self, write: Callable[[Page], None]) -> Page:
        page = self._spare()
        try:
            write(page)
        except BaseException:
            self._arena.discard(page)
            raise
        return page

    def _spare(self) -> Page:
        try:
            return self._arena.spare(self._slot)
        except ArenaFull as error:
            raise OutOfSpace(f"block {self.plan.index}: no room for its next version: {error.strerror}") from error

    def contribute(self, part: Contribution) -> Outcome:
        """Count one worker's gradient, and apply the update if that completes one.

        If the contribution is lent, that is left to the first one who asks for the result, or to `take_over`: the threads that
        wait for a round's blocks then share the work.

        If it raises (no memory, OutOfSpace), nothing was counted, and the push may be sent again.
        """
        with self.lock:
            if self._is_due:
                self._apply_due()
            page = self._page
            session = int(page.sessions[part.rank])
            if session == part.session and int(page.clocks[part.rank]) > part.clock:
                return Outcome.DUPLICATE
            if session > part.session or self._services.members.session_of(part.rank) != part.sent_by:
                # The rank has joined again between the check of the session and now, and its new session has been told in which
                # round it begins: see `entry_round`.
                return Outcome.LATE
            if not self._services.policy.has_rounds:
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
        touched = segments(len(self.plan.segment_ends), 1) if part.present is None else part.present
        age, backup = self.readers.look_up(part.rank, part.version_read, self.version)
        values = part.values if part.weight else None
        gradient = Gradient(None, values, 1.0, part.scale, touched, age=age or 0, backup=backup)
        self._apply(Update(gradient, part.scalars, {part.rank: part.session}), part.clock)
        self.readers.count(age)
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

    def counted(self, rank: int, *, is_committed: bool) -> pages.Counted:
        """The last push of a rank that counts here, or will when the open round closes. is_committed: see Round.session_of."""
        with self.lock:
            session = self._round.session_of(rank, is_committed=is_committed)
            return (session, self.version + 1) if session else pages.counted([self._page])[rank]

    def last_counted(self, rank: int) -> pages.Counted:
        """The last push of a rank that counts here by now. Takes no lock: another call may hold it while its kernel works."""
        page = self._arena.pin(self._slot)
        try:
            return pages.counted([page])[rank]
        finally:
            self._arena.unpin(page)

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
            found = Unmeasured.OPEN if round_ > self.version else self._round.measure(self._page, under)
            if found is Unmeasured.OPEN:
                error = self._round.loss()
                if error is not None and not self._services.on_lost(error):
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
        except ArenaClosed:
            return  # those who wait have been told that the job goes back

    def _fail_if_lost(self) -> None:
        """EXACT: end the waits for a round that cannot be completed any more."""
        error = self._round.loss()
        if error is not None and not self._services.on_lost(error):
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
        """Write the next page, with the sessions whose push of `clock` it counts, and make it current; open the next round."""
        before = self._page
        after = self._spare()
        gradient = update.gradient
        try:
            if gradient.last is not None or gradient.accumulator is not None:
                self._rule.apply(before, after, gradient, self.plan.segment_ends, update.scalars)
            else:
                pages.carry_over(before, after)
            pages.count(before, after, update.sessions, clock)
        except SegmentFailed as failed:
            self._arena.discard(after)
            raise self._failed(failed) from failed.__cause__
        except BaseException:
            self._arena.discard(after)
            raise
        self._arena.publish(self._slot, after, self.version + 1)
        if not self._services.policy.has_rounds:
            self.version += 1
            return
        closed, self._failure = self._round, None
        self._open(self.version + 1)
        self._waits.reached(self.version, self.pin)
        self.times.on_close(self._round.waited())
        closed.end()

    def _failed(self, failed: SegmentFailed) -> RuleFailed:
        """The error for a user's rule that has raised. A round stays open then: whoever waits for it, now or later, learns why,
        and a worker that sends again tries again."""
        tensor = self._services.tensor_at(self.plan, int(self.plan.segment_ends[failed.segment]) - 1)
        is_known = self._failure is not None
        error = failed.told(self._bound.name, tensor, self.plan.index, self.version, is_known=is_known)
        if self._services.policy.has_rounds:
            self._failure = error
            self._waits.fail(error)
        return error

    def at_version(self, version: int, whose: object, take: Callable[[Page], None]) -> bool:
        """Give the page of a version, pinned, to `take` when the block reaches it; False if the block is beyond it.

        `take` runs under the block's lock; not any more after `not_at_version` with the same two arguments.
        """
        with self.lock:
            if self.version > version:
                return False
            if self.version == version:
                take(self._arena.pin(self._slot))
            else:
                self._waits.add_take(version, whose, take)
            return True

    def not_at_version(self, version: int, whose: object) -> None:
        """Cancel the wait for that version's page."""
        with self.lock:
            self._waits.drop_take(version, whose)

    def pin(self) -> Page:
        """The current page, pinned."""
        return self._arena.pin(self._slot)

    def unpin(self, page: Page) -> None:
        """Give a pinned page back."""
        self._arena.unpin(page)

    def read(self, version_min: int, reader: int | None = None) -> tuple[int, Page] | None:
        """The version and its page, pinned (give it back to the arena); None while the version is below `version_min`.

        Raises OutOfSpace if the version is there but for the room to write it; the same call may succeed later.

        reader: the rank of a worker that computes its next gradient from the page; so it is kept for rules that ask for it.
        """
        if self.version < version_min and not self._is_due:
            return None  # without the lock, which another call may hold while its kernel works
        with self.lock:
            if self.version < version_min and self._is_due:
                self._apply_due()
            if self.version < version_min:
                return None
            if reader is not None and self._rule.needs_backup:
                self.readers.keep(reader, self._arena.pin(self._slot))
            return self.version, self._arena.pin(self._slot)

    def forget_reader(self, rank: int) -> None:
        """Forget what a worker has read: its session has ended."""
        if self._rule.needs_backup:
            with self.lock:
                self.readers.keep(rank, None)

    def forget_readers(self) -> None:
        """Forget what all workers have read."""
        if self._rule.needs_backup:
            with self.lock:
                self.readers.drop()

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

    @property
    def _page(self) -> Page:
        page = self._arena.current(self._slot)
        assert page is not None, "the block has no values yet"
        return page
