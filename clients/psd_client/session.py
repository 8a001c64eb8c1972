"""A worker's session: joining, declaring the job, providing initial values, joining again after it was fenced, leaving.

Shard 0 comes first, because it issues sessions and chooses the worker that initializes; among the others order does not
matter. The clock is the largest of all shards', because no shard takes a push for a round that it has closed. Must not know
how calls travel, nor gradients.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from psd.contract.config import ClientConfig
from psd.contract.errors import ForeignRun, LayoutMismatch, PsdError, RolledBack, SessionFenced, ShardRestarted, StateLost
from psd.contract.jobspec import JobSpec
from psd.v1 import control_pb2, data_pb2, job_pb2
from psd_client.flat import FlatBuffers
from psd_client.shards import Shards, transfer_s
from psd_client.timeline import join_one_timeline
from psd_client.transport import Call, Cancelled, Lane, Share

logger = logging.getLogger("psd_client")

JOIN_TIMEOUT_S = 10.0
LEAVE_TIMEOUT_S = 5.0
LEAVE_FAILED_TIMEOUT_S = 1.5
"""Of a worker that has failed, or is interrupted: its program is not to be kept from ending."""
REJOINS_MAX = 5
"""In one operation; then the lease is too short for this network or this worker, and the error is raised."""


ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Membership:
    """What the shards answered when the worker joined; replaced as a whole when it joins again.

    Attributes:
        run_id, session: as in Caller. incarnations: of each shard. lease_s: the shortest of all shards'. timeline: of the job.
    """

    rank: int
    run_id: str
    session: int
    incarnations: tuple[int, ...]
    lease_s: float
    timeline: int

    def caller(self, shard: int) -> job_pb2.Caller:
        """Who asks, for a request to that shard."""
        return job_pb2.Caller(run_id=self.run_id, incarnation=self.incarnations[shard], rank=self.rank, session=self.session)


class Session:
    """One worker's part in the job.

    Attributes:
        clock: steps that the worker has finished.
        is_leaving: it waits for the round of its last push to close, and does nothing more then.
        has_failed: what it says when it leaves: False: finished. True: its program ends by an error.
        decisions: exact aggregation: the latest that shard 0 has told, for the next push and pull.
        cuts: to be carried to all shards with the next push.
        stored_state: what a worker of this rank had saved for itself, as of the last declaration.
        rejoins: how often it was fenced and joined again.
    """

    def __init__(self, config: ClientConfig, shards: Shards) -> None:
        self._config = config
        self._shards = shards
        self._membership: Membership | None = None
        self._spec: JobSpec | None = None
        self._values: FlatBuffers | None = None
        self._barrier_seq = 0
        self._resuming = threading.Lock()
        shards.on_restart = self.resume
        self.clock = 0
        self.decisions: list[job_pb2.Decision] = []
        self.cuts: list[data_pb2.Cut] = []
        self.stored_state = b""
        self.is_leaving = self.has_failed = False
        self.rejoins = 0

    @property
    def membership(self) -> Membership | None:
        """None before the worker has joined, and after it has left."""
        return self._membership

    def caller(self, shard: int) -> job_pb2.Caller:
        """Who asks, for a request to that shard."""
        assert self._membership is not None
        return self._membership.caller(shard)

    def join(self) -> None:
        """Enter at shard 0, which issues the session, then at the others."""
        config = self._config
        request = self._join_request()

        def join_at(lane: Lane, call: Call) -> control_pb2.JoinReply:
            own = control_pb2.JoinRequest()
            own.CopyFrom(request)
            own.shard_index = lane.shard
            return lane.join(own, Call(min(call.timeout_s, JOIN_TIMEOUT_S), call.scope))

        def join_all() -> list[control_pb2.JoinReply]:
            before = config.run_id if self._membership is None else self._membership.run_id
            request.run_id, request.session = before, 0
            replies = self._shards.run(join_at, timeout_s, lanes[:1])
            request.run_id, request.session = replies[0].run_id, replies[0].session
            try:
                return replies + self._shards.run(join_at, timeout_s, lanes[1:])
            except ForeignRun as error:
                if before in ("", request.run_id):
                    raise
                raise StateLost(
                    f"shard 0 at {lanes[0].address} has come back without what it held, and the others have not: {error}",
                    shard=0,
                ) from error

        lanes = self._shards.lanes
        timeout_s = JOIN_TIMEOUT_S + config.retry_timeout_s
        replies = join_one_timeline(join_all, self._shards)
        # Before the session is known to the heartbeats: a clock of the one before could exclude it from rounds.
        self.clock = max(reply.clock for reply in replies)
        self.decisions = list(replies[0].decisions)
        self._membership = Membership(
            rank=config.rank,
            run_id=request.run_id,
            session=request.session,
            incarnations=tuple(reply.incarnation for reply in replies),
            lease_s=min(reply.lease_s for reply in replies),
            timeline=replies[0].timeline,
        )
        self._barrier_seq = 0

    @property
    def number(self) -> int:
        """The session, as the shards know it."""
        assert self._membership is not None
        return self._membership.session

    def _join_request(self) -> control_pb2.JoinRequest:
        config = self._config
        return control_pb2.JoinRequest(
            run_id=config.run_id,
            shard_count=len(config.servers),
            rank=config.rank,
            world_size=config.world_size,
            host=socket.gethostname()[:256],
            pid=os.getpid(),
        )

    def incarnation(self, shard: int) -> int:
        """The life of a shard that this session knows."""
        assert self._membership is not None
        return self._membership.incarnations[shard]

    def resume(self, lane: Lane, call: Call, error: ShardRestarted) -> None:
        """Go on with the same session at a shard that was killed and came back with what it held.

        Raises:
            StateLost: it came back without. RolledBack: the job has gone, or must go, back to a checkpoint.
            SessionFenced: the session has ended there meanwhile.
            ShardRestarted: `error` itself, if there is no session to resume.
        """
        with self._resuming:
            membership = self._membership
            if membership is None:
                raise error
            request = self._join_request()
            request.run_id, request.session, request.resume = membership.run_id, membership.session, True
            request.timeline = membership.timeline
            request.shard_index = lane.shard
            reply = lane.join(request, Call(min(call.timeout_s, JOIN_TIMEOUT_S), call.scope))
            if reply.incarnation == membership.incarnations[lane.shard]:
                return  # another thread has just resumed there
            incarnations = list(membership.incarnations)
            incarnations[lane.shard] = reply.incarnation
            self._membership = replace(membership, incarnations=tuple(incarnations))
        logger.warning(
            "psd: worker %d: shard %d at %s was restarted; going on with it", self._config.rank, lane.shard, lane.address
        )

    def await_decisions(self, timeout_s: float) -> None:
        """Exact aggregation: know what was decided on the round before the clock, for pulls and pushes to carry to all shards.

        A session that follows one that had committed a round begins after that round, which may still be open; and those who
        hear of the decision may leave before they have told all shards.
        """
        is_exact = self._spec is not None and self._spec.aggregation == "exact"
        if not is_exact or self.clock <= 1 + max((decision.round for decision in self.decisions), default=-1):
            return

        def ask(lane: Lane, call: Call) -> control_pb2.CommitReply:
            request = control_pb2.CommitRequest(caller=self.caller(lane.shard), clock=self.clock - 1, only_wait=True)
            return lane.commit(request, call)

        (reply,) = self._shards.run(ask, timeout_s, self._shards.lanes[:1])
        self.decisions, self.clock = list(reply.decisions), max(self.clock, reply.clock)

    def prepare_lanes(self) -> list[Share]:
        """Open the ways for bulk data; how to share memory with those shards that can see this process's."""

        def prepare() -> list[Share | None]:
            return self._shards.run(lambda lane, call: lane.prepare(self.caller(lane.shard), call), JOIN_TIMEOUT_S)

        return [share for share in self.while_fenced(lambda: self._beginning(prepare)) if share is not None]

    def declare(self, spec: JobSpec, values: FlatBuffers) -> bool:
        """Agree on the job, and provide `values` as its initial ones if it has none yet.

        Returns:
            True if `values` are the job's parameters now; False if those are to be pulled.
        """
        provided = self.while_fenced(lambda: self._beginning(lambda: self._declare(spec, values)))
        self._spec, self._values = spec, values
        return provided

    def _beginning(self, operation: Callable[[], ResultT]) -> ResultT:
        """The result of an operation of a worker that has not declared yet: if shards have forgotten the job, it joins anew."""
        deadline = time.monotonic() + self._config.wait_timeout_s
        rejoins = 0
        while True:
            before = self._membership
            try:
                return operation()
            except (StateLost, ForeignRun):
                if rejoins == REJOINS_MAX or time.monotonic() > deadline:
                    raise
            # A shard that was killed before the job had its values comes back knowing nothing. Nothing is lost by beginning
            # anew, however often it is killed; but if it has not been, that must end.
            self._join_anew()
            if before is not None and self._membership is not None:
                rejoins += before.incarnations == self._membership.incarnations

    def _join_anew(self) -> None:
        """Join; before the job has values, also one that others have begun under another name that nobody has given."""
        try:
            self.join()
        except ForeignRun:
            if self._spec is not None or self._config.run_id or self._membership is None:
                raise
            self._membership = None
            self.join()

    def _declare(self, spec: JobSpec, values: FlatBuffers) -> bool:
        message = spec.to_message()
        digest = values.layout.digest

        def declare_at(lane: Lane, call: Call) -> control_pb2.DeclareReply:
            reply = lane.declare(control_pb2.DeclareRequest(caller=self.caller(lane.shard), spec=message), call)
            if reply.layout_digest != digest:
                raise LayoutMismatch(
                    f"shard {lane.shard} at {lane.address} cuts the parameters into other blocks than this worker: "
                    "their versions of psd differ",
                    shard=lane.shard,
                )
            return reply

        lanes, timeout_s = self._shards.lanes, self._config.wait_timeout_s
        replies = self._shards.run(declare_at, timeout_s, lanes[:1])
        replies += self._shards.run(declare_at, timeout_s, lanes[1:])
        provided, choice = False, replies[0].choice
        if choice:
            # Shard 0 last: when it has its values, so have all.
            accepted = self._initialize(lanes[1:], values, choice)
            if not all(accepted):
                self._check_still_chosen(choice, accepted.index(False) + 1, declare_at)
                return self._declare(spec, values)
            provided = all(self._initialize(lanes[:1], values, choice))
        elif not all(reply.initialized for reply in replies):
            shard = next(i for i, reply in enumerate(replies) if not reply.initialized)
            raise StateLost(
                f"shard {shard} at {lanes[shard].address} has no parameters, but the job has begun: it came back without what "
                "it held",
                shard=shard,
            )
        self.clock = max(self.clock, *(reply.clock for reply in replies))
        self.stored_state = replies[0].client_state
        return provided

    def _initialize(self, lanes: Sequence[Lane], values: FlatBuffers, choice: int) -> list[bool]:
        layout = values.layout

        def initialize_at(lane: Lane, call: Call) -> bool:
            first = data_pb2.InitializeFrame(caller=self.caller(lane.shard), layout_digest=layout.digest, choice=choice)
            return lane.initialize(first, layout.blocks_of(lane.shard), values, call)

        return self._shards.run(initialize_at, self._config.wait_timeout_s + transfer_s(layout, lanes), lanes)

    def _check_still_chosen(
        self, choice: int, shard: int, declare_at: Callable[[Lane, Call], control_pb2.DeclareReply]
    ) -> None:
        """After `shard` has refused this worker's initial values: it has its successor's, or those of a job that goes on.

        Raises:
            StateLost: this worker is still the one whose values count, so the shard's belong to a job that shard 0 has lost.
            SessionFenced: it is not.
        """
        (reply,) = self._shards.run(declare_at, self._config.wait_timeout_s, self._shards.lanes[:1])
        if reply.choice == choice:
            raise StateLost(
                f"shard {shard} at {self._shards.lanes[shard].address} holds the parameters of this job, and shard 0 has lost "
                "its part of them; the job cannot go on",
                shard=0,
            )

    def go_back(self) -> None:
        """Join anew after the job has gone back to a checkpoint, bringing all shards to it if need be."""
        self.join()
        assert self._spec is not None
        assert self._values is not None
        self._declare(self._spec, self._values)

    def rejoin(self, error: SessionFenced) -> None:
        """Go on as a new session after this one was fenced; raises `error` if somebody else has the rank now."""
        if error.detail.get("cause") != "expired":
            raise error
        before = self._membership
        self._join_anew()
        after = self._membership
        if self._spec is not None and before is not None and after is not None and after.timeline != before.timeline:
            raise RolledBack(
                f"the job went back to a checkpoint while worker {self._config.rank} was out of it", timeline=after.timeline
            )
        if self._spec is not None:
            assert self._values is not None
            self._declare(self._spec, self._values)
        self.rejoins += 1
        logger.warning(
            "psd: worker %d: %s; it has joined again and goes on at step %d",
            self._config.rank,
            error,
            self.clock,
        )

    def while_fenced(self, operation: Callable[[], ResultT], rejoins_max: int = REJOINS_MAX) -> ResultT:
        """The result of an operation that may be repeated as a new session."""
        try:
            return operation()
        except SessionFenced as error:
            if rejoins_max == 0:
                raise
            self.rejoin(error)
        return self.while_fenced(operation, rejoins_max - 1)

    def barrier(self, name: str) -> None:
        """Wait at shard 0 until every worker that is in the job has arrived."""
        self.while_fenced(lambda: self._barrier(name))

    def _barrier(self, name: str) -> None:
        self._barrier_seq += 1  # stays the same while the call is retried
        self._shards.run(
            lambda lane, call: lane.barrier(
                control_pb2.BarrierRequest(caller=self.caller(lane.shard), name=name, seq=self._barrier_seq), call
            ),
            self._config.wait_timeout_s,
            self._shards.lanes[:1],
        )

    def leave(self) -> None:
        """Tell every shard that this worker has ended. Failures are logged; the lease ends what was not heard."""
        membership, self._membership = self._membership, None
        if membership is None:
            return
        deadline = time.monotonic() + (LEAVE_FAILED_TIMEOUT_S if self.has_failed else LEAVE_TIMEOUT_S)
        left_at = time.time()

        def leave_at(lane: Lane) -> None:
            request = control_pb2.LeaveRequest(caller=membership.caller(lane.shard), failed=self.has_failed, left_at=left_at)
            try:
                lane.leave(request, max(deadline - time.monotonic(), 0.2))
            except (PsdError, Cancelled) as error:
                logger.warning(
                    "psd: worker %d: could not tell shard %d at %s that this worker has ended: %s",
                    membership.rank,
                    lane.shard,
                    lane.address,
                    error,
                )

        self._shards.run_once(leave_at)
