"""A small block of a job with fast aggregation: its rounds, sums and updates are those of psd_core's core of a block, in C.

The core says what a gradient counts as, and applies and publishes the update; all that it has is seen through properties. Here
is what it knows nothing of: who takes part, errors, waits and times. What costs a block of some KiB most is Python itself:
an update in C is one call. Larger blocks, whose gradients are lent (lent_gradients.py), and all other jobs have the rounds of
rounds.py. Must not know which sessions are valid, leases or messages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import cast

from typing_extensions import override

from psd.contract.jobspec import JobSpec
from psd.contract.layout import Block
from psd.state import locks
from psd.state.aggregation.block import BlockServices, BlockState
from psd.state.aggregation.consistency import Policy, Sync
from psd.state.aggregation.rounds import Contribution, CoreRound, FastRound, Outcome, Round, Taken, Update
from psd.state.aggregation.rules import BoundRule
from psd.state.aggregation.staleness import Ages
from psd.state.aggregation.trained import RoundServices, not_counted
from psd.state.counts import CoreTimes
from psd.state.tickets import Ticket
from psd.state.workers.membership import Membership
from psd_core import RULES, arena
from psd_core.arena import BlockCore, Page, Terms

BYTES_MAX = (64 << 10) - 1
"""Largest block. Gradients of more than that are lent."""

SHARD_BYTES_MAX = 1 << 20
"""Most bytes of a shard's small blocks together; above it none is. Each keeps a few places of its own in the arena."""

_OUTCOMES = tuple(Outcome)


def small_blocks(spec: JobSpec, round_kind: type[Round], plans: Iterable[Block]) -> set[int]:
    """Indices of the blocks that are small, and of which the core knows the rule, the rounds and the form of gradients."""
    if round_kind is not FastRound or spec.is_publication or spec.sample or spec.world_size > arena.WORKERS_MAX:
        return set()
    found = [plan for plan in plans if plan.trained and plan.nbytes <= BYTES_MAX and not (plan.codec or plan.has_differences)]
    found = [plan for plan in found if spec.groups[plan.group].rule in RULES and plan.dtype.name in ("float32", "float64")]
    return {plan.index for plan in found} if sum(plan.nbytes for plan in found) <= SHARD_BYTES_MAX else set()


def terms_of(plan: Block, spec: JobSpec, policy: Policy) -> Terms:
    """The way in which a small block counts gradients."""
    group = spec.groups[plan.group]
    return Terms(
        group.rule,
        group.flags,
        plan.segment_ends,
        ages_rate=bool(group.staleness),
        has_rounds=policy.has_rounds,
        is_mean=spec.reduction == "mean",
        quorum=policy.quorum if isinstance(policy, Sync) else 0,
    )


class SmallRound(CoreRound):
    """The open round of a small block, to be asked. The core takes contributions and makes updates by itself."""

    _core: BlockCore

    def __init__(self, core: BlockCore, members: Membership) -> None:
        self._core = core
        self._members = members

    @override
    def is_complete(self) -> bool:
        number = self._core.version
        return self._core.is_complete(self._members.waited_in(number), self._members.is_void(number))

    @override
    def end(self) -> None:
        pass  # the core keeps its memory

    @override
    def standing(self, part: Contribution) -> Outcome | None:
        raise AssertionError("the core says what a contribution counts as")

    @override
    def take(self, part: Contribution) -> Taken:
        raise AssertionError("the core takes contributions")

    @override
    def update(self, last: Contribution | None) -> Update:
        raise AssertionError("the core makes updates")


class CountedAges(Ages):
    """The ages of the gradients that a core has applied."""

    def __init__(self, block: int, core: BlockCore) -> None:
        self._block = block
        self._core = core

    @property
    def counts(self) -> list[int]:  # type: ignore[override]
        """Gradients by age_bucket of their age."""
        return self._core.ages

    @property
    def total(self) -> int:  # type: ignore[override]
        """The sum of these ages."""
        return self._core.age_total


