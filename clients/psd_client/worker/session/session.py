"""A worker's session: joining, declaring the job, joining again after it was fenced or the job went back, leaving.

The worker joins shard 0 first, because it issues sessions; the order of the others does not matter. The clock is the largest of
all shards', because no shard takes a push for a round that it has closed. If a session is left half made, because a shard could
not be reached, it is made anew before the next operation. Must not know how calls travel, or gradients.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from psd.contract.config import ClientConfig
from psd.contract.errors import ForeignRun, PsdError, RolledBack, SessionFenced, StateLost
from psd.contract.jobspec import JobSpec
from psd.v1 import control_pb2, data_pb2, job_pb2, vectors_pb2
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.shards import Shards
from psd_client.lanes.transport import Call, Cancelled, Lane, Scope, Share
from psd_client.worker.session.carried_cuts import CarriedCuts
from psd_client.worker.session.declaration import JobDeclaration
from psd_client.worker.session.joining import JOIN_TIMEOUT_S, Entrance
from psd_client.worker.session.membership import JobMembership, Memberships, nothing
from psd_client.worker.session.orders import FollowedOrders

logger = logging.getLogger("psd_client")

LEAVE_TIMEOUT_S = 5.0
LEAVE_FAILED_TIMEOUT_S = 1.5
"""Seconds to leave after a failure or an interruption: the program should end soon."""
REJOINS_MAX = 5
"""Rejoins that an operation may make even after its wait timeout. If all fail, the lease is too short for network or worker."""

REJOIN_PAUSE_S = 0.1


class Session:
    """One worker's part in the job.

    Args:
        now: returns monotonic seconds.

    Attributes:
        clock: number of steps that the worker has finished.
        pushing: the clock of a push that a shard may still lack, or may lose before its round has closed. Until then heartbeats
            report no later clock, because rounds do not wait for a worker that has gone beyond them.
        is_leaving: the worker waits for the round of its last push to close, and does nothing more after that.
        has_left: `leave` was called: from then on nothing joins.
        has_failed: the worker tells shards when it leaves: False: it has finished. True: its program ends with an error.
        decisions: exact aggregation: shard 0's latest decisions, for the next push and pull.
        sits_out: the job chooses who takes part in a round, and when this worker asked last it was not chosen for the open one.
        cuts: cuts to be carried to all shards. on_cuts: called when shards must hear of them soon.
        orders: the orders to the job that the worker follows.
        push_ids_max: the most ids of rows that each shard takes in one push, or one pull.
        stored_state: the state that a worker of this rank had saved for itself, as found by the last declaration.
        rejoins: how often it has begun a new session after the first, other than to go back to a checkpoint.
        memberships: for the heartbeats. resume: Entrance.resume. now: as given.
    """

    def __init__(self, config: ClientConfig, shards: Shards, now: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._shards = shards
        self.now = now
        self.memberships = Memberships()
        self._entrance = Entrance(config, shards, self.memberships)
        self._declaration: JobDeclaration | None = None
        self._is_entered = False  # joined and, if there is a declaration, declared at all shards
        self._followed: int | None = None  # timeline of the parameters that the program has, or is about to get
        shards.on_restart = self.resume = self._entrance.resume
        self.clock = 0
        self.decisions: list[job_pb2.Decision] = []
        self.sits_out = False
        self.cuts = CarriedCuts(len(shards.lanes))
        self.on_cuts: Callable[[], None] = nothing
        self.orders = FollowedOrders(config.rank)
        self.push_ids_max = 1
        self.stored_state = b""
        self.is_leaving = self.has_left = self.has_failed = False
        self._joining = threading.Lock()  # held while a session begins
        self.rejoins = 0

    def caller(self, shard: int) -> job_pb2.Caller:
        """The caller of a request to that shard."""
        return self.memberships.held.caller(shard)

    @property
    def run_id(self) -> str:
        """Name of the run that the worker has joined."""
        return self.memberships.held.run_id

    @property
    def is_declared(self) -> bool:
        """True if the worker has declared a job, perhaps one of vectors alone."""
        return self._declaration is not None

    @property
    def is_cut_by_positions(self) -> bool:
        """True in a job without rounds: shards may wait for this worker's position in a cut."""
        return self._declaration is not None and not self._declaration.spec.consistency.has_rounds

    @property
    def world_size(self) -> int:
        """Number of workers of the job."""
        return self._config.world_size

    @property
    def pushing(self) -> int | None:
        """The clock of a push that a shard may still lack; None: there is none."""
        return self.cuts.pushing

    @pushing.setter
    def pushing(self, clock: int | None) -> None:
        cuts = self.cuts
        with cuts.lock:
            cuts.pushing = clock
        if cuts.is_unready:
            cuts.set_ready(True)

    @property
    def reported_clock(self) -> int:
        """The clock that heartbeats report."""
        pushing = self.pushing
        return self.clock if pushing is None else min(self.clock, pushing)

    @property
    def number(self) -> int:
        """The number by which the shards know the session."""
        return self.memberships.held.session

    def incarnation(self, shard: int) -> int:
        """The incarnation of a shard that this session knows."""
        return self.memberships.held.incarnations[shard]

    # -- joining -------------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Join the job. Raises SessionFenced only if another process has the rank, or the lease always runs out meanwhile."""
        self._enter()

    def _join(self) -> None:
        with self._joining:
            if self.has_left:
                raise Cancelled
            self._begin_session()

    def _begin_session(self) -> None:
        self._is_entered = False
        self.cuts.begin(0)
        try:
            replies = self._entrance.join()
            # Before the session is known to the heartbeats: a clock of the one before could exclude it from rounds.
            self.clock = max(reply.clock for reply in replies)
            self.decisions = list(replies[0].decisions)
            self.orders.hear(replies[0].orders)
            self.push_ids_max = min(reply.push_ids_max for reply in replies)
            membership = self.memberships.complete()
            self._entrance.run_id = membership.run_id
            self.cuts.begin(membership.session)
        finally:
            self.memberships.give_up()

    def join_anew(self) -> None:
        """Join. Before the first declaration, if nobody has named the run and shard 0 has made another name, join that run."""
        try:
            self._join()
        except ForeignRun:
            if self._declaration is not None or self._config.run_id or not self._entrance.run_id:
                raise
            self._entrance.run_id = ""
            self._join()

    # -- becoming another session ----------------------------------------------------------------------------------------

    def rejoin(self, error: SessionFenced) -> None:
        """Go on as a new session, declared at all shards, after this one was fenced.

        Raises:
            SessionFenced: `error`, or a later one, because another process has the rank now; or because the lease runs out
                again and again meanwhile.
            RolledBack: the job has gone back to a checkpoint meanwhile.
        """
        if not _may_return(error):
            raise error
        self.begin_anew()
        logger.warning("psd: worker %d: %s; it has joined again and continues at step %d", self._config.rank, error, self.clock)

    def begin_anew(self) -> None:
        """Go on as a new session, declared at all shards: what the old session still sends does not count any more. Raises what
        `rejoin` does."""
        self._enter()
        self.rejoins += 1

    def _enter(self) -> None:
        """Join and, if there is a declaration, declare. Do it again if the new session's lease runs out meanwhile."""
        limit = Limit(self.now, self._config.wait_timeout_s)
        while True:
            try:
                self.join_anew()
                timeline = self.memberships.held.timeline
                if self._followed not in (None, timeline):
                    raise RolledBack(
                        f"the job went back to a checkpoint while worker {self._config.rank} was out of it", timeline=timeline
                    )
                if self._declaration is not None:
                    self._declare(self._declaration, is_first=False)
            except SessionFenced as error:
                if limit.is_over() or not _may_return(error):
                    raise
                logger.warning("psd: worker %d: %s, while joining; joining again", self._config.rank, error)
                Scope().sleep(REJOIN_PAUSE_S)
            else:
                self._is_entered = True
                return

    def go_back(self, fetch: Callable[[], None]) -> None:
        """Join anew after the job has gone back to a checkpoint, bring all shards to it if need be, and `fetch` its parameters.

        Until that has succeeded, every operation raises RolledBack: a program must not go on with its old parameters.
        """
        limit = Limit(self.now, self._config.wait_timeout_s)
        self._followed = None
        while True:
            try:
                self._enter()
                self._followed = self.memberships.held.timeline
                fetch()
            except BaseException as error:
                self._followed = None
                if limit.is_over() or not isinstance(error, RolledBack):
                    raise
            else:
                return

    def attempts(self) -> Attempts:
        """Attempts at an operation that can be repeated in a new session."""
        return Attempts(self, self._config.wait_timeout_s, is_beginning=False)

    @property
    def is_settled(self) -> bool:
        """True if `catch_up` has nothing to do."""
        return self._is_entered and self._followed is not None

    def catch_up(self) -> None:
        """Finish entering the job if an earlier operation has failed to; RolledBack if the worker has yet to go back."""
        if self._declaration is None:
            return
        if self._followed is None:
            raise RolledBack("the job has gone back to a checkpoint, and this worker has not followed yet")
        if not self._is_entered:
            self.begin_anew()

    # -- beginning -----------------------------------------------------------------------------------------------------

    def prepare_lanes(self) -> list[Share]:
        """Open the transports for bulk data. Returns, for each shard that can see this process's memory, what shares it."""
        shares: list[Share | None] = []
        for attempt in Attempts(self, self._config.wait_timeout_s, is_beginning=True):
            with attempt:
                shares = self._shards.run(lambda lane, call: lane.prepare(self.caller(lane.shard), call), JOIN_TIMEOUT_S)
        return [share for share in shares if share is not None]

    def declare(self, spec: JobSpec, values: FlatBuffers, fetch: Callable[[], None]) -> None:
        """Agree on the job. If it has no values, provide `values` as the initial ones; else `fetch` the job's values."""
        declaration = JobDeclaration(spec, values, self._shards, self.caller, self._config.wait_timeout_s)
        is_first = self._declaration is None or self._declaration.spec.is_empty
        is_provided = False
        for attempt in Attempts(self, self._config.wait_timeout_s, is_beginning=True):
            with attempt:
                is_provided = self._declare(declaration, is_first=is_first)
        self._declaration, self._is_entered = declaration, True
        self._followed = self.memberships.held.timeline
        if self.is_cut_by_positions:
            self.on_cuts()  # from now on shards may ask for this worker's position, and its heartbeats come more often
        if is_provided and not spec.compression.pull:  # with it, all workers have what the shards send
            return
        try:
            try:
                fetch()
            except RolledBack:
                self.go_back(fetch)
        except BaseException:
            self._declaration = self._followed = None  # the program knows nothing of the job yet, and begins anew
            raise

    def _declare(self, declaration: JobDeclaration, *, is_first: bool) -> bool:
        declared = declaration.make(is_first=is_first)
        self.clock = max(self.clock, declared.clock)
        self.stored_state = declared.client_state
        return declared.is_provided

    # -- in the job ------------------------------------------------------------------------------------------------------

    def await_decisions(self, timeout_s: float) -> None:
        """Exact aggregation: learn the decision on the round before the clock. Pulls and pushes carry it to all shards.

        If an earlier session has committed a round, a new one begins after that round, which may still be open; and workers
        that hear of the decision may leave before they have told all shards.
        """
        is_exact = self._declaration is not None and self._declaration.spec.aggregation == "exact"
        if not is_exact or self.clock <= 1 + max((decision.round for decision in self.decisions), default=-1):
            return

        def ask(lane: Lane, call: Call) -> control_pb2.CommitReply:
            request = control_pb2.CommitRequest(caller=self.caller(lane.shard), clock=self.clock - 1, only_wait=True)
            return lane.commit(request, call)

        (reply,) = self._shards.run(ask, timeout_s, self._shards.lanes[:1])
        self.decisions, self.clock = list(reply.decisions), max(self.clock, reply.clock)

    def learn_clock(self, timeout_s: float) -> None:
        """Exact aggregation: learn the latest decisions, and go on at the clock after them."""

        def ask(lane: Lane, call: Call) -> control_pb2.CommitReply:
            request = control_pb2.CommitRequest(caller=self.caller(lane.shard), clock=self.clock, only_ask=True)
            return lane.commit(request, call)

        (reply,) = self._shards.run(ask, timeout_s, self._shards.lanes[:1])
        self.decisions, self.sits_out = list(reply.decisions), reply.sits_out
        self.clock = max([self.clock, *[decision.round + 1 for decision in self.decisions]])

    def stop(self) -> None:
        """Ask shard 0 to end the job for all workers; `orders` then know when."""

        def ask(lane: Lane, call: Call) -> control_pb2.StopReply:
            return lane.stop(control_pb2.StopRequest(caller=self.caller(lane.shard)), call)

        for attempt in self.attempts():
            with attempt:
                (reply,) = self._shards.run(ask, self._config.wait_timeout_s, self._shards.lanes[:1])
                self.orders.hear(reply.orders)

    def log(self, request: control_pb2.LogRequest, timeout_s: float) -> None:
        """Report scalars to shard 0, without retrying. Any thread may call this. The request lacks its caller."""
        lane = self._shards.lanes[0]
        request.caller.CopyFrom(self.caller(lane.shard))
        lane.log(request, Call(timeout_s, Scope()))

    def hear_cuts(self, replies: Mapping[int, data_pb2.PushReply] | Mapping[int, vectors_pb2.VectorAnswer]) -> None:
        """Note the cuts that the latest replies, by shard, name."""
        cuts, has_news = self.cuts, False
        for shard, reply in replies.items():
            if cuts.are_named or reply.cuts:
                has_news |= cuts.hear(shard, reply.cuts, self.clock)
        if has_news:
            self.on_cuts()

    def leave(self) -> None:
        """Tell every shard that this worker has ended. Failures are logged; where that is not heard, the lease runs out.

        Calls of other threads learn from the shards that the session has ended: `has_left` keeps them from beginning another.
        """
        self.has_left = True
        timeout_s = LEAVE_FAILED_TIMEOUT_S if self.has_failed else LEAVE_TIMEOUT_S
        deadline = time.monotonic() + timeout_s
        if self._joining.acquire(timeout=timeout_s):  # a session that has just begun ends as well
            self._joining.release()
        known_as = self.memberships.end()
        left_at = time.time()

        def leave_at(lane: Lane) -> None:
            membership = known_as(lane.shard)
            if membership is None:
                return
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


