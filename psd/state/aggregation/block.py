"""One block: its current page, how an update writes the next one, and the other ways to set its values.

The dedup window is part of the page. Must not know which sessions are valid, leases or messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psd.checkpoint import RestoredBlock
from psd.contract import layout
from psd.contract.errors import OutOfSpace, RuleFailed
from psd.contract.verdicts import Squares, Verdict
from psd.state import pages
from psd.state.aggregation.offered_buffers import Offered
from psd.state.aggregation.outgoing import Shown, follow
from psd.state.aggregation.rounds import Contribution, Outcome, Round, RoundSetting, Unmeasured, Update, segments
from psd.state.aggregation.rules import BoundRule, Gradient, SegmentFailed
from psd.state.aggregation.trained import RoundServices, Trained
from psd.state.counts import RoundTimes
from psd_core.arena import Arena, Page, StoreFull
from psd_core.codecs import Encoded


@dataclass(frozen=True, slots=True)
class BlockServices:
    """The facts and services that all blocks of a job share.

    Attributes:
        round_kind: the class of the rounds that the blocks open, one after the other.
        tensor_at: names the tensor at an element of a block, for messages.
        make_room: lets go of old pages that are kept; False if there were none.
    """

    arena: Arena
    rounds: RoundServices
    round_kind: type[Round]
    tensor_at: Callable[[layout.Block, int], str]
    make_room: Callable[[], bool]


class BlockState(Trained):
    """A block of this shard.

    Args:
        slot: the block's index in the arena.
        times: measures how long the block's rounds are open.

    Attributes:
        ratio_places: as in RoundSetting; None unless a verdict has some for the block.
        offered: what workers have offered, if the block holds the mean of their buffers; else None.
        shown: what is known of the parameters as workers have them, where they pull differences.
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
        self.is_trained = plan.trained
        self.pull_codec = plan.pull_codec
        self.shown = Shown.anew(0)
        self.offered = offered
        self.ratio_places = ratio_places
        self._slot = slot
        self._bound = bound
        self._rule = bound.rule
        self._services = services
        self._arena = services.arena
        self._last_set: tuple[pages.SetMark, frozenset[int]] | None = (
            None  # the last load in this life of the shard, and what it has set
        )
        self._accumulators = pages.BlockAccumulators(services.arena, slot)
        setting = RoundSetting(
            plan.segment_ends,
            bound.rule,
            services.rounds.is_mean,
            services.rounds.policy,
            self._accumulators,
            services.rounds.members,
            ratio_places,
            self._momentum if bound.momentum_at is not None else None,
            services.rounds.sampling,
        )
        page = self._arena.current(slot)
        if page is not None:
            self.shown = Shown.anew(page.version)
        super().__init__(
            plan.index,
            services.rounds,
            lambda number: services.round_kind(number, setting),
            times,
            page.version if page is not None else 0,
        )

    @property
    def slot_count(self) -> int:
        """Number of slots."""
        return len(self._bound.slot_starts)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the block's slots."""
        return len(self._bound.slot_starts) * self.plan.nbytes

    def prepare(self, values: NDArray[Any]) -> Page:
        """A page with initial parameters, for `begin` or `discard`. Slots begin as their rule says, all else as zero.

        Raises:
            OutOfSpace: the block is as it was.
        """
        return self._written(lambda page: pages.initialize(page, values, self._bound.slot_starts))

    def begin(self, page: Page, version: int = 0) -> None:
        """Let the block begin with a prepared page."""
        with self.lock:
            self._arena.publish(self._slot, page, version)
            self.shown = Shown.anew(version)
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
        """Replace the values of a block of buffers by this worker's, or by the mean over the present ranks if it holds a mean.

        Raises:
            OutOfSpace: the block is as it was.
        """
        with self.lock:
            if self.offered is not None:
                values = self.offered.mean_with(rank, values, present)
            page = self._written(lambda page: pages.initialize(page, values, ()))
            self.version += 1
            self._arena.publish(self._slot, page, self.version)

    @contextlib.contextmanager
    def setting(self, change: pages.Change, mark: pages.SetMark, clock: int) -> Iterator[None]:
        """Set parameters or slots when the context is left without an error; the lock is held until then.

        Parts that this load has already set are not set again. With rounds, nothing changes if the block is beyond `clock`.

        Raises:
            OutOfSpace: the block is as it was.
        """
        with self.lock:
            is_beyond = self._policy.has_rounds and self.plan.trained and self.version > clock
            done = self._last_set[1] if self._last_set is not None and self._last_set[0] == mark else frozenset()
            change = change.without(done)
            if is_beyond or not change.what:
                yield
                return
            before = self._page
            page = self._written(lambda page: pages.set_anew(before, page, change, self._bound.slot_starts))
            try:
                yield
            except BaseException:
                self._arena.discard(page)
                raise
            self._arena.publish(self._slot, page, self.version)
            if change.values is not None:
                self.shown = Shown.anew(self.version + 1)  # workers hold this version as it was before
            self._last_set = mark, done | change.what

    def _written(self, write: Callable[[Page], None]) -> Page:
        page = self._spare()
        try:
            write(page)
        except BaseException:
            self._arena.discard(page)
            raise
        return page

    def _spare(self, *, is_alike: bool = False) -> Page:
        spare = self._arena.spare_alike if is_alike else self._arena.spare
        while True:
            try:
                return spare(self._slot)
            except StoreFull as error:
                if not self._services.make_room():
                    raise OutOfSpace(f"block {self.plan.index}: no room for its next version: {error.strerror}") from error

    def _counted(self, rank: int) -> pages.Counted:
        page = self._page
        return int(page.sessions[rank]), int(page.clocks[rank])

    @override
    def last_counted(self, rank: int) -> pages.Counted:
        page = self._arena.pin(self._slot)
        try:
            return int(page.sessions[rank]), int(page.clocks[rank])
        finally:
            self._arena.unpin(page)

    @override
    def _apply_alone(self, part: Contribution) -> Outcome:
        if not isinstance(part.values, Encoded):
            return super()._apply_alone(part)
        values = self._accumulators.lend()
        try:
            part.values.decode(values)
            return super()._apply_alone(part._replace(values=values))
        finally:
            self._accumulators.give_back(values)

    def _alone(self, part: Contribution, age: int) -> Update:
        touched = segments(len(self.plan.segment_ends), 1) if part.present is None else part.present
        values = part.values if part.weight else None
        gradient = Gradient(None, values, 1.0, part.scale, touched, age=age)
        return Update(gradient, part.scalars, {part.rank: part.session})

    def _measured(self, under: Verdict | None) -> Squares | Unmeasured:
        return self._round.measure(self._page, under)

    def _momentum(self, scalars: Sequence[float]) -> tuple[NDArray[Any], float]:
        """The slot with the mean of the gradients so far, and a factor, as in RoundSetting."""
        assert self._bound.momentum_at is not None
        return self._page.slots[self._bound.momentum_at], self._bound.momentum_scale(scalars)

    def _write(self, update: Update, clock: int) -> int:
        before = self._page
        gradient = update.gradient
        is_empty = gradient.last is None and gradient.accumulator is None
        version, shown = self.version + 1, self.shown
        after = self._spare(is_alike=is_empty)
        try:
            if is_empty:
                after.steps[:] = before.steps
            else:
                self._rule.apply(before, after, gradient, self.plan.segment_ends, update.scalars)
                if after.extra:
                    difference = follow(self.pull_codec, after.parameter, before.extra[0], after.extra[0])
                    shown = Shown(version, shown.since, difference)
            pages.count(before, after, update.sessions, clock)
        except SegmentFailed as failed:
            self._arena.discard(after)
            raise self._failed(failed) from failed.__cause__
        except BaseException:
            self._arena.discard(after)
            raise
        self._arena.publish(self._slot, after, version)
        self.shown = shown
        return version

    def _failed(self, failed: SegmentFailed) -> RuleFailed:
        tensor = self._services.tensor_at(self.plan, int(self.plan.segment_ends[failed.segment]) - 1)
        cause = failed.__cause__
        assert cause is not None
        return self._note_failed(cause, self._bound.name, "tensor", tensor)

    def pin(self) -> Page:
        """The current page, pinned."""
        return self._arena.pin(self._slot)

    def unpin(self, page: Page) -> None:
        """Give a pinned page back."""
        self._arena.unpin(page)

    @override
    def read(self, version_min: int) -> tuple[int, Page] | None:
        """The version and its page, pinned. If the round of the version was lost, it is that of the page, a lower one."""
        if self.version < version_min and not self._is_due:
            return None  # without the lock, which another call may hold while its kernel works
        with self.lock:
            if not self._reach(version_min):
                return None
            page = self._arena.pin(self._slot)
            return page.version, page

    @property
    def _page(self) -> Page:
        page = self._arena.current(self._slot)
        assert page is not None, "the block has no values yet"
        return page
