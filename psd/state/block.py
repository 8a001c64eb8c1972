"""One block: its current page, its version, the open round, and the gradients counted. The life of a gradient ends here.

Every method runs under the block's own lock, which is held while the kernel works (the GIL is not), so blocks proceed in
parallel and a block is updated by one thread at a time. The dedup window is part of the page: per rank, the session and clock
of the last push counted. It changes with the parameters, in one step, so a push may be sent any number of times, also to a
shard that was killed and came back. When another arena has taken the place of this block's, whoever is still about it gets
ArenaClosed.

Nothing under that lock takes the shard's (see core.py). Must not know sessions' validity, leases or messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psd.checkpoint import RestoredBlock
from psd.contract import layout
from psd.contract.errors import OutOfSpace, RuleFailed, StateLost
from psd.contract.verdicts import Squares, Verdict
from psd.state import locks, pages
from psd.state.consistency import Policy
from psd.state.counts import RoundTimes
from psd.state.measured import MeasuredRound, Unmeasured
from psd.state.rounds import Contribution, ExactRound, FastRound, Outcome
from psd.state.rules import Gradient, Rule, SegmentFailed
from psd.state.staleness import Readers
from psd.state.tickets import Ticket
from psd.state.version_waits import VersionWaits
from psd_core.arena import Arena, ArenaClosed, ArenaFull, Page


class BlockState:
    """A block of this shard.

    Args:
        slot: the block's index in the arena.
        waited_in: asks the membership which workers a round waits for (a bit mask).
        has_verdicts: rounds are applied as a verdict says.
        session_of: asks the membership for a rank's latest session.
        may_void: asks whether a round that nobody waits for and nobody contributed to is to be passed over.
        on_lost: told why the open round can never close; True if its waits will be ended by somebody else.
        rule_name, tensor_at: for messages. times: of its rounds.

    Attributes:
        version: updates applied; under SYNC also the number of the open round.
        readers: what the workers have read, where there are no rounds.
        ratio_places: see MeasuredRound; None unless the rule is layer-wise.
    """

    def __init__(
        self,
        plan: layout.Block,
        *,
        arena: Arena,
        slot: int,
        rule: Rule,
        rule_name: str,
        slot_starts: Sequence[float],
        tensor_at: Callable[[layout.Block, int], str],
        policy: Policy,
        is_mean: bool,
        is_exact: bool,
        waited_in: Callable[[int], int],
        session_of: Callable[[int], int],
        may_void: Callable[[int], bool],
        on_lost: Callable[[StateLost], bool],
        times: RoundTimes,
        has_verdicts: bool = False,
        ratio_places: NDArray[np.intp] | None = None,
    ) -> None:
        self.plan = plan
        self.lock = locks.new(locks.Level.BLOCK, plan.index)
        self._arena = arena
        self._slot = slot
        self._rule = rule
        self._rule_name = rule_name
        self._slot_starts = slot_starts
        self._tensor_at = tensor_at
        self._policy = policy
        kind: Callable[..., FastRound | ExactRound] = ExactRound if is_exact else partial(FastRound, policy=policy)
        if has_verdicts:
            kind = partial(MeasuredRound, ratio_places=ratio_places)
        self._open_round = partial(kind, is_mean=is_mean, accumulators=pages.Accumulators(arena, slot))
        self._is_exact = is_exact
        self._has_verdicts = has_verdicts
        self.ratio_places = ratio_places
        self._waited_in = waited_in
        self._session_of = session_of
        self._may_void = may_void
        self._on_lost = on_lost
        self.times = times
        self._round: FastRound | ExactRound | None = None
        self._waits = VersionWaits()
        self._all = np.ones(len(plan.segment_ends), np.uint8)
        self.readers = Readers(plan.index)
        self._failure: RuleFailed | None = None  # why the open round could not be closed
        self._lacks_space = False  # to close the open round, which was complete when that was found
        page = arena.current(slot)
        self.version = page.version if page is not None else 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of the block's slots."""
        return len(self._slot_starts) * self.plan.nbytes

    def prepare(self, values: NDArray[Any]) -> Page:
        """A page with initial parameters, for `begin`, or to be discarded; slots begin as their rule says, all else as zero.

        Raises:
            OutOfSpace: the block is as it was.
        """
        return self._written(lambda page: pages.initialize(page, values, self._slot_starts))

    def begin(self, page: Page, version: int = 0) -> None:
        """Let the block begin with a prepared page."""
        with self.lock:
            self._arena.publish(self._slot, page, version)
            self.version = version

    def discard(self, page: Page) -> None:
        """Give back a prepared page that the block will not begin with."""
        self._arena.discard(page)

    def restore(self, stored: RestoredBlock) -> None:
        """Set everything from a checkpoint.

        Raises:
            OutOfSpace: the block is as it was.
        """
        self.begin(self._written(lambda page: pages.restore(page, stored)), stored.version)

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
            self._apply_due()
            page = self._page
            session = int(page.sessions[part.rank])
            if session == part.session and int(page.clocks[part.rank]) > part.clock:
                return Outcome.DUPLICATE
            if session > part.session or self._session_of(part.rank) != part.sent_by:
                # The rank has joined again between the check of the session and now, and its new session has been told in which
                # round it begins: see `entry_round`.
                return Outcome.LATE
            if not self._policy.has_rounds:
                touched = self._all if part.present is None else part.present
                values = part.values if part.weight else None
                age, backup = self.readers.look_up(part.rank, part.version_read, self.version)
                # A push that is an update of its own: the mean, or the sum, of one gradient is that gradient.
                gradient = Gradient(None, values, 1.0, part.scale, touched, age=age or 0, backup=backup)
                self._apply(gradient, part.scalars, {part.rank: part.session}, part.clock)
                self.readers.count(age)
                return Outcome.COUNTED
            if part.clock > self.version:
                return Outcome.EARLY
            if part.clock < self.version:
                return Outcome.LATE
            return self._contribute_to_round(part)

    def take_over(self, rank: int) -> None:
        """Copy this worker's contribution to the open round out of the worker's memory, if it still lies there.

        A round that is due is applied, unless there is no space: whoever asks for its result then tries again, and is told.
        """
        with self.lock:
            if isinstance(self._round, FastRound):
                self._round.take_over(rank)
                self._settle()

    def _contribute_to_round(self, part: Contribution) -> Outcome:
        round_ = self._round if self._round is not None else self._new_round()
        standing = round_.standing(part)
        if standing is not None:
            return standing
        is_staged = isinstance(round_, ExactRound) and round_.members is None
        self.times.on_gradient(part.rank, lambda: self._waited_in(self.version))
        if not round_.is_complete_with(part):
            round_.add(part)
            self._round = round_
            if self._has_verdicts:
                self._settle()
        elif part.is_lent and isinstance(round_, FastRound):
            round_.complete(part)
            self._round = round_
            self._waits.within_reach(self.version + 1)
        else:
            self._close(round_, part)
            self._settle()
        return Outcome.STAGED if is_staged else Outcome.COUNTED

    def entry_round(self, rank: int) -> int:
        """FAST: the first round in which a new session of the rank takes part: the one after the open round, if that has a
        gradient of it.

        Gradients of its earlier sessions that are still on their way are refused from now on.
        """
        with self.lock:
            round_ = self._round
            return self.version + (round_ is not None and rank in round_.sessions)

    def _new_round(self) -> FastRound | ExactRound:
        version = self.version
        return self._open_round(len(self.plan.segment_ends), waited=lambda: self._waited_in(version))

    def decide(self, round_: int, members: int) -> None:
        """EXACT: let the workers `members` (a bit mask) make up a round; it closes when their gradients are here."""
        with self.lock:
            if round_ != self.version:
                return
            current = self._round if self._round is not None else self._new_round()
            assert isinstance(current, ExactRound)
            current.members = members
            self._round = current
            self._settle()

    def judge(self, verdict: Verdict) -> None:
        """EXACT: apply a round by its verdict, once its members' gradients are here."""
        with self.lock:
            if verdict.round != self.version:
                return
            current = self._round if self._round is not None else self._new_round()
            assert isinstance(current, MeasuredRound)
            current.verdict = verdict
            self._round = current
            self._settle()

    def measure(self, round_: int, under: Verdict | None) -> Squares | Unmeasured:
        """Sums of squares of a decided round, see MeasuredRound; StateLost if it cannot be completed any more."""
        with self.lock:
            if round_ < self.version:
                return Unmeasured.CLOSED
            current = self._round
            if round_ > self.version or not isinstance(current, MeasuredRound) or not current.is_gathered():
                error = self._loss()
                if error is not None and not self._on_lost(error):
                    raise error
                return Unmeasured.OPEN
            return current.measure(self._page, self._rule, self.plan.segment_ends, under)

    def settle(self) -> None:
        """Close the rounds that are complete now: somebody left, expired or skipped rounds."""
        with self.lock:
            self._settle()

    @property
    def lacks_space(self) -> bool:
        """True if a round is complete and could not be applied for lack of space; to be settled again when there is some."""
        return self._lacks_space

    def _settle(self) -> None:
        if self._is_exact:
            self._fail_if_lost()
        try:
            while self._close_complete():
                pass
        except RuleFailed:
            return  # those who wait for the round have been told
        except OutOfSpace:
            # Whoever waits for the round's result asks now, which tries again, and is told if there is still no room.
            self._lacks_space = True
            self._waits.within_reach(self.version + 1)
        except ArenaClosed:
            return  # those who wait have been told that the job goes back

    def _close_complete(self) -> bool:
        """Close the open round if it is complete or to be passed over; False if it is neither."""
        self._lacks_space = False
        round_ = self._round
        if round_ is None:
            if self._is_exact or not self._may_void(self.version):
                return False
            self._advance_void()
        elif (isinstance(round_, FastRound) and round_.is_due) or round_.is_complete():
            self._close(round_, None)
        else:
            return False
        return True

    def _fail_if_lost(self) -> None:
        """EXACT: end the waits for a round that cannot be completed any more."""
        error = self._loss()
        if error is not None and not self._on_lost(error):
            self._waits.fail(error)

    def _loss(self) -> StateLost | None:
        round_ = self._round
        return round_.loss(self.version, self._waited_in(self.version)) if isinstance(round_, ExactRound) else None

    @property
    def _is_due(self) -> bool:
        round_ = self._round  # once: who asks without the lock may find another one the next time
        return self._lacks_space or (isinstance(round_, FastRound) and round_.is_due)

    def _apply_due(self) -> None:
        """Apply the round that is complete, if there is one; may be called again after an error."""
        if not self._is_due:
            return
        try:
            self._close_complete()
        except OutOfSpace:
            self._lacks_space = True
            raise
        self._settle()

    def _close(self, round_: FastRound | ExactRound, last: Contribution | None) -> None:
        """Apply the round's update and open the next one."""
        gradient = round_.gradient(last)
        counted = dict(round_.sessions)
        if last is not None and (not self._is_exact or last.rank in counted):
            counted[last.rank] = last.session
        try:
            self._apply(gradient, round_.scalars, counted, self.version)
        except RuleFailed as error:
            # The round stays open. Whoever waits for it, now or later, learns why; a worker that sends again tries again.
            self._failure = error
            self._waits.fail(error)
            raise
        self._round = self._failure = None
        self.times.on_close(self._waited_in(self.version))
        round_.end()

    def _advance_void(self) -> None:
        nothing = Gradient(None, None, 1.0, 1.0, np.zeros_like(self._all))
        self._apply(nothing, (), {}, self.version)

    def _apply(self, gradient: Gradient, scalars: Sequence[float], counted: Mapping[int, int], clock: int) -> None:
        """Write the next page, with the sessions whose push of `clock` it counts, and make it current in one step."""
        before = self._page
        after = self._spare()
        try:
            if gradient.last is not None or gradient.accumulator is not None:
                self._rule.apply(before, after, gradient, self.plan.segment_ends, scalars)
            else:
                pages.carry_over(before, after)
            pages.count(before, after, counted, clock)
        except SegmentFailed as failed:
            self._arena.discard(after)
            tensor = self._tensor_at(self.plan, int(self.plan.segment_ends[failed.segment]) - 1)
            is_known = self._failure is not None
            raise failed.told(self._rule_name, tensor, self.plan.index, self.version, is_known=is_known) from failed.__cause__
        except BaseException:
            self._arena.discard(after)
            raise
        self._arena.publish(self._slot, after, self.version + 1)
        self.version += 1
        self._waits.reached(self.version, self.pin)

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
            if self.version < version_min:
                self._apply_due()
            if self.version < version_min:
                return None
            if reader is not None and self._rule.needs_backup:
                self._keep(reader, self._arena.pin(self._slot))
            return self.version, self._arena.pin(self._slot)

    def forget_reader(self, rank: int) -> None:
        """Forget what a worker has read: its session has ended."""
        if self._rule.needs_backup:
            with self.lock:
                self._keep(rank, None)

    def forget_readers(self) -> None:
        """Forget what all workers have read."""
        if self._rule.needs_backup:
            with self.lock:
                for page in self.readers.drop():
                    self._arena.unpin(page)

    def _keep(self, reader: int, page: Page | None) -> None:
        before = self.readers.keep(reader, page)
        if before is not None:
            self._arena.unpin(before)

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
        current = self._round
        return self._waited_in(self.version) if current is None else current.missing()

    def counted_clock(self, rank: int, session: int) -> int:
        """The clock up to which pushes of this session have been counted here: the window's, 0 for another session."""
        with self.lock:
            page = self._page
            return int(page.clocks[rank]) if int(page.sessions[rank]) == session else 0

    @property
    def _page(self) -> Page:
        page = self._arena.current(self._slot)
        assert page is not None, "the block has no values yet"
        return page