class SmallBlock(BlockState):
    """A small block, which steps lock and change, too (psd_core/steps.py). Attributes: as of BlockState.

    Args:
        now: returns monotonic seconds. measures_ranks: others wait for each rank as long as this block says.
    """

    def __init__(
        self,
        plan: Block,
        slot: int,
        bound: BoundRule,
        services: BlockServices,
        terms: Terms,
        now: Callable[[], float],
        *,
        measures_ranks: bool,
    ) -> None:
        rounds: RoundServices = services.rounds
        self._lent = services.arena.lend(slot, terms)
        self._core = self._lent.core
        self._now = now
        self._round = SmallRound(self._core, rounds.members)
        self._core.attend(rounds.members.ranks, measures_ranks)
        super().__init__(plan, slot, bound, services, CoreTimes(self._core, now))
        self.ages = CountedAges(plan.index, self._core)

    @override
    def _new_lock(self, index: int) -> threading.Lock:
        return locks.new(locks.Level.BLOCK, index, cast(threading.Lock, self._core.lock()))

    @property
    @override
    def is_busy(self) -> bool:
        return False  # never for long

    @property
    def lacks_space(self) -> bool:
        """True if a round is complete and lacks room, as of Trained. Meanwhile no step counts."""
        return self._core.is_stuck

    @lacks_space.setter
    def lacks_space(self, lacks: bool) -> None:
        self._core.is_stuck = lacks

    def of_steps(self, first_scalar: int) -> tuple[BlockCore, str, int]:
        """Facts that steps have to know of it; see psd_core.steps.Steps."""
        letter = {"float32": "f", "float64": "d", "float16": "e"}.get(self.plan.gradient_dtype.name, "H")
        return self._core, letter, first_scalar

    @override
    def _add_wait(self, version: int, ticket: Ticket) -> None:
        self._core.has_tickets = True  # until `end_waits`
        super()._add_wait(version, ticket)

    def end_waits(self) -> None:
        """End the waits for the version that a step has made."""
        with self.lock:
            version = self._core.version
            self._waits.up_to(version)
            self._core.has_tickets = self._waits.has_tickets

    @property
    def version(self) -> int:
        """Updates applied; with rounds also the number of the open round."""
        return self._core.version

    @version.setter
    def version(self, version: int) -> None:
        self._core.version = version

    @override
    def _open(self, version: int) -> None:
        self._core.open(version)

    @override
    def contribute(self, part: Contribution) -> Outcome:
        with self.lock:
            if self._core.is_stuck:
                self._apply_due()
            core, members, has_rounds = self._core, self._members, self._policy.has_rounds
            before = core.version
            waited = members.waited_in(before) if has_rounds else 0
            arguments = (
                part.rank,
                part.session,
                part.clock,
                part.weight,
                part.values,
                part.present,
                part.scalars,
                part.since,
                part.version_read,
                part.scale,
                members.session_of(part.rank) == part.sent_by,
                part.already,
                waited,
            )
            outcome = core.contribute(*arguments)
            if outcome > Outcome.EARLY:
                outcome = self._made(lambda: core.contribute(*arguments), part)
            if has_rounds and outcome == Outcome.COUNTED:
                core.on_gradient(part.rank, self._now(), waited)
                if core.version != before:
                    self._on_closed()
                    if self._round.is_complete():
                        self._settle()
            return _OUTCOMES[outcome]

    def _made(self, call: Callable[[], int], part: Contribution | None = None) -> int:
        """Make a call of the core, with the room that it needs; what it refuses is an error."""
        while (outcome := call()) == arena.NEEDS_PAGE:
            self._with_room(self._lent.extend)
        if outcome == arena.STORE_CLOSED:
            raise arena.StoreClosed(f"block {self.index}: the arena has been closed")
        if outcome == arena.GIVEN_BACK:
            self._lent.came_too_late()
        if part is not None and outcome == arena.NOT_SENT:
            raise not_counted(part)
        if part is not None and outcome == arena.AHEAD:
            self.ages.age(part.rank, part.version_read, self.version)
        return outcome

    @override
    def _close(self) -> None:
        self._made(self._core.close_round)
        self._on_closed()

    def _on_closed(self) -> None:
        """End what has waited for the round that has closed; the next one is open."""
        number = self._core.version
        self._waits.reached(number)
        self._core.on_close(self._now(), self._members.waited_in(number))

    @override
    def pin(self) -> Page:
        return self._lent.pin()

    @override
    def unpin(self, page: Page) -> None:
        assert isinstance(page, arena.LentPage)
        self._lent.unpin(page)
