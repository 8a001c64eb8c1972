"""One shard: the state machine behind every RPC. A worker's life, in order:

    admission.join -> declare -> (begin_initialize, initialize_block, end_initialize)
    exchange.begin_push, push_block, end_push; begin_pull, read    again and again
    admission.leave            beside it: admission.heartbeat, arrive (barrier), tick

Nothing here blocks: where a caller must wait for other workers it gets a Ticket, which later events resolve. Must not know
gRPC, sockets, flags or the environment.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence

from psd.checkpoint import CheckpointDirectory
from psd.contract.config import ServerConfig
from psd.contract.errors import Draining, WrongShard
from psd.state.admission import Admission
from psd.state.core import ShardCore, check_begun_as
from psd.state.cuts import Cuts, Snapshot, check_cuts
from psd.state.exchange import Exchange
from psd.state.membership import Worker, WorkerState
from psd.state.restoration import Restoration
from psd.state.settlement_desk import SettlementDesk
from psd.state.storage import Storage
from psd.state.tickets import Ticket, WaitKind
from psd.v1 import control_pb2, data_pb2

ABANDONED_LEASES = 6
"""A worker that has been silent for so many leases does not come back; --exit-when-done no longer waits for it."""


class ShardState(enum.Enum):
    """Values are those of psd.v1.ShardState."""

    EMPTY = 1
    SERVING = 2
    DRAINING = 3
    RESTORING = 4


class Shard:
    """The state of one shard process.

    Args:
        config: which shard, limits, lease.
        now: monotonic seconds. wall: seconds since the epoch.
        crash_point: called at each named step at which a process may die, for tests.
        directory: of checkpoints to restore from.

    Raises:
        ConfigError: --state-dir is another shard's or run's, in use, or damaged.

    Attributes:
        is_recovered: the shard goes on with what an earlier process of it held.
        restored_from: name of the checkpoint that it has begun with; it is tentative then.
        core: for status; everything else goes through the methods.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        incarnation: int | None = None,
        crash_point: Callable[[str], None] = lambda _: None,
        directory: CheckpointDirectory | None = None,
    ) -> None:
        self.core = ShardCore(config, Storage(config, crash_point), now, incarnation)
        self.cuts = Cuts(self._describe)
        self.restoration = Restoration(self.core, self.cuts, directory)
        self.is_recovered = self.core.recover()
        self.restored_from = None if self.is_recovered else self.restoration.load_newest()
        self.admission = Admission(self.core, wall, self.restoration.redeclare)
        self.exchange = Exchange(self.core, self.cuts)
        self.settlement = SettlementDesk(self.core)
        self.is_draining = False
        self._started = now()

    def arrive(self, request: control_pb2.BarrierRequest) -> Ticket:
        """Enter a barrier; the ticket resolves with its generation."""
        if self.core.config.shard_index != 0:
            raise WrongShard(f"barriers are held by shard 0, this is shard {self.core.config.shard_index}")
        with self.core.lock:
            worker = self.core.check_caller(request.caller)
            self.core.barriers.check(request.name, request.seq, self.core.config.limits.name_bytes_max)
            begun_as = check_begun_as(request.session, request.caller)
            ticket = self.core.ticket(
                worker,
                worker.session,
                WaitKind.BARRIER,
                worker.clock,
                lambda: self.core.barriers.missing(request.name),
                request.name,
            )
            self.core.barriers.on_arrive(begun_as, request.seq, ticket)
            return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Take back a barrier's arrival whose caller has given up."""
        with self.core.lock:
            self.core.barriers.on_withdraw(ticket)

    def tick(self) -> list[Worker]:
        """Expire leases, see to what that has made hopeless, and try again what had no room to be written; to be called every
        `tick_s`.

        Returns:
            The workers that expired.
        """
        with self.core.lock:
            expired = self.core.membership.on_tick(self.core.now()) if self.core.membership is not None else []
            self.core.counters.leases_expired += len(expired)
            for worker in expired:
                self.core.on_session_end(worker)
        job = self.core.job
        if expired or (job is not None and job.lacks_space):
            self.core.settle()
        self.restoration.give_up_lost_round()
        return expired

    def drain(self) -> None:
        """Fail every wait, now and later, with Draining."""
        self.is_draining = True
        self.core.waiting.refuse(self._draining())

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def is_training(self) -> bool:
        """True if there is a job, and a part of it here that changes."""
        job = self.core.job
        if job is None or self.core.is_tentative or not self.is_initialized:
            return False
        return job.trained_count > 0 and not job.arena.is_closed

    @property
    def has_workers(self) -> bool:
        """True if a worker is live."""
        with self.core.lock:
            return self.core.membership is not None and any(w.state is WorkerState.LIVE for w in self.core.membership.workers)

    @property
    def has_rounds(self) -> bool:
        """True if the job is synchronous."""
        return self.core.declared().policy.has_rounds

    @property
    def progress(self) -> int:
        """Rounds closed; without rounds the clock of the slowest worker, or of the last that has left."""
        job = self.core.declared()
        if job.policy.has_rounds:
            return job.version_max
        with self.core.lock:
            slowest = self.core.members.min_clock()
            return slowest if slowest is not None else max(w.clock for w in self.core.members.workers)

    def learn_cuts(self, cuts: Sequence[data_pb2.Cut]) -> None:
        """Take part in cuts, and pass them on to the workers."""
        self.cuts.learn(self.core.declared(), cuts)

    def describe(self, request: control_pb2.DescribeRequest) -> control_pb2.DescribeReply:
        """The job and how far it is; see ControlService.Describe."""
        self.core.check_address(request.shard_index, request.shard_count)
        self.core.check_run(request.run_id)
        job = self.core.initialized()
        return control_pb2.DescribeReply(
            run_id=self.core.run_id,
            spec=job.spec.to_message(),
            layout_digest=job.layout.digest,
            progress=self.progress,
            has_blocks=job.trained_count > 0,
            timeline=self.core.timeline,
        )

    def begin_read(
        self,
        request: data_pb2.ReadRequest,
        on_ready: Callable[[Snapshot], None],
        on_missed: Callable[[data_pb2.Cut, str], None],
    ) -> Snapshot:
        """Begin to collect the pages of a reader's cut; see DataService.Read. To be given back by `cuts.abandon`."""
        self.core.check_run(request.run_id)
        job = self.core.initialized()
        job.check_digest(request.layout_digest)
        check_cuts([request.cut])
        snapshot = Snapshot(request.cut, job, on_ready, on_missed)
        self.cuts.begin(snapshot)
        return snapshot

    def take_final_cut(self, cut_id: str) -> None:
        """Take this shard's part of a cut at the end of the job; the same on all shards if all workers have left in order."""
        created_at = max(worker.left_at for worker in self.core.members.workers)
        cut = data_pb2.Cut(id=cut_id, step=self.progress, created_at=created_at)
        self.cuts.take_final(self.core.declared(), cut)

    def release_snapshot(self, snapshot: Snapshot) -> None:
        """Give back the pages that a snapshot still holds."""
        pages, snapshot.pages = snapshot.pages, {}
        snapshot.job.unpin_all(pages)
        snapshot.job.arena.trim()

    def _describe(self, snapshot: Snapshot) -> None:
        """What belongs to a cut beside the blocks. Runs under a block's lock, and takes no other."""
        members = self.core.members
        snapshot.timeline = self.core.timeline
        step = snapshot.cut.step if snapshot.job.policy.has_rounds else None
        snapshot.worker_clocks.update({w.rank: w.clock if step is None else step for w in members.workers if w.session})
        snapshot.client_states.update(self.core.client_states.at(step))

    def close(self, *, keep: bool) -> None:
        """Let go of the arena, after the last request. Without `keep` it is removed."""
        with self.core.lock:
            if self.core.job is not None:
                self.cuts.forget(self.core.job, "the shard ends")
                self.core.job.give_back_pages()
            self.core.storage.close(keep=keep)

    def check_draining(self) -> None:
        """Raise Draining if no new work is taken any more."""
        if self.is_draining:
            raise self._draining()

    def _draining(self) -> Draining:
        index = self.core.config.shard_index
        return Draining(f"shard {index} is shutting down", shard=index)

    @property
    def is_done(self) -> bool:
        """True if every worker has left."""
        with self.core.lock:
            return self.core.membership is not None and self.core.membership.all_done(
                self.core.now(), ABANDONED_LEASES * self.core.config.lease_s
            )

    @property
    def state(self) -> ShardState:
        """What the shard is good for now."""
        if self.is_draining:
            return ShardState.DRAINING
        if self.core.is_tentative:
            return ShardState.RESTORING
        return ShardState.SERVING if self.is_initialized else ShardState.EMPTY

    @property
    def is_initialized(self) -> bool:
        """True if the job is declared and has its initial values."""
        return self.core.initial.is_set

    def missing_for(self, ticket: Ticket) -> list[Worker]:
        """The workers that a ticket waits for."""
        with self.core.lock:
            return self.core.members.in_mask(ticket.missing())

    def age_s(self, since: float) -> float:
        """Seconds since a time of this shard's clock."""
        return self.core.now() - since

    @property
    def uptime_s(self) -> float:
        """Seconds since the shard started."""
        return self.age_s(self._started)
