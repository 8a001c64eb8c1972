"""One block: its current page, its version, the open round, and who has been counted. The life of a gradient ends here.

Every method runs under the block's own lock, which is held while the kernel works (the GIL is not), so blocks proceed in
parallel and a block is updated by one thread at a time. The dedup window lies beside the version: per rank, the session and
clock of the last push counted. With it a push may be sent any number of times.

Nothing under that lock takes the shard's (see core.py). Must not know sessions' validity, leases or messages.
"""

from __future__ import annotations

import enum
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import psd_core
from psd.contract import layout
from psd.state.consistency import Policy
from psd.state.rules import Gradient, Rule
from psd.state.store import Page, Store
from psd.state.tickets import Ticket


@dataclass(frozen=True, slots=True)
class Contribution:
    """One worker's part of a push for one block.

    Attributes:
        weight: samples behind it; 0 takes part and adds nothing.
        values: (n,) gradient, zero where not present; None: no gradient in this block at all.
        present: (k,) uint8, the segments with a gradient; None: all.
        scalars: of the block's group.
    """

    rank: int
    session: int
    clock: int
    weight: float
    values: NDArray[Any] | None
    present: NDArray[np.uint8] | None
    scalars: Sequence[float]


class Outcome(enum.Enum):
    """What became of a contribution."""

    COUNTED = "counted"
    DUPLICATE = "duplicate"
    LATE = "late"
    EARLY = "early"  # its round is not open yet; nothing changed


@dataclass(slots=True)
class Round:
    """The open round of a block: the sum so far, and whose it is."""

    scalars: Sequence[float]
    touched: NDArray[np.uint8]
    contributors: int = 0
    weight: float = 0.0
    accumulator: NDArray[Any] | None = None


