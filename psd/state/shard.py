"""One shard: the state machine behind every RPC. A worker's life, in order:

    admission.join -> declare -> (begin_initialize, initialize_block, end_initialize)
    exchange.begin_push, push_block, end_push; begin_pull, read    again and again
    admission.leave            at any time: admission.heartbeat, arrive (barrier), tick

Nothing here blocks: where a caller must wait for other workers it gets a Ticket, which later events resolve. Must not know
gRPC, sockets, flags or the environment.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy

from psd.checkpoint import CheckpointDirectory
from psd.checkpoint.cut import FINAL_ID
from psd.contract.config import ConfigError, ServerConfig
from psd.contract.errors import CheckpointFailed, CutMissed, Draining, InvalidRequest, JobOver, PsdError
from psd.contract.orders import scale_text
from psd.contract.roster import Absence
from psd.state.core import ShardCore
from psd.state.counts import LaneCounts
from psd.state.curves import Curves, PointBatch
from psd.state.cuts.cuts import Cuts
from psd.state.cuts.snapshots import Done, Snapshot, check_cuts
from psd.state.desks.admission import Admission
from psd.state.desks.buffers import BufferDesk
from psd.state.desks.cut_schedule import CutSchedule
from psd.state.desks.exchange import Exchange
from psd.state.desks.parameters import ParameterDesk
from psd.state.desks.restoration import Restoration
from psd.state.desks.settlement import SettlementDesk
from psd.state.desks.status import STATES, ShardState, ShardStatus
from psd.state.desks.steps import StepDesk
from psd.state.desks.transfers import check_begun_as
from psd.state.desks.vectors import VectorDesk
from psd.state.durability.state_directory import Storage
from psd.state.job import Job
from psd.state.life import Life
from psd.state.orders import HEARD, told_end
from psd.state.readers import Readers, check_asked
from psd.state.tickets import Ticket, WaitKind
from psd.state.workers.learners import HeardLearner
from psd.state.workers.membership import Worker, WorkerState
from psd.state.workers.reducing import brought_by
from psd.v1 import control_pb2, data_pb2, job_pb2
from psd_core.arena import Page, StoreClosed
from psd_core.table import TableSnapshot

logger = logging.getLogger(__name__)

ABANDONED_LEASES = 6
"""Leases for which --exit-when-done waits for a silent worker; after that it is taken to be gone for good."""

READERS_S = 2.0
"""Seconds for which somebody who has asked for the job counts as a reader that will ask again."""


def check_writable(directory: CheckpointDirectory) -> None:
    """Raise ConfigError if no checkpoint could be stored there, at the start instead of when the first one is due."""
    try:
        directory.check()
    except CheckpointFailed as error:
        raise ConfigError(f"--checkpoint-dir: {error}") from error


class Shard:
    """The state of one shard process.

    Args:
        config: which shard, limits, lease.
        now: returns monotonic seconds. wall: returns seconds since 1970.
        crash_point: called at each named step at which a process may die, for tests.
        directory: the checkpoints to restore from.

    Raises:
        ConfigError: --state-dir is another shard's or run's, in use, damaged, or no place for files; or --checkpoint-dir cannot
            be written to, and the shard has no state of its own to go on with.

    Attributes:
        is_recovered: True if the shard goes on with the state of an earlier process.
        restored_from: name of the checkpoint that it has begun with, or None. With one, the shard is tentative.
        config, now: as given.
        admission, exchange, steps, buffers, parameters, vectors, restoration, cuts, schedule: the desks, each for its calls.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        incarnation: int | None = None,
        crash_point: Callable[[str], None] | None = None,
        directory: CheckpointDirectory | None = None,
    ) -> None:
        self.config = config
        self.now = now
        has_checkpoints = directory is not None or bool(config.from_checkpoint and not config.parameters_only)
        storage = Storage(config, crash_point)
        self._core = ShardCore(config, storage, now, incarnation, wall=wall, has_checkpoints=has_checkpoints)
        self.cuts = Cuts(self._core, self._describe)
        self._core.on_settled = self.cuts.advance
        self.restoration = Restoration(self._core, self.cuts, directory)
        self.is_recovered = self._core.recover(self.restoration.has_checkpoint)
        if not self.is_recovered:
            storage.check_usable()
            if directory is not None:
                check_writable(directory)
        with self._core.job_lock:
            self.restored_from = None if self.is_recovered else self.restoration.begin()
        self.admission = Admission(self._core, wall, self.restoration.redeclare, self.restoration.give_values)
        self.schedule = CutSchedule(self._core, self.cuts, wall)
        self.exchange = Exchange(self._core, self.cuts, self.schedule)
        self.buffers = BufferDesk(self._core, self.cuts)
        self.parameters = ParameterDesk(self._core)
        self.settlement = SettlementDesk(self._core)
        self.steps = StepDesk(self._core, self.cuts, self.schedule, lambda: self.is_draining or self.has_readers)
        self.vectors = VectorDesk(self._core)
        self.readers = Readers(now, config.limits.readers_max, config.limits.reads_max)
        self._curves = Curves(now, config.limits.name_bytes_max)
        self.is_draining = False
        self._started, self._described_at = now(), -math.inf

    @property
    def name(self) -> str:
        """Words for this shard, such as "shard 3"."""
        return f"shard {self.config.shard_index}"

    def arrive(self, request: control_pb2.BarrierRequest) -> Ticket:
        """Enter a barrier; the ticket resolves with the reply."""
        self._core.check_is_first("barriers are held by")
        with self._core.lock:
            worker = self._core.check_caller(request.caller)
            self._core.barriers.check(request.name, request.seq, self.config.limits.name_bytes_max)
            brought = brought_by(request, self.config.limits, len(self._core.members.workers))
            begun_as = check_begun_as(request.session, request.caller)
            ticket = self._core.ticket(
                worker,
                worker.session,
                WaitKind.BARRIER,
                worker.clock,
                lambda: self._core.barriers.missing(request.name),
                request.name,
            )
            self._core.barriers.on_arrive(begun_as, request.seq, ticket, brought)
            return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Take back the arrival of a caller that no longer waits at a barrier or a load."""
        with self._core.lock:
            self._core.barriers.on_withdraw(ticket)
            self._core.loads.on_withdraw(ticket)

    def expect_worker(self, rank: int, *, will_come: bool) -> None:
        """Note whether a launcher is starting a worker's process again. While it is, the worker's lease does not run out."""
        with self._core.lock:
            members = self._core.membership
            if will_come and members is not None and rank < len(members.workers):
                self._core.starting[rank] = self.now()
            else:
                self._core.starting.pop(rank, None)

    def learner(self, rank: int) -> HeardLearner | None:
        """A learner, as it has spoken of itself to this shard; None: the worker is none, or has not."""
        with self._core.lock:
            job = self._core.job
            return job.learners.of(rank) if job is not None else None

    def tick(self) -> list[Worker]:
        """Expire leases and rows, handle the consequences, retry updates that lacked room, and announce a cut if one is due.

        To be called every `tick_s`.

        Returns:
            The workers that expired.
        """
        with self._core.lock:
            expired = self._core.membership.on_tick(self.now()) if self._core.membership is not None else []
            self._core.counters.leases_expired += len(expired)
            for worker in expired:
                self._core.on_session_end(worker)
            if self.schedule.is_left_in_order:
                self._core.orders.on_ended()
        job = self._core.job
        if expired or (job is not None and job.lacks_space):
            self._core.settle()
        if job is not None and job.tables is not None:
            with contextlib.suppress(StoreClosed):  # the job is going back to a checkpoint
                job.tables.expire()
        self.settlement.decide_due()
        self.restoration.give_up_lost_round()
        self.schedule.announce_due()
        self.cuts.on_tick(self.now(), self.config.lease_s)
        return expired

    def drain(self) -> None:
        """Fail all waits, those that begin later included, with Draining, or JobOver if all workers have left."""
        self.is_draining = True
        self._core.revoke()
        self._core.waiting.refuse(self._draining())
        self.cuts.end_reads()

    @property
    def has_readers(self) -> bool:
        """True if somebody has asked for the job lately: readers of jobs without rounds do, again and again."""
        return self.now() - self._described_at < READERS_S

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def describe(self, request: control_pb2.DescribeRequest) -> control_pb2.DescribeReply:
        """The job and its progress; see ControlService.Describe."""
        self._described_at = self.now()
        self._core.revoke()
        self._core.check_address(request.shard_index, request.shard_count)
        self._core.check_run(request.run_id)
        job = self._core.initialized()
        return control_pb2.DescribeReply(
            run_id=self._core.run_id,
            spec=job.spec.to_message(),
            layout_digest=job.layout.digest,
            progress=self.schedule.progress,
            has_blocks=job.trained_count > 0,
            timeline=self._core.timeline,
            push_ids_max=self._core.push_ids_max,
            layout=job.layout_message,
            incarnation=self._core.incarnation,
            **self.settlement.told(job),
        )

    def begin_read(self, request: data_pb2.ReadRequest, done: Done) -> Snapshot:
        """Begin to collect the pages of a reader's cut; see DataService.Read. The caller gives them back by `cuts.abandon`.

        done: receives the snapshot when it is complete, or missed.
        """
        self._core.check_run(request.run_id)
        job = self._core.initialized()
        job.check_digest(request.layout_digest)
        check_cuts([request.cut])
        if request.HasField("timeline") and request.timeline != self._core.timeline:
            raise CutMissed(f"timeline: the job is on timeline {self._core.timeline} by now, not on {request.timeline}")
        check_asked(request, job)
        self.settlement.hear(request, job)
        snapshot = Snapshot(request.cut, job, done)
        self.cuts.begin(snapshot)
        return snapshot

    def learn(self, caller: job_pb2.Caller, cuts: Sequence[data_pb2.Cut]) -> None:
        """Take part in the cuts that a heartbeat names, if the job has its values."""
        job = self._core.job  # once: asked without the lock
        if cuts and job is not None and self._core.life.has_values and not self._core.is_tentative:
            with self._core.lock:
                worker = self._core.check_caller(caller)
            self.cuts.learn(job, cuts, worker, caller.session)

    def _describe(self, snapshot: Snapshot, pages: Mapping[int, Page], tables: Collection[TableSnapshot]) -> None:
        """Add to a snapshot what a cut has beside blocks and rows. Runs under a block's or the shard's lock; takes no other."""
        members, positions = self._core.members, snapshot.positions
        snapshot.timeline = self._core.timeline
        step = snapshot.cut.step if snapshot.job.policy.has_rounds else None
        if positions is not None:
            clocks = positions.found
        elif snapshot.job.is_cut_by_positions:  # a cut without positions: nothing changes any more
            all_have_ended = snapshot.cut.id == FINAL_ID  # as this shard, or another one, has heard
            is_part = [w.state is WorkerState.FINISHED or (all_have_ended and w.session != 0) for w in members.workers]
            clocks = {w.rank: w.clock for w in members.workers if is_part[w.rank]}
        else:
            clocks = {w.rank: w.clock if step is None else step for w in members.workers if w.session}
        snapshot.worker_clocks.update(clocks)
        snapshot.learning_rates = self._core.orders.learning_rates_from(snapshot.cut.step)
        snapshot.client_states.update(self._core.client_states.at(snapshot.job.counted_on(pages, tables)))

    def close(self, *, keep: bool) -> None:
        """Close the arena, after the last request. keep: leave its files for a later process."""
        with self._core.job_lock:
            self._core.revoke()
            with self._core.lock:
                if self._core.job is not None:
                    self.cuts.forget(self._core.job, "the shard ends")
            self._core.storage.close(keep=keep)

    def check_draining(self) -> None:
        """Raise Draining, or JobOver, if the shard takes no new work."""
        if self.is_draining:
            raise self._draining()

    def _draining(self) -> Draining | JobOver:
        index = self.config.shard_index
        if self.is_done:
            return JobOver(f"the job is over: all workers have left, and shard {index} is shutting down", shard=index)
        return Draining(f"shard {index} is shutting down", shard=index)

    @property
    def is_done(self) -> bool:
        """True if every worker has left."""
        with self._core.lock:
            return self._core.membership is not None and self._core.membership.all_done(
                self.now(), ABANDONED_LEASES * self.config.lease_s
            )

    @property
    def cannot_go_on(self) -> str:
        """The reason why the job cannot continue with the parameters of this shard; empty if there is none."""
        core = self._core
        is_stuck = not core.has_checkpoints or core.life.now in (Life.DAMAGED, Life.STRANDED)
        return str(core.lost_round) if core.lost_round is not None and is_stuck else ""

    # -- orders --------------------------------------------------------------------------------------------------------

    def scale_learning_rate(self, scale: float) -> job_pb2.LearningRateScale:
        """Scale the job's learning rate; see ControlService.SetLearningRate."""
        with self._core.lock:
            found = self._core.orders.scale_learning_rate(scale, self._next_clock())
        logger.warning("%s, as an operator has ordered", scale_text(found))
        return found

    def end_job(self) -> int:
        """Have all workers end before the pushes of one clock, or without rounds before their next ones; see Drain."""
        with self._core.lock:
            self._core.orders.end(self._next_clock())
            orders = self._core.orders.current
        return told_end(orders, logging.WARNING).ends_at

    def stop(self, caller: job_pb2.Caller) -> job_pb2.JobOrders:
        """Have all workers end before the pushes of one clock, because a worker wants it; see ControlService.Stop."""
        with self._core.lock:
            worker = self._core.check_caller(caller)
            open_round = self._open_round()
            if open_round is None:
                open_round = max(other.clock for other in self._core.members.workers if other.is_waited_for)
            is_news = self._core.orders.end(open_round + HEARD, asked_by=worker.rank)
            orders = self._core.orders.current
        return told_end(orders, logging.INFO if is_news else logging.DEBUG)

    def _next_clock(self) -> int:
        """The first clock at which no worker pushes before it hears of an operator's order given now; 0 without rounds."""
        open_round = self._open_round()
        return 0 if open_round is None else open_round + HEARD

    def _open_round(self) -> int | None:
        """The open round; None without rounds. Under the shard's lock, so that every later reply to a push has an order for
        HEARD rounds after it.

        Raises:
            WrongShard, NotDeclared, InvalidRequest: orders cannot be given, here or now.
        """
        self._core.check_is_first("orders are given to")
        job = self._core.initialized()
        self._core.revoke()  # before the version is read, until workers hear of the order by their replies
        if not job.trained_count:
            raise InvalidRequest(
                "shard 0 has no trained blocks, and workers hear of orders by its replies to pushes; use fewer shards"
            )
        return job.version_max if job.policy.has_rounds else None

    # -- curves --------------------------------------------------------------------------------------------------------

    def log(self, request: control_pb2.LogRequest) -> None:
        """Keep the points of a worker's series; see ControlService.Log."""
        self._core.check_is_first("scalars are kept by")
        worker = self.check_caller(request.caller)
        columns = request.names, request.series, request.steps, request.values, request.ago_s
        batch = PointBatch(request.first, *columns, request.total)
        self._curves.add(worker.rank, worker.connection, batch)

    def curves(self, after: int) -> control_pb2.CurvesReply:
        """The points of all workers' series; see ControlService.Curves."""
        self._core.check_is_first("scalars are kept by")
        latest, more, parts = self._curves.read(after)
        curves = [control_pb2.Curve(**part._asdict()) for part in parts]
        return control_pb2.CurvesReply(incarnation=self._core.incarnation, latest=latest, more=more, curves=curves)

    # -- what the rim asks ---------------------------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        """The name of the run; empty while it has none."""
        return self._core.run_id

    def declared(self) -> Job:
        """The job; NotDeclared if there is none."""
        return self._core.declared()

    @property
    def job(self) -> Job | None:
        """The job; None before one is declared, and while a checkpoint is loaded."""
        return self._core.job

    def initialized(self) -> Job:
        """The job, with its initial values; NotDeclared if it has none."""
        return self._core.initialized()

    def check_caller(self, caller: job_pb2.Caller) -> Worker:
        """The worker of a live session, its lease renewed; see ShardCore.check_caller."""
        with self._core.lock:
            return self._core.check_caller(caller)

    def is_current(self, rank: int, session: int) -> bool:
        """True if the rank's worker takes part in the job as this session, or nobody has joined yet."""
        members = self._core.membership
        if members is None:
            return True
        if rank >= len(members.workers):  # a rank of an earlier job
            return False
        worker = members.workers[rank]
        return worker.state is WorkerState.LIVE and worker.session == session

    def lane_counts(self, lane: str) -> LaneCounts:
        """The counts of a lane."""
        return self._core.counters.lanes[lane]

    @contextlib.contextmanager
    def counted(self, call: str, lane: str = "grpc") -> Iterator[None]:
        """Count how long the body, a call on a lane, takes, unless it fails."""
        began = self.now()
        yield
        self.lane_counts(lane).count_call(call, self.age_s(began))

    def count_error(self, error: PsdError) -> None:
        """Note that a call has ended in an error."""
        with self._core.lock:
            self._core.counters.count_error(error)

    def count_barrier(self, seconds: float) -> None:
        """Note how long a worker was in a barrier."""
        with self._core.lock:
            self._core.counters.barriers.observe(seconds)

    def status(self) -> ShardStatus:
        """The status that psdctl and the metrics show."""
        core = self._core
        with core.lock:
            self.steps.collect()
            members, job = core.membership, core.job
            return ShardStatus(
                state=self.state,
                life=core.life.now,
                run_id=core.run_id,
                incarnation=core.incarnation,
                timeline=core.timeline,
                restored_from=core.restored_from,
                restarts=job.arena.word("restarts") if job is not None else 0,
                directory=core.storage.directory,
                uptime_s=self.age_s(self._started),
                counters=core.counters.copy(),
                barriers_opened=core.barriers.opened_count,
                workers=[copy(worker) for worker in members.workers] if members is not None else [],
                min_clock=(members.min_clock() or 0) if members is not None else 0,
                waits=core.waiting.open(),
                job=job,
                orders=core.orders.current,
                ended_by=core.orders.fulfilled,
                total=self._curves.total,
                known_readers=self.readers.all(),
                reader_sent_bytes=self.readers.sent_bytes,
            )

    @property
    def state(self) -> ShardState:
        """The state that status and probes show."""
        if self.is_draining:
            return ShardState.DRAINING
        return STATES.get(self._core.life.now, ShardState.SERVING)

    @property
    def began_at(self) -> int:
        """The step at which the job began here: that of its checkpoint, or 0."""
        return self._core.began_at

    @property
    def trained(self) -> tuple[int, float]:
        """Steps that the job has made since all workers had joined, and seconds that this took."""
        with self._core.lock:
            return self._core.membership.trained() if self._core.membership is not None else (0, 0.0)

    @property
    def absent(self) -> dict[int, Absence]:
        """The ranks that nobody waits for any more, each with the reason."""
        members = self._core.membership
        return members.absent if members is not None else {}

    @property
    def world_size(self) -> int:
        """Number of workers; 0 before the first one has joined."""
        members = self._core.membership
        return len(members.workers) if members is not None else 0

    def missing_for(self, ticket: Ticket) -> list[Worker]:
        """The workers that a ticket waits for."""
        with self._core.lock:
            return self._core.members.in_mask(ticket.missing())

    def age_s(self, since: float) -> float:
        """Seconds that have passed since `since`, a time of `now`."""
        return self.now() - since
