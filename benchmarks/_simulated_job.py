"""A job in virtual time: a shard's real state decides rounds, quorum, grace and leases; learners and their failures are events.

The shard is psd.state.shard.Shard, with a clock of ours. A learner is what psd_client/torch/learner.py is to the shard: it
makes steps, and after some of them pushes, commits, waits or not, and pulls. Its parameters are one number, since only what
counts is looked at. Knows nothing of chips.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from psd.contract.config import ServerConfig
from psd.contract.consistency import Consistency
from psd.contract.jobspec import GroupSpec, JobSpec, TensorSpec
from psd.contract.layout import Layout
from psd.contract.verdicts import members_mask
from psd.state.desks.transfers import Push
from psd.state.shard import Shard
from psd.state.tickets import Ticket
from psd.state.workers.membership import tick_s
from psd.v1 import control_pb2, data_pb2, job_pb2

SCALARS = (0.7, 0.0, 0.0, 0.0)  # of SGD: lr, momentum, dampening, weight_decay
BEATS_PER_LEASE = 3
JITTER = 0.02
"""Share of the mean by which a step of a decoupled learner is longer or shorter. With steps of exactly one length, one that
comes just too late for a round would come so for each."""


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        learners: workers of the job. steps: between two exchanges of a fragment. fragments: of the model, in turn.
        delay: steps that are made while an exchange is under way; only with a quorum. quorum: 0: of all.
        lease_s: after which nobody waits for a silent learner. transfer_s: to push a fragment, or to fetch it.
        keeps: a learner that has failed goes on with what it had learned; else it begins anew, at the job's parameters.
    """

    learners: int
    steps: int
    fragments: int = 1
    delay: int = 0
    quorum: int = 0
    lease_s: float = 10.0
    transfer_s: float = 0.0
    keeps: bool = True

    @property
    def is_decoupled(self) -> bool:
        """True if no learner waits for another."""
        return 0 < self.quorum < self.learners


@dataclass(frozen=True)
class Failures:
    """Failures of a learner.

    Attributes:
        parts: in which a learner can fail. part_mtbf_s: mean time between failures of one of them, by an exponential law.
        away_s: seconds for which the learner stands still after each. repair_s: seconds until the part works again; meanwhile
            the learner makes its steps without it, from fewer tokens.
    """

    parts: int
    part_mtbf_s: float
    away_s: float
    repair_s: float


