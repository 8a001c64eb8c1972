"""Answers the calls by which workers settle rounds of exact aggregation, commit and measure; see aggregation/settlement.py.

Of a publication, readers carry shard 0's last decision to shards that are behind it, too, since its publisher may have died
before it could. They may change nothing else: a seal proves that the decision is shard 0's.

Must not know how rules compute, or what is in a block.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import TypedDict

from psd.contract.errors import CutMissed, InvalidRequest, WrongShard
from psd.contract.verdicts import WITH_VERDICTS
from psd.state.aggregation.settlement import Coordinator
from psd.state.core import ShardCore
from psd.state.job import Job
from psd.state.tickets import Ticket, WaitKind
from psd.v1 import control_pb2, data_pb2, job_pb2


class DecisionTold(TypedDict, total=False):
    """Fields of DescribeReply."""

    decision: job_pb2.Decision
    seal: bytes


class SettlementDesk:
    """Answers ControlService.Commit and ControlService.Measure.

    Attributes:
        seal: makes of words what no reader can make of them, all shards alike; empty where everybody may do everything.
    """

    def __init__(self, core: ShardCore) -> None:
        self._core = core
        self.seal: Callable[[bytes], bytes] = lambda _: b""

    def commit(self, request: control_pb2.CommitRequest) -> Ticket | None:
        """Note that all shards have a push. Returns a ticket if its round is not decided yet. See ControlService.Commit."""
        with self._core.lock:
            worker = self._core.check_caller(request.caller)
            coordinator, participant = self._coordinator(), self._core.declared().participant
            coordinator.check(request)
        if request.only_ask:
            return None
        found = None
        if request.measures:
            found = coordinator.judge(request.clock, participant.verdict_of(request), request.measures)
        with self._core.lock:
            self._core.check_caller(request.caller)
            ticket = None
            is_decided = coordinator.on_commit(
                worker,
                request.clock,
                skip=request.skip,
                only_wait=request.only_wait,
                spare_s=request.spare_s,
                put=request.put,
            )
            if not is_decided and not request.without_waiting:
                ticket = self._core.ticket(worker, request.caller.session, WaitKind.ROUND, request.clock, coordinator.missing)
                ticket.due_in = self.due_in
                coordinator.wait(ticket)
            coordinator.record(found)
            job = self._core.declared()
            if found is not None and job.spec.directed_tensors and not found.skip:
                job.learners.on_directions(found.round, found.ratios)
        self._core.settle()
        return ticket

    def due_in(self) -> float | None:
        """Seconds until the open round is to be decided, if nothing happens before; None: that is not known."""
        with self._core.lock:
            job = self._core.job
            return None if job is None or job.coordinator is None else job.coordinator.is_due_in

    def decide_due(self) -> None:
        """Decide the open round if its grace is over."""
        due_in = self.due_in()
        if due_in is not None and due_in <= 0:
            self._core.settle()

    def commit_reply(self, rank: int, clock: int) -> control_pb2.CommitReply:
        """The decision and the verdict, for the worker of a rank that has committed `clock`."""
        with self._core.lock:
            coordinator = self._coordinator()
            verdict = coordinator.verdict_on(clock)
            return control_pb2.CommitReply(
                decisions=coordinator.latest_for(rank),
                clock=max(clock + 1, coordinator.next_round),
                is_left_out=coordinator.has_left_out(rank, clock),
                verdict=verdict.to_message() if verdict is not None else None,
                sits_out=coordinator.sits_out(rank),
            )

    def _coordinator(self) -> Coordinator:
        job = self._core.initialized()
        if not job.is_exact:
            raise InvalidRequest("clock: only a job with exact aggregation has commits")
        if job.coordinator is None:
            raise WrongShard(f"rounds are decided by shard 0, this is shard {self._core.config.shard_index}")
        return job.coordinator

    def measure(self, request: control_pb2.MeasureRequest) -> control_pb2.MeasureReply:
        """Measure a round; see ControlService.Measure."""
        with self._core.lock:
            worker = self._core.check_caller(request.caller)
            job = self._core.initialized()
            participant = job.participant
            if not job.spec.has_verdicts:
                raise InvalidRequest(f"round: {WITH_VERDICTS} is measured")
            decisions, under = participant.check(request.decisions), participant.verdict_of(request)
            self._core.check_clock(worker, request.clock)
            skipped = self._core.members.on_clock(worker, request.clock)
        participant.follow(decisions)
        if skipped:
            self._core.settle()
        return participant.measure(request.round, under, worker.rank, decisions)

    # -- decisions that readers carry ----------------------------------------------------------------------------------

    def told(self, job: Job) -> DecisionTold:
        """The last decision on a publication, for readers, if this is shard 0."""
        with self._core.lock:
            if job.coordinator is None or not job.spec.is_publication:
                return {}
            latest = job.coordinator.latest()
            return {"decision": latest[-1], "seal": self._sealed(job, latest[-1])} if latest else {}

    def hear(self, request: data_pb2.ReadRequest, job: Job) -> None:
        """Follow the decision that a reader brings, if it is shard 0's.

        Raises:
            InvalidRequest: no timeline is given, this is no publication, or the decision is none of it. CutMissed: the job is
                on another timeline.
        """
        if not request.HasField("decision"):
            return
        if not (request.HasField("timeline") and job.spec.is_publication):
            raise InvalidRequest("decision: is for publications, and with a timeline")
        decisions = job.participant.check([request.decision])
        with self._core.lock:
            if self._core.job is not job or request.timeline != self._core.timeline:
                raise CutMissed("decision: the job goes back to a checkpoint")
            if not hmac.compare_digest(self._sealed(job, request.decision), request.seal):
                return  # the shards' tokens differ while they are changed
            self._core.count_staged(decisions)
        job.participant.follow(decisions)

    def _sealed(self, job: Job, decision: job_pb2.Decision) -> bytes:
        core = self._core
        numbers = b"%d %d %d " % (core.timeline, job.arena.word("initialized"), decision.round)
        return self.seal(b"decision\n%s\n" % core.run_id.encode() + job.layout.digest + numbers + decision.members)