class BlockState:
    """A block of this shard.

    Attributes:
        version: updates applied; under SYNC also the number of the open round.
        waited_in: asks the membership which workers a round waits for (a bit mask).
        may_void: asks whether a round that nobody waits for and nobody contributed to is to be passed over.
    """

    def __init__(
        self,
        plan: layout.Block,
        *,
        store: Store,
        rule: Rule,
        policy: Policy,
        is_mean: bool,
        world_size: int,
        waited_in: Callable[[int], int],
        may_void: Callable[[int], bool],
    ) -> None:
        self.plan = plan
        self.version = 0
        self.lock = threading.Lock()
        self._store = store
        self._rule = rule
        self._policy = policy
        self._is_mean = is_mean
        self._waited_in = waited_in
        self._may_void = may_void
        self._page: Page | None = None
        self._round: Round | None = None
        self._counted_session = array("Q", bytes(8 * world_size))
        self._counted_clock = array("Q", bytes(8 * world_size))
        self._tickets: dict[int, list[Ticket]] = {}
        self._all = np.ones(len(plan.segment_ends), np.uint8)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the block's slots."""
        return self._rule.slot_count * self.plan.nbytes

    def initialize(self, values: NDArray[Any]) -> None:
        """Set the initial parameters; slots and steps become zero."""
        page = self._store.allocate(self.plan, self._rule.slot_count)
        np.copyto(page.parameter, values)
        with self.lock:
            self._store.publish(self._page, page)
            self._page = page

    def contribute(self, part: Contribution) -> Outcome:
        """Count one worker's gradient, and apply the update if that completes one."""
        with self.lock:
            if self._counted_session[part.rank] == part.session and self._counted_clock[part.rank] > part.clock:
                return Outcome.DUPLICATE
            if self._counted_session[part.rank] > part.session:
                # Fenced between the check of its session and now. Counting it would turn back the dedup window of the rank's
                # new session.
                return Outcome.LATE
            if not self._policy.has_rounds:
                self._apply(self._gradient_of(part), part.scalars)
                self._mark(part)
                self._advance()
                return Outcome.COUNTED
            if part.clock > self.version:
                return Outcome.EARLY
            if part.clock < self.version:
                return Outcome.LATE
            return self._contribute_to_round(part)

    def _contribute_to_round(self, part: Contribution) -> Outcome:
        bit = 1 << part.rank
        round_ = self._round if self._round is not None else Round(part.scalars, np.zeros_like(self._all))
        if round_.contributors & bit:
            # An earlier session of this rank has counted before it died. A round takes one gradient from each worker.
            return Outcome.DUPLICATE
        values = part.values if part.weight else None
        weight = part.weight if self._is_mean else 1.0
        contributors, total = round_.contributors | bit, round_.weight + part.weight
        grown = Round(round_.scalars, round_.touched, contributors, total, round_.accumulator)
        if values is not None:
            grown.touched = np.maximum(round_.touched, self._all if part.present is None else part.present)
        # What may fail for want of memory comes first: a push that ended in an error is as if it had never been, and may be
        # sent again.
        if self._policy.closes(grown.contributors, self._waited_in(self.version)):
            self._close(grown, values, weight)
            self._mark(part)
            self._settle()
            return Outcome.COUNTED
        if values is not None:
            if grown.accumulator is None:
                grown.accumulator = self._store.lend_accumulator(self.plan)
                psd_core.scaled_copy(grown.accumulator, values, weight)
            else:
                psd_core.accumulate(grown.accumulator, values, weight)
        self._round = grown
        self._mark(part)
        return Outcome.COUNTED

    def settle(self) -> None:
        """Close the rounds that are complete now: somebody left, expired or skipped rounds."""
        with self.lock:
            self._settle()

    def _settle(self) -> None:
        while True:
            round_ = self._round
            if round_ is None:
                if not self._may_void(self.version):
                    return
                self._advance()
            elif self._policy.closes(round_.contributors, self._waited_in(self.version)):
                self._close(round_, None, 0.0)
            else:
                return

    def _close(self, round_: Round, last: NDArray[Any] | None, weight: float) -> None:
        """Apply the round's update and open the next one."""
        scale = 1.0
        if self._is_mean and round_.weight > 0:
            if round_.accumulator is None and weight == round_.weight:
                weight = 1.0  # a single gradient is its own mean, to the bit
            else:
                scale = 1.0 / round_.weight
        self._apply(Gradient(round_.accumulator, last, weight, scale, round_.touched), round_.scalars)
        self._round = None
        if round_.accumulator is not None:
            self._store.return_accumulator(round_.accumulator)
        self._advance()

    def _gradient_of(self, part: Contribution) -> Gradient:
        """A push that is an update of its own: the mean, or the sum, of one gradient is that gradient."""
        touched = self._all if part.present is None else part.present
        values = part.values if part.weight else None
        return Gradient(None, values, 1.0, 1.0, touched)

    def _apply(self, gradient: Gradient, scalars: Sequence[float]) -> None:
        """Write the next page and make it current; the version is the caller's to advance."""
        has_values = gradient.last is not None or gradient.accumulator is not None
        if has_values and gradient.touched.any():
            before = self._page
            assert before is not None
            after = self._store.spare(before)
            self._rule.apply(before, after, gradient, self.plan.segment_ends, scalars)
            self._page = after
            self._store.publish(before, after)

    def _advance(self) -> None:
        self.version += 1
        for ticket in self._tickets.pop(self.version, ()):
            ticket.resolve()

    def _mark(self, part: Contribution) -> None:
        self._counted_session[part.rank] = part.session
        self._counted_clock[part.rank] = part.clock + 1

    def read(self, version_min: int) -> tuple[int, Page] | None:
        """The version and its page, pinned (give it back to the store), or None while the version is below `version_min`."""
        with self.lock:
            if self.version < version_min:
                return None
            assert self._page is not None
            return self.version, self._store.pin(self._page)

    def when(self, version: int, ticket: Ticket) -> None:
        """Resolve the ticket when the block reaches the version."""
        with self.lock:
            if self.version >= version:
                ticket.resolve()
            else:
                waiters = self._tickets.setdefault(version, [])
                # Those that gave up are cleared as others come, so that timed-out waits do not pile up.
                waiters[:] = [t for t in waiters if not t.future.done()] + [ticket]

    def missing_in(self, round_: int) -> int:
        """Mask of the workers whose gradients the open round lacks; 0 if `round_` has closed. Takes no lock: for messages."""
        if round_ < self.version:
            return 0
        current = self._round
        contributors = 0 if current is None else current.contributors
        return self._waited_in(self.version) & ~contributors