class Events:
    """The events of a job, in virtual seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._number = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Let something happen so many seconds from now."""
        heapq.heappush(self._queue, (self.now + seconds, next(self._number), what))

    def run(self, until: float) -> None:
        """Let everything happen that is due until then."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, what = heapq.heappop(self._queue)
            what()
        self.now = until


@dataclass
class Sent:
    """A difference that its learner has pushed, and of which it is not known whether it counts.

    Attributes:
        clock: at which it is pushed. steps, tokens: that are behind it. life: of its learner.
    """

    rank: int
    clock: int
    fragment: int
    steps: int
    tokens: float
    life: int


@dataclass
class Figures:
    """Results of a run. `made`, `merged`: tokens that learners learned from, and those of differences that counted."""

    made: float = 0.0
    merged: float = 0.0
    steps: int = 0
    failures: int = 0
    rounds: int = 0
    idle_s: float = 0.0
    members: int = 0


class SimulatedJob:
    """One shard, its learners, and what becomes of them.

    Args:
        step_s: seconds of a local step.
    """

    def __init__(self, way: Way, step_s: float, failures: Failures | None, seed: int) -> None:
        self.way, self.step_s, self.failures = way, step_s, failures
        self.events, self.random, self.figures = Events(), random.Random(seed), Figures()
        exact: dict[str, Any] = {"quorum": way.quorum, "aggregation": "exact", "grace": math.inf} if way.is_decoupled else {}
        self.spec = JobSpec(
            way.learners,
            (TensorSpec("parameters", (1,), "float64", 0),),
            (GroupSpec("sgd", ()),),
            Consistency.parse("sync"),
            "mean",
            **exact,
        )
        self.layout = Layout(self.spec, 1)
        config = ServerConfig(0, 1, lease_s=way.lease_s, on_worker_failure="wait")
        self.shard = Shard(config, now=self._time, wall=self._time)
        self._sent: dict[int, list[Sent]] = {}  # by clock
        self._closed = 0
        self._due_at = math.inf
        self.learners = [Learner(self, rank) for rank in range(way.learners)]
        choices = [learner.join() for learner in self.learners]
        self._initialize(self.learners[0].caller, choices[0])
        self.events.after(tick_s(way.lease_s), self._tick)
        for learner in self.learners:
            learner.begin()

    def _time(self) -> float:
        return 1000.0 + self.events.now

    def _initialize(self, caller: job_pb2.Caller, choice: int) -> None:
        admission = self.shard.admission
        begun = admission.begin_initialize(caller, self.layout.digest, choice)
        admission.initialize_block(begun, 0, memoryview(np.zeros(1)))
        admission.end_initialize(begun)

    def run(self, seconds: float, warm_up: float = 0.0) -> Figures:
        """Let the job train for so long, after a warm-up that does not count; what came of it."""
        self.events.run(warm_up)
        self.figures = Figures()
        self.events.run(warm_up + seconds)
        return self.figures

    def close(self) -> None:
        """End the shard."""
        self.shard.close(keep=False)

    # -- the shard -----------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self.shard.tick()
        self.follow()
        self.events.after(tick_s(self.way.lease_s), self._tick)

    def follow(self) -> None:
        """Note the rounds that have closed since the last call, and when the open one is to be decided."""
        job = self.shard.declared()
        while self._closed < job.version_min:
            sent = self._sent.pop(self._closed, [])
            members = self._members(self._closed) if self.way.is_decoupled else -1
            self.figures.rounds += 1
            for one in sent:
                has_counted = bool(members >> one.rank & 1)
                self.figures.members += has_counted
                if has_counted:
                    self.figures.merged += one.tokens / self.way.fragments
                self.learners[one.rank].on_settled(one, has_counted=has_counted)
            self._closed += 1
        due_in = self.shard.settlement.due_in()
        if due_in is not None and self.events.now + due_in < self._due_at:
            self._due_at = self.events.now + max(0.0, due_in)
            self.events.after(max(0.0, due_in), self._decide)

    def _decide(self) -> None:
        self._due_at = math.inf
        self.shard.settlement.decide_due()
        self.follow()

    def _members(self, round_: int) -> int:
        found = [one for one in self.shard.settlement.commit_reply(0, round_).decisions if one.round == round_]
        return members_mask(found[0].members) if found else 0

    def begin_push(self, learner: Learner, sent: Sent) -> Push:
        """Begin to push a learner's difference."""
        header = data_pb2.PushHeader(
            caller=learner.caller,
            clock=sent.clock,
            weight=max(sent.tokens, 1e-9),
            layout_digest=self.layout.digest,
            scalars=[data_pb2.GroupScalars(values=SCALARS)],
            is_finite=True,
        )
        return self.shard.exchange.begin_push(header)

    def push(self, learner: Learner, sent: Sent, push: Push) -> bool | Ticket:
        """True if the difference is in its round; False if it is late; or what to wait for before this is called again."""
        ticket = self.shard.exchange.push_block(push, 0, b"", memoryview(np.ones(1)).cast("B"))
        if ticket is not None:
            return ticket
        is_late = self.shard.exchange.end_push(push).blocks_late > 0
        if is_late:
            learner.on_settled(sent, has_counted=False)
        else:
            self._sent.setdefault(sent.clock, []).append(sent)
        return not is_late


