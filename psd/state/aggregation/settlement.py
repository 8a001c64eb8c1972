"""Settlement of the rounds of exact aggregation: all shards agree on the members of a round, and on how it is applied.

    1. commit     a worker tells shard 0 that all shards have its whole push
    2. decision   shard 0 chooses the members of the round, as soon as the policy lets those that have committed close it
    3. measure    each shard computes sums of squares of its part of the round
    4. verdict    shard 0 says with which scale and trust ratios the round is applied, or that it is skipped
    5. the blocks apply the round

3 and 4 are for jobs whose updates need norms over the whole gradient. As in a two-phase commit, shard 0 is the coordinator, and
each shard a participant; workers carry messages between them, and where none is left, shard 0's end note does. A half push
leaves no trace. It does not matter which worker asks, how often, or in which incarnation of a shard: measures follow from the
decision, the gradients and the current pages alone, to the bit. A decision is recorded in the arena, and a final verdict beside
it, before anybody hears of it: once a verdict is known, some shard may have applied it, and could not measure that round again.

Rounds are settled one after the other. Methods run under the shard's lock unless they say that they take none. Must not know
sessions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from psd.contract.errors import InvalidRequest
from psd.contract.jobspec import JobSpec
from psd.contract.verdicts import (
    WITH_VERDICTS,
    Squares,
    Verdict,
    judged,
    measure_message,
    measures_gradients,
    members_mask,
    sums_per_tensor,
)
from psd.state import locks
from psd.state.aggregation.consistency import Policy, ranks_in
from psd.state.aggregation.grace import Grace
from psd.state.aggregation.rounds import Unmeasured
from psd.state.aggregation.trained import Trained
from psd.state.tickets import Ticket
from psd.state.workers.membership import Membership, Worker
from psd.v1 import control_pb2, data_pb2, job_pb2
from psd_core.arena import Arena

KEPT = 8
"""Number of decisions that the arena keeps. Shards are at most one round apart, so two would be enough."""

PUT_BYTES = 16

_WORD = "decided"

Decided = tuple[int, int]
"""A decision: a round and the bit mask of its members."""


class Verdicts(Protocol):
    """Storage of the latest verdict, so that a shard that is started again knows it."""

    def load_verdict(self) -> bytes:
        """The stored verdict; empty if there is none."""

    def save_verdict(self, verdict: bytes) -> None:
        """Store a verdict before anybody hears of it. Raises OutOfSpace if it finds no room."""


@locks.guarded_by(locks.Level.SHARD, but=("judge",))
class Coordinator:
    """Shard 0's part: who has committed the next round, what was decided, and the verdict on the latest round that has one.

    Args:
        measuring: number of shards that have something to measure.
        now: monotonic seconds.
    """

    def __init__(
        self,
        spec: JobSpec,
        policy: Policy,
        members: Membership,
        arena: Arena,
        verdicts: Verdicts,
        measuring: int,
        now: Callable[[], float],
    ) -> None:
        self._spec = spec
        self._policy = policy
        self._members = members
        self._arena = arena
        self._verdicts = verdicts
        self._measuring = measuring
        self._grace = Grace(spec.grace, now)
        self._committed = 0
        self._skipping = 0
        self._puts: dict[int, bytes] = {}  # by rank of those that have committed a publication, what it is
        self._waiting: list[Ticket] = []
        self._news: list[Decided] = []
        self._last: dict[int, Decided] = {}
        self._began_at = self.next_round
        stored = verdicts.load_verdict() if spec.has_verdicts else b""
        self._verdict = Verdict.from_message(job_pb2.Verdict.FromString(stored), spec) if stored else None

    # -- decisions -----------------------------------------------------------------------------------------------------

    @property
    def next_round(self) -> int:
        """The first round that is not decided."""
        return self._arena.word(_WORD)

    def entry_clock(self, rank: int) -> int:
        """The clock at which a new session of a rank begins: after the open round, if an earlier session has committed it."""
        return self.next_round + self.has_committed(rank)

    def has_committed(self, rank: int) -> bool:
        """True if all shards have the rank's gradient for the round that is to be decided next."""
        return bool(self._committed >> rank & 1)

    def latest(self) -> list[job_pb2.Decision]:
        """The decisions that are kept, oldest first."""
        rounds = range(max(0, self.next_round - KEPT), self.next_round)
        return [self._message((each, mask)) for each in rounds if (mask := self._arena.decision(each)) is not None]

    def latest_for(self, rank: int) -> list[job_pb2.Decision]:
        """The latest decisions, with the one on the last round that this rank has committed: it may be older than the others.

        This process alone remembers that one; after a restart only the latest decisions are known.
        """
        found, last = self.latest(), self._last.get(rank)
        if last is not None and found and last[0] < found[0].round:
            found = [self._message(last), *found[1 - KEPT :]]
        return found

    def has_left_out(self, rank: int, round_: int) -> bool:
        """True if this process has decided a round without the worker's push."""
        last = self._last.get(rank)
        return self._began_at <= round_ < self.next_round and (last is None or last[0] != round_)

    def _message(self, decided: Decided) -> job_pb2.Decision:
        round_, mask = decided
        return job_pb2.Decision(round=round_, members=mask.to_bytes((len(self._members.workers) + 7) // 8, "little"))

    def check(self, request: control_pb2.CommitRequest) -> None:
        """Raise InvalidRequest for a commit that no worker of this job sends."""
        if request.skip and self._spec.nan_policy != "skip":
            raise InvalidRequest(f"skip: the job's nan_policy is {self._spec.nan_policy}, not skip")
        if request.skip and request.only_wait:
            raise InvalidRequest("skip: a worker that sets only_wait has no gradient in the round")
        if request.only_ask and (request.skip or request.only_wait or request.measures):
            raise InvalidRequest("only_ask: a worker that only asks neither skips nor waits, and brings no measures")
        if not 0 <= request.spare_s < math.inf:
            raise InvalidRequest(f"spare_s: must be finite and >= 0, got {request.spare_s}")
        if len(request.put) not in ((0, PUT_BYTES) if self._spec.is_publication else (0,)):
            raise InvalidRequest(f"put: has {len(request.put)} bytes, expected {PUT_BYTES}, and those of a publication alone")
        if request.measures and not self._spec.has_verdicts:
            raise InvalidRequest(f"measures: {WITH_VERDICTS} is measured")
        if request.measures and request.clock >= self.next_round:
            raise InvalidRequest(f"measures: round {request.clock} is not decided yet")

    def on_commit(
        self,
        worker: Worker,
        clock: int,
        *,
        skip: bool = False,
        only_wait: bool = False,
        spare_s: float = 0.0,
        put: bytes = b"",
    ) -> bool:
        """Note that all shards have the worker's push of `clock`; True if that round is already decided.

        Args:
            skip: the worker's gradient is not finite: the round is decided to have no members, and so changes nothing.
            spare_s: as in CommitRequest.
            only_wait: there is no such push. The worker takes part after that round, and only waits for the decision on it.
            put: as in CommitRequest.

        Raises:
            InvalidRequest: the round before is not decided, so that the worker cannot have pushed this one; or others have
                committed another put.
        """
        if clock > self.next_round:
            raise InvalidRequest(f"clock: {clock} cannot be committed before round {self.next_round} is decided")
        if clock < self.next_round:
            return True
        if only_wait:
            self._members.on_clock(worker, clock + 1)
        else:
            if not self.has_committed(worker.rank):
                self._grace.on_commit(spare_s)
            if put:
                self._check_put(worker.rank, put)
                self._puts[worker.rank] = put
            self._committed |= 1 << worker.rank
            self._skipping |= skip << worker.rank
        self._decide_complete()
        return clock < self.next_round

    def _check_put(self, rank: int, put: bytes) -> None:
        """Raise InvalidRequest if others have committed another put."""
        other = next((each for each, theirs in self._puts.items() if each != rank and theirs != put), None)
        if other is not None:
            raise InvalidRequest(
                f"put: worker {other} has put its part of another version, with another meta, and waits for worker {rank}'s; "
                "parts of different puts are not mixed. If it was started again, let it open the store first"
            )

    def on_joined_anew(self, rank: int) -> None:
        """Forget what an earlier session of the rank has committed of a publication: the next may put something else."""
        if self._spec.is_publication:
            self._committed &= ~(1 << rank)
            self._puts.pop(rank, None)

    def wait(self, ticket: Ticket) -> None:
        """Resolve the ticket when its round is decided."""
        if ticket.clock < self.next_round:
            ticket.resolve()
            return
        self._waiting = [t for t in self._waiting if not t.future.done()]
        self._waiting.append(ticket)

    @property
    def is_due_in(self) -> float | None:
        """Seconds until the next round is to be decided with those that have committed it; None: it has no quorum yet."""
        return self._grace.left() if self._grace.has_begun else None

    def missing(self) -> int:
        """Mask of the workers that the next decision waits for."""
        return self._members.waited_in(self.next_round) & ~self._committed

    def settle(self) -> list[Decided]:
        """Decide the rounds that are complete now, and those that everybody has skipped.

        Returns:
            All decisions since the last call; this shard's own blocks have not been told yet.
        """
        self._decide_complete()
        news, self._news = self._news, []
        return news

    def _decide_complete(self) -> None:
        while self._committed or self._members.is_void(self.next_round):
            waited = self._members.waited_in(self.next_round)
            if self._committed and not self._policy.closes(self._committed, waited):
                return
            if self._committed and waited & ~self._committed and self._grace.left() > 0:
                return
            self._decide(self.next_round)

    def _decide(self, round_: int) -> None:
        mask = 0 if self._skipping else self._committed
        self._last.update(dict.fromkeys(ranks_in(self._committed), (round_, mask)))
        self._committed = self._skipping = 0
        self._puts.clear()
        self._grace.end()
        self._arena.record_decision(round_, mask)
        self._arena.set_word(_WORD, round_ + 1)
        self._news.append((round_, mask))
        waiting, self._waiting = self._waiting, []
        for ticket in waiting:
            ticket.resolve()

    # -- verdicts ------------------------------------------------------------------------------------------------------

    def verdict_on(self, round_: int) -> Verdict | None:
        """The verdict on a round, or None."""
        return self._verdict if self._verdict is not None and self._verdict.round == round_ else None

    @property
    def final_verdict(self) -> Verdict | None:
        """The verdict on the latest round that has one, if all shards may apply it."""
        return self._verdict if self._verdict is not None and self._verdict.is_final else None

    def judge(self, round_: int, under: Verdict | None, measures: Sequence[job_pb2.Measure]) -> Verdict | None:
        """The verdict that follows from the measures of a round; None if the round needs no other one. Takes no lock.

        Raises:
            InvalidRequest: the measures are not those of all shards.
        """
        if self._is_judged(round_):
            return None
        if len(measures) != self._measuring:
            raise InvalidRequest(f"measures: expected those of {self._measuring} shards, got {len(measures)}")
        if under is not None and under.round != round_:
            raise InvalidRequest(f"verdict.round: the measures are of round {round_}, got {under.round}")
        return judged(self._spec, round_, under, measures)

    def record(self, verdict: Verdict | None) -> None:
        """Keep a verdict. If there is one on that round already, it stays: the new one equals it."""
        if verdict is None or self._is_judged(verdict.round):
            return
        if verdict.is_final:
            self._verdicts.save_verdict(verdict.to_message().SerializeToString())
        self._verdict = verdict

    def _is_judged(self, round_: int) -> bool:
        latest = self._verdict
        return latest is not None and (latest.round > round_ or (latest.round == round_ and latest.is_final))


@locks.guarded_by(locks.Level.SHARD, only=("on_staged", "count"))
class Participant:
    """Each shard's part: tells its blocks what has been settled, measures them, and counts which pushes were applied.

    Args:
        trained: the blocks that every push must cover.
    """

    def __init__(self, spec: JobSpec, trained: Sequence[Trained]) -> None:
        self._spec = spec
        self._trained = trained
        self._decided_round = self._judged_round = -1
        self._staged: dict[int, int] = {}  # by round, the workers whose whole push has come, but may not count
        self._members: dict[int, int] = {}

    def check(self, decisions: Sequence[job_pb2.Decision]) -> list[Decided]:
        """The decisions that a worker brings. Takes no lock.

        Raises:
            InvalidRequest: there are too many, one names a worker that does not exist, or the job has no decisions.
        """
        if len(decisions) > KEPT:
            raise InvalidRequest(f"decisions: {len(decisions)} are more than the {KEPT} that shards keep")
        found = []
        world_size = self._spec.world_size
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
        if found and self._spec.aggregation != "exact":
            kind = self._spec.aggregation
            raise InvalidRequest(f"decisions: only rounds of exact aggregation are decided, and the job's is {kind}")
        return found

    def verdict_of(
        self, request: control_pb2.CommitRequest | control_pb2.MeasureRequest | data_pb2.PullRequest
    ) -> Verdict | None:
        """The verdict that a worker brings, or None; InvalidRequest if it is malformed. Takes no lock."""
        return Verdict.from_message(request.verdict, self._spec) if request.HasField("verdict") else None

    def follow(self, decisions: Iterable[Decided], verdict: Verdict | None = None) -> None:
        """Tell the blocks the members of rounds, and the verdict on one. Repeating it changes nothing. Takes no lock.

        Raises:
            InvalidRequest: a round that nobody can have decided yet. Following it would make all rounds before it look old.
        """
        for round_, members in decisions:
            if round_ > self._decided_round + 1:
                self._check_round("decisions.round", round_)
            # A block that had not closed the round when it was first told keeps the decision, but loses it if the process dies;
            # therefore blocks are told the last decision again.
            if round_ >= self._decided_round:
                self._decided_round = round_
                for block in self._trained:
                    block.decide(round_, members)
        if verdict is not None and verdict.round >= self._judged_round:
            self._check_round("verdict.round", verdict.round)
            self._judged_round = verdict.round
            for block in self._trained:
                block.judge(verdict)

    def _check_round(self, field: str, round_: int) -> None:
        furthest = max((block.version for block in self._trained), default=round_)
        if round_ > furthest + KEPT:
            raise InvalidRequest(f"{field}: {round_} is far beyond this shard's {furthest}")

    def measure(self, round_: int, under: Verdict | None, rank: int) -> control_pb2.MeasureReply:
        """Measure this shard's part of a round. Different ranks begin at different blocks. Takes no lock."""
        is_whole, each = measures_gradients(self._spec, under), sums_per_tensor(self._spec)
        if not is_whole:
            under = under or Verdict(round_)
        totals: Squares = [0] * (1 if is_whole else each * len(self._spec.ratio_tensors))
        blocks = [block for block in self._trained if is_whole or block.ratio_places is not None]
        # Workers that measure at the same time begin at different blocks, and so share the work.
        start = rank * len(blocks) // self._spec.world_size
        for block in blocks[start:] + blocks[:start]:
            found = block.measure(round_, under)
            if found is Unmeasured.CLOSED:
                return control_pb2.MeasureReply(is_closed=True)
            if found is Unmeasured.OPEN:
                return control_pb2.MeasureReply(is_open=True, missing=ranks_in(block.missing_in(round_)))
            if found is None or totals is None:
                totals = None
            elif is_whole or block.ratio_places is None:
                totals[0] += found[0]
            else:
                for segment, place in enumerate(block.ratio_places.tolist()):
                    for one in range(each if place >= 0 else 0):
                        totals[each * place + one] += found[each * segment + one]
        return control_pb2.MeasureReply(measure=measure_message(totals))

    def on_staged(self, round_: int, rank: int) -> None:
        """Note that a worker's whole push has come, while this shard does not know yet whether it counts."""
        self._staged[round_] = self._staged.get(round_, 0) | 1 << rank

    def count(self, decisions: Sequence[Decided]) -> tuple[int, int]:
        """Note decisions; return how many staged pushes are now known to count, and how many are known not to count.

        The pushes of a round that was skipped, and so has no members, are in neither number.
        """
        self._members.update(decisions)
        counted = left_out = 0
        for round_ in [r for r in self._staged if r in self._members or r < min(self._members, default=0)]:
            ranks, members = self._staged.pop(round_), self._members.get(round_, 0)
            if members:
                counted += (ranks & members).bit_count()
                left_out += (ranks & ~members).bit_count()
        for old in sorted(self._members)[:-KEPT]:
            del self._members[old]
        return counted, left_out
