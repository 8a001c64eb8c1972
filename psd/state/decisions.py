"""EXACT aggregation: the workers of a round, decided once, by shard 0, for all shards.

A worker *commits* a round when all shards have its whole push. The round is decided when the policy says so of those that have
committed: so each member's gradient is complete everywhere, and a half push leaves no trace. The decision is recorded in the
arena before anybody learns of it, and stands whatever dies; workers carry it to the other shards with their next pull.

Rounds are decided one after the other. Guarded by the shard's lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from psd.contract.errors import InvalidRequest
from psd.contract.jobspec import JobSpec
from psd.contract.verdicts import members_mask
from psd.state import locks
from psd.state.consistency import Policy
from psd.state.membership import Membership, Worker
from psd.state.tickets import Ticket
from psd.v1 import job_pb2
from psd_core.arena import Arena

KEPT = 8
"""Decisions that the arena keeps. Shards are at most one round apart; two would do."""

_WORD = "decided"


@locks.guarded_by(locks.Level.SHARD)
class Decisions:
    """The rounds that shard 0 has decided, and who has committed the next one.

    Attributes:
        news: rounds and masks that this shard's own blocks have not been told yet; whoever drops the shard's lock tells them.
    """

    def __init__(self, arena: Arena, policy: Policy, members: Membership) -> None:
        self._arena = arena
        self._policy = policy
        self._members = members
        self.news: list[tuple[int, int]] = []
        self._committed = 0
        self._skipping = 0
        self._waiting: list[Ticket] = []

    @property
    def next_round(self) -> int:
        """The first round that is not decided."""
        return self._arena.word(_WORD)

    def entry_clock(self, rank: int) -> int:
        """The clock at which a new session of a rank takes part. If its last one had committed the open round, that stands."""
        return self.next_round + (self._committed >> rank & 1)

    def latest(self) -> list[job_pb2.Decision]:
        """The decisions that are kept, oldest first."""
        size = (len(self._members.workers) + 7) // 8
        found = []
        for round_ in range(max(0, self.next_round - KEPT), self.next_round):
            mask = self._arena.decision(round_)
            if mask is not None:
                found.append(job_pb2.Decision(round=round_, members=mask.to_bytes(size, "little")))
        return found

    def on_commit(self, worker: Worker, clock: int, *, skip: bool = False, only_wait: bool = False) -> bool:
        """Note that all shards have the worker's push of `clock`; True if that round is already decided.

        Args:
            skip: the worker's gradient is not finite: the round is decided to be made of nobody, and so changes nothing.
            only_wait: there is no such push; the worker takes part after that round, and has not heard what it is made of.

        Raises:
            InvalidRequest: the round before is not decided, so that the worker cannot have pushed this one.
        """
        if clock > self.next_round:
            raise InvalidRequest(f"clock: {clock} cannot be committed before round {self.next_round} is decided")
        if clock < self.next_round:
            return True
        if only_wait:
            self._members.on_clock(worker, clock + 1)
        else:
            self._committed |= 1 << worker.rank
            self._skipping |= skip << worker.rank
        self.settle()
        return clock < self.next_round

    def wait(self, ticket: Ticket) -> None:
        """Resolve the ticket when its round is decided."""
        if ticket.clock < self.next_round:
            ticket.resolve()
            return
        self._waiting = [t for t in self._waiting if not t.future.done()]
        self._waiting.append(ticket)

    def missing(self) -> int:
        """Mask of the workers that the next decision waits for."""
        return self._members.waited_in(self.next_round) & ~self._committed

    def settle(self) -> None:
        """Decide the next round if it is complete now, and those that everybody skips."""
        while self._committed or self._members.is_void(self.next_round):
            if self._committed and not self._policy.closes(self._committed, self._members.waited_in(self.next_round)):
                return
            self._decide(self.next_round)

    def _decide(self, round_: int) -> None:
        mask = 0 if self._skipping else self._committed
        self._committed = self._skipping = 0
        self._arena.record_decision(round_, mask)
        self._arena.set_word(_WORD, round_ + 1)
        self.news.append((round_, mask))
        waiting, self._waiting = self._waiting, []
        for ticket in waiting:
            ticket.resolve()


@locks.guarded_by(locks.Level.SHARD)
class StagedPushes:
    """Complete pushes that may or may not count; this shard has not learned the decision. On every shard; under its lock."""

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}
        self._members: dict[int, int] = {}

    def add(self, round_: int, rank: int) -> None:
        """Note that a whole push has come."""
        self._ranks[round_] = self._ranks.get(round_, 0) | 1 << rank

    def learn(self, decisions: Sequence[tuple[int, int]]) -> None:
        """Note the members of rounds, given as (round, mask of workers)."""
        self._members.update(decisions)
        for old in sorted(self._members)[:-KEPT]:
            del self._members[old]

    def count(self) -> tuple[int, int]:
        """Numbers of pushes found to count, and not to count, since the last call. A round of nobody has neither."""
        counted = left_out = 0
        for round_ in [r for r in self._ranks if r in self._members or r < min(self._members, default=0)]:
            ranks, members = self._ranks.pop(round_), self._members.get(round_, 0)
            if members:
                counted += (ranks & members).bit_count()
                left_out += (ranks & ~members).bit_count()
        return counted, left_out


def check_decisions(decisions: Sequence[job_pb2.Decision], spec: JobSpec) -> list[tuple[int, int]]:
    """Decisions as (round, mask); InvalidRequest for too many, an unknown worker, or a job without decisions."""
    if len(decisions) > KEPT:
        raise InvalidRequest(f"decisions: {len(decisions)} are more than the {KEPT} that shards keep")
    found = []
    world_size = spec.world_size
    bytes_max = (world_size + 7) // 8
    for decision in decisions:
        if len(decision.members) > bytes_max:
            raise InvalidRequest(
                f"decisions.members: has {len(decision.members)} bytes, {bytes_max} are enough for world_size {world_size}"
            )
        mask = members_mask(decision.members)
        if mask >> world_size:
            raise InvalidRequest(f"decisions.members: names worker {mask.bit_length() - 1}, world_size is {world_size}")
        found.append((decision.round, mask))
    if found and spec.aggregation != "exact":
        raise InvalidRequest(f"decisions: only rounds of exact aggregation are decided, and the job's is {spec.aggregation}")
    return found
