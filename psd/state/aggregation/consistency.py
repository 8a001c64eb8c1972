"""The consistency policies: when a round closes, and who may go on. Small pure objects; psd/contract/consistency.py names them.

Sets of workers are bit masks, as in membership.py. Must not know blocks, gradients or time.
"""

from __future__ import annotations

from typing import Protocol

from psd.contract.jobspec import JobSpec


class Policy(Protocol):
    """The questions that a shard asks about consistency.

    Attributes:
        has_rounds: True: gradients of a round are reduced to one update. False: each push is applied as it arrives.
        has_bound: True if no worker may go further ahead of the slowest one than a bound.
    """

    has_rounds: bool
    has_bound: bool

    def closes(self, contributors: int, waited: int) -> bool:
        """True if a round with these contributors is complete while these workers are waited for."""
        ...

    def lag(self, clock: int) -> int:
        """The clock that every worker must have reached before one at `clock` may push or pull."""
        ...


class Sync:
    """Bulk-synchronous (BSP): one update per round. With quorum < world_size there are backup workers (Chen et al. 2016)."""

    has_rounds = True
    has_bound = False  # rounds need none

    def __init__(self, quorum: int) -> None:
        self.quorum = quorum

    def closes(self, contributors: int, waited: int) -> bool:
        """True with `quorum` contributors, or with all that are left if those are fewer."""
        return contributors.bit_count() >= min(self.quorum, (contributors | waited).bit_count())

    def lag(self, clock: int) -> int:
        """0: nobody has to wait here, because the rounds themselves hold the workers together."""
        del clock
        return 0


class Whole(Sync):
    """A round sets the tensors of all workers together: it waits for each of them, also for one that is gone."""

    def closes(self, contributors: int, waited: int) -> bool:
        """True with all workers."""
        del waited
        return contributors.bit_count() >= self.quorum


class Async:
    """Asynchronous (ASP): nobody waits for anybody."""

    has_rounds = False
    has_bound = False

    def closes(self, contributors: int, waited: int) -> bool:
        """True: every contribution is an update of its own."""
        del contributors, waited
        return True

    def lag(self, clock: int) -> int:
        """0: there is no bound."""
        del clock
        return 0


class StaleSynchronous(Async):
    """Stale synchronous parallel (SSP; Ho et al. 2013): as ASP, but a worker waits while clock - min_clock > bound."""

    has_bound = True

    def __init__(self, staleness_bound: int) -> None:
        self.staleness_bound = staleness_bound

    def lag(self, clock: int) -> int:
        """The clock `staleness_bound` steps behind, but at least 0."""
        return max(0, clock - self.staleness_bound)


def ranks_in(mask: int) -> list[int]:
    """The ranks in a bit mask, ascending."""
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]


def policy_of(spec: JobSpec) -> Policy:
    """The policy that a job declared."""
    match spec.consistency.mode:
        case "sync":
            return Whole(spec.world_size) if spec.is_publication else Sync(spec.quorum)
        case "async":
            return Async()
        case _:
            return StaleSynchronous(spec.consistency.staleness_bound)