class Limit:
    """A limit on attempts: a time, but at least REJOINS_MAX attempts, because the process may have been suspended."""

    def __init__(self, now: Callable[[], float], timeout_s: float) -> None:
        self._now = now
        self._gives_up_at = now() + timeout_s
        self._attempts = 0

    def is_over(self) -> bool:
        """True if the attempt that has just failed was the last one."""
        self._attempts += 1
        return self._attempts >= REJOINS_MAX and self._now() > self._gives_up_at


class Attempts:
    """Attempts at an operation: if the session has ended meanwhile, the operation is repeated in a new session.

        for attempt in session.attempts():
            with attempt:
                ...

    Raises errors that end a session for good, and the last error if attempts fail for longer than `timeout_s`.

    Args:
        is_beginning: True if the worker knows nothing of the job yet: if shards have forgotten it, or gone back, it joins anew.
    """

    def __init__(self, session: Session, timeout_s: float, *, is_beginning: bool) -> None:
        self._session = session
        self._timeout_s = timeout_s
        self._is_beginning = is_beginning
        self._limit = Limit(session.now, timeout_s)
        self._begin_limit = Limit(session.now, timeout_s) if is_beginning else self._limit
        self._is_begun = False
        self._error: PsdError | None = None
        self._before: JobMembership | None = None
        self._rejoins = 0

    def __iter__(self) -> Attempts:
        return self

    def __next__(self) -> Attempts:
        error, self._error = self._error, None
        if not self._is_begun:
            self._is_begun = True
            self._session.catch_up()
        elif error is None:
            raise StopIteration
        elif isinstance(error, SessionFenced):
            self._rejoin(error)
        else:
            try:
                self._begin_again(error)
            except SessionFenced as fenced:
                self._rejoin(fenced)
        return self

    def __enter__(self) -> None:
        if self._is_beginning:
            self._before = self._session.memberships.latest

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if isinstance(error, SessionFenced) or (self._is_beginning and isinstance(error, (StateLost, ForeignRun, RolledBack))):
            self._error = error
        return self._error is not None

    def _rejoin(self, error: SessionFenced) -> None:
        if self._limit.is_over():
            raise error
        self._session.rejoin(error)
        self._begin_limit, self._rejoins = Limit(self._session.now, self._timeout_s), 0

    def _begin_again(self, error: PsdError) -> None:
        if self._begin_limit.is_over() or self._rejoins == REJOINS_MAX:
            raise error
        # A shard that was killed before the job had its values comes back with no state. Nothing is lost by beginning anew,
        # however often it is killed; but if no shard was restarted, the attempts must end.
        self._session.join_anew()
        after = self._session.memberships.latest
        if self._before is not None and after is not None:
            self._rejoins += self._before.incarnations == after.incarnations


def _may_return(error: SessionFenced) -> bool:
    """True unless another process has the rank now."""
    return error.detail.get("cause") == "expired"