@dataclass
class Learner:
    """A learner, as the shard sees it.

    Attributes:
        life: number of its process; an event of an earlier life does nothing. caller: of its session.
    """

    job: SimulatedJob
    rank: int
    life: int = 0
    local_step: int = 0
    parts_away: int = 0
    caller: job_pb2.Caller = field(default_factory=job_pb2.Caller)

    def __post_init__(self) -> None:
        self._counts = [[0, 0.0] for _ in range(self.job.way.fragments)]  # steps and tokens that no merge has counted
        self._exchanges = self._departed = self._clock = 0
        self._is_flying = self._has_landed = False
        self._due = 0
        self._fetch_s = 0.0
        self._waits_since = math.inf

    # -- coming and going ----------------------------------------------------------------------------------------------

    def join(self) -> int:
        """Join the job with a new session, and go on at its clock; the number under which it may provide initial values."""
        way, admission = self.job.way, self.job.shard.admission
        request = control_pb2.JoinRequest(
            shard_index=0, shard_count=1, rank=self.rank, world_size=way.learners, pid=1 + self.life
        )
        joined = admission.join(request)
        self.caller = job_pb2.Caller(
            run_id=joined.run_id, incarnation=joined.incarnation, rank=self.rank, session=joined.session
        )
        declared, _ = admission.declare(control_pb2.DeclareRequest(caller=self.caller, spec=self.job.spec.to_message()))
        self._clock = declared.clock
        return declared.choice

    def begin(self) -> None:
        """Begin to make steps, and to fail."""
        if not self.job.way.keeps:
            self._departed = self.local_step
        self._is_flying = self._has_landed = False
        self._beat(self.life)
        self._fail_next(self.life)
        if self.job.way.is_decoupled:
            self._step(self.life)
        else:
            self._waits_since = self.job.events.now
            self._await_round(self.life)

    def _beat(self, life: int) -> None:
        if life == self.life:
            self.job.shard.admission.heartbeat(control_pb2.HeartbeatRequest(caller=self.caller, clock=self._clock))
            self.job.events.after(self.job.way.lease_s / BEATS_PER_LEASE, lambda: self._beat(life))

    def _fail_next(self, life: int) -> None:
        failures = self.job.failures
        if failures is not None and (parts := failures.parts - self.parts_away):
            next_s = self.job.random.expovariate(parts / failures.part_mtbf_s)
            self.job.events.after(next_s, lambda: self._fail(life))

    def _fail(self, life: int) -> None:
        if life != self.life or self.job.failures is None:
            return
        self._end_wait()
        self.life += 1
        self.parts_away += 1
        self.job.figures.failures += 1
        self.job.events.after(self.job.failures.repair_s, self._repair)
        if not self.job.way.keeps:
            self._counts = [[0, 0.0] for _ in self._counts]
        life = self.life
        self.job.events.after(self.job.failures.away_s, lambda: self._return(life))
        self._fail_next(life)

    def _return(self, life: int) -> None:
        if life == self.life:
            self.life += 1
            self.join()
            self.job.follow()
            self.begin()

    def _repair(self) -> None:
        self.parts_away -= 1

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _step(self, life: int) -> None:
        step_s = self.job.step_s
        if self.job.way.is_decoupled:
            step_s *= self.job.random.uniform(1 - JITTER, 1 + JITTER)
        self.job.events.after(step_s, lambda: self._stepped(life))

    def _stepped(self, life: int) -> None:
        if life != self.life:
            return
        failures = self.job.failures
        tokens = 1 - self.parts_away / failures.parts if failures is not None else 1.0
        self.local_step += 1
        self.job.figures.steps += 1
        self.job.figures.made += tokens
        for counts in self._counts:
            counts[0] += 1
            counts[1] += tokens
        (self._exchange_decoupled if self.job.way.is_decoupled else self._exchange)(life)

    @property
    def _interval(self) -> int:
        """Local steps from the last exchange to the next one, of the next fragment."""
        steps, count = self.job.way.steps, self.job.way.fragments
        fragment = self._exchanges % count
        return (fragment + 1) * steps // count - fragment * steps // count

    def on_settled(self, sent: Sent, *, has_counted: bool) -> None:
        """Hear what has become of a difference: what was not counted travels with the next one."""
        if not has_counted and (self.job.way.keeps or sent.life == self.life):
            counts = self._counts[sent.fragment]
            counts[0] += sent.steps
            counts[1] += sent.tokens

    def _taken(self, clock: int) -> Sent:
        """The difference of the fragment whose turn it is."""
        fragment = clock % self.job.way.fragments
        steps, tokens = self._counts[fragment]
        self._counts[fragment] = [0, 0.0]
        return Sent(self.rank, clock, fragment, int(steps), tokens, self.life)

    def _end_wait(self) -> None:
        if self._waits_since < math.inf:
            self.job.figures.idle_s += self.job.events.now - self._waits_since
            self._waits_since = math.inf

    # -- who waits -----------------------------------------------------------------------------------------------------

    def _exchange(self, life: int) -> None:
        """Without a quorum: exchange, and wait for the others, if it is time."""
        if self.local_step - self._departed < self.job.way.steps:
            self._step(life)
            return
        self._departed = self.local_step
        self._waits_since = self.job.events.now
        sent = self._taken(self._clock)
        self._clock += 1
        has_pushed = self.job.push(self, sent, self.job.begin_push(self, sent))
        assert has_pushed is True, "who waits for all is in step with them"
        self.job.follow()
        self._await_round(life)

    def _await_round(self, life: int) -> None:
        if life != self.life:
            return
        exchange, clock = self.job.shard.exchange, self._clock
        request = data_pb2.PullRequest(caller=self.caller, clock=clock, layout_digest=self.job.layout.digest)
        pull, (block,) = exchange.begin_pull(request)
        found = exchange.read(block, pull)
        if isinstance(found, Ticket):
            found.future.add_done_callback(lambda _: self.job.events.after(0.0, lambda: self._await_round(life)))
            return
        version, page = found
        block.unpin(page)  # type: ignore[union-attr]
        self._clock = max(self._clock, version)
        self._end_wait()
        self._step(life)

    # -- who does not --------------------------------------------------------------------------------------------------

    def _exchange_decoupled(self, life: int) -> None:
        """With a quorum: take what has come back; begin the next exchange, at the job's clock, if it is time."""
        if self._is_flying and self._has_landed and self.local_step >= self._due:
            self._is_flying = self._has_landed = False
        if not self._is_flying and self.local_step >= self._departed + self._interval:  # it has asked for the clock meanwhile
            clock = self._job_clock()
            steps = [count for count, _ in self._counts]
            is_new = 2 * steps[clock % len(steps)] < max(steps)
            if not is_new or self.local_step >= self._departed + self._interval + self.job.way.steps:
                self._depart(clock, life)
        self._step(life)

    def _job_clock(self) -> int:
        settlement = self.job.shard.settlement
        settlement.commit(control_pb2.CommitRequest(caller=self.caller, clock=self._clock, only_ask=True))
        decisions = settlement.commit_reply(self.rank, self._clock).decisions
        return max([self._clock, *[decision.round + 1 for decision in decisions]])

    def _depart(self, clock: int, life: int) -> None:
        way, events = self.job.way, self.job.events
        self._exchanges += 1
        self._departed, self._due, self._is_flying = self.local_step, self.local_step + way.delay, True
        until = events.now + max(0.0, way.delay * self.job.step_s - self._fetch_s)
        sent = self._taken(clock)
        events.after(way.transfer_s, lambda: self._arrive(sent, until, life))

    def _arrive(self, sent: Sent, until: float, life: int, push: Push | None = None) -> None:
        if life != self.life:
            self.on_settled(sent, has_counted=False)
            return
        self._clock = sent.clock + 1
        pushing = self.job.begin_push(self, sent) if push is None else push
        found = self.job.push(self, sent, pushing)
        if isinstance(found, Ticket):  # the round before is open, and has what its process before had committed
            again = partial(self._arrive, sent, until, life, pushing)
            found.future.add_done_callback(lambda _: self.job.events.after(0.0, again))
            return
        if found:
            spare_s = max(0.0, until - self.job.events.now)
            request = control_pb2.CommitRequest(caller=self.caller, clock=sent.clock, spare_s=spare_s)
            ticket = self.job.shard.settlement.commit(request)
            self.job.follow()
            if ticket is not None and not ticket.future.done():
                ticket.future.add_done_callback(lambda _: self.job.events.after(0.0, lambda: self._fetch(life)))
                return
        self._fetch(life)

    def _fetch(self, life: int) -> None:
        self._fetch_s = self.job.way.transfer_s
        self.job.events.after(self.job.way.transfer_s, lambda: self._land(life))

    def _land(self, life: int) -> None:
        if life == self.life:
            self._has_landed = True
