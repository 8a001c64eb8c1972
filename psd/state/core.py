"""State shared by the parts of a shard: its identity, its one lock, its members, its job, and the checks of every request.

The lock guards members, waits and the job's life cycle; each block's own lock guards gradients and parameters. See locks.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

import psd_core
from psd.checkpoint.cut import CutName
from psd.contract.config import ConfigError, Limits, ServerConfig
from psd.contract.custom_rules import load_listed
from psd.contract.errors import (
    ForeignRun,
    InvalidRequest,
    NonFiniteGradient,
    NotDeclared,
    ShardRestarted,
    StateLost,
    WrongShard,
)
from psd.contract.integers import drawn_integer
from psd.contract.jobspec import JobSpec
from psd.contract.layout import Layout
from psd.state import locks
from psd.state.aggregation.trained import Trained
from psd.state.counts import Counters
from psd.state.durability.client_states import ClientStates
from psd.state.durability.state_directory import LeftDamaged, Storage
from psd.state.job import Job
from psd.state.life import Life, LifeCycle
from psd.state.locks import Level
from psd.state.orders import JobOrdersDesk
from psd.state.tables.partition import notes_count
from psd.state.tables.stores import partition_specs
from psd.state.tickets import Ticket, Waiting, WaitKind
from psd.state.workers.barriers import Barriers
from psd.state.workers.initial import InitialValues
from psd.state.workers.loading import Loads
from psd.state.workers.membership import Membership, Worker, WorkerState
from psd.v1 import job_pb2, storage_pb2
from psd_core.arena import Arena, BlockShape
from psd_core.table import TableStore

UNNAMED_RUN = re.compile(r"run-[0-9a-f]{16}")
"""A run name that shard 0 has made, from the first session that it issued, because nobody has given one. It may change until
somebody reads the job's values: if shard 0 dies before that, it makes another, larger name, and the other shards take it."""


@locks.guarded_by(Level.JOB, only=("make_job", "shrink_job"))
@locks.guarded_by(
    Level.SHARD,
    only=(
        "take_job",
        "become",
        "on_used",
        "check_caller",
        "on_session_end",
        "count_staged",
        "add_gate",
        "open_gates",
        "take_grown_job",
    ),
)
class ShardCore:
    """The shared state of a shard. Its attributes are for the other modules of psd.state only.

    Attributes:
        job, membership: None until a worker declares, or joins. starting: as in Membership.
        gates: tickets of workers that the staleness bound holds back.
        life: what the shard holds, and may do with it. Changed by `become`.
        timeline, restored_from, restored_version: as in JoinReply.
        lost_round: EXACT: the reason why the shard is DAMAGED (see Restoration), or cannot go on.
        now: returns monotonic seconds. wall: returns seconds since 1970.
        rules: users' own rules that jobs may name, by import path. functions: those that batches on vectors may name.
        is_announcing: a cut is being announced: nobody may be armed.
        has_checkpoints: True if there is a place for checkpoints. on_settled: called without locks by `settle`.
    """

    def __init__(
        self,
        config: ServerConfig,
        storage: Storage,
        now: Callable[[], float],
        incarnation: int | None,
        *,
        wall: Callable[[], float],
        has_checkpoints: bool,
    ) -> None:
        self.config = config
        self.storage = storage
        self.now = now
        self.wall = wall
        self.incarnation = incarnation or drawn_integer()
        self.run_id = config.run_id
        listed = load_listed(config.rules, config.rule_dir)
        self.rules, self.functions = listed.rules, listed.functions
        self.has_checkpoints = has_checkpoints
        self.job_lock = locks.new(Level.JOB)
        self.lock = locks.new(Level.SHARD)
        self.counters = Counters()
        self.waiting = Waiting()
        self.job: Job | None = None
        self.membership: Membership | None = None
        self.starting: dict[int, float] = {}
        self.life = LifeCycle()
        self.initial = self.new_initial()
        self.barriers = Barriers(lambda: self.members.at_barriers, self._save_barriers)
        self.loads = Loads(lambda: self.members.at_barriers)
        self.orders = JobOrdersDesk(storage.save_orders)
        self.gates: list[Ticket] = []
        self.client_states = ClientStates(storage)
        self.timeline = 0
        self.restored_from, self.restored_version = "", 0
        self.lost_round: StateLost | None = None
        self.on_settled: Callable[[], None] = lambda: None
        self._gates_min_clock: int | None = None
        self.is_announcing = False

    @property
    def members(self) -> Membership:
        """The membership; NotDeclared before the first worker has joined."""
        if (members := self.membership) is None:  # once: asked without the lock, too
            raise NotDeclared("no worker has joined this shard yet")
        return members

    def declared(self) -> Job:
        """The job; NotDeclared if there is none."""
        if (job := self.job) is None:  # once: asked without the lock, too
            raise NotDeclared("no job has been declared on this shard yet")
        return job

    def initialized(self) -> Job:
        """The job, with its initial values; NotDeclared if it has none."""
        job = self.declared()
        if not self.life.has_values:
            raise NotDeclared("the job has no initial values on this shard yet")
        return job

    def make_job(self, spec: JobSpec, members: Membership, restored_from: str = "", *, grows: bool = False) -> Job:
        """Make a job whose arena holds no values yet, in place of the present arena. Called with `job_lock`, not with `lock`.

        grows: the present job has vectors alone, and the new job keeps them.

        Raises:
            OutOfSpace: there is no room for it; nothing was made. With `grows`, nothing has changed.
        """
        shard, limits = (self.config.shard_index, self.config.shard_count), self.config.limits
        specs = partition_specs(spec, shard, notes_count(spec.world_size), limits, self.storage.free_bytes)
        stored = storage_pb2.StoredJob(
            run_id=self.run_id,
            shard_index=self.config.shard_index,
            shard_count=self.config.shard_count,
            spec=spec.to_message(),
            restored_from=restored_from,
            push_ids_max=limits.push_ids_max,
        )

        def arena_of(layout: Layout, shapes: list[BlockShape]) -> Arena:
            stored.layout_digest = layout.digest
            if grows:
                return self.storage.grow(stored, shapes, specs)
            return self.storage.create(stored, shapes, spec.world_size)

        return self._job(spec, members, arena_of, lambda: self.storage.tables if grows else self.storage.create_tables(specs))

    def take_grown_job(self, job: Job, members: Membership) -> None:
        """Replace a job that has vectors alone by one that also trains something, and has no values yet."""
        self.take_job(job, members)
        self.become(Life.EMPTY)
        self.initial = self.new_initial()

    def shrink_job(self, spec: JobSpec, members: Membership) -> None:
        """Go back to a job of vectors alone from one that never had values. Called with `job_lock`, not with `lock`."""
        job = self._job(spec, members, lambda *_: self.storage.shrink(), list)
        with self.lock:
            self.take_job(job, members)

    def take_job(self, job: Job, members: Membership) -> None:
        """Begin to serve a job that was made."""
        self.job, self.membership = job, members
        members.keep(self._save_worker)

    def become(self, following: Life) -> None:
        """Enter another state of the life cycle, and note in the arena what the shard's next process must know of it."""
        self.revoke()
        self.life.to(following)
        if self.job is not None:
            self.job.arena.set_word("tentative", following is Life.TENTATIVE)
            self.job.arena.set_word("undeclared", following in (Life.TENTATIVE, Life.RESTORED))

    def revoke(self) -> None:
        """Have no step go on, nor begin until workers are armed anew. Not under a lock below the shard's."""
        with self.lock:
            if self.membership is not None:
                self.membership.ranks.revoke()

    def on_used(self) -> None:
        """Note that a worker has used the initial values: they are final now."""
        if self.life.now is Life.UNREAD:
            self.become(Life.SERVING)

    def new_members(self, world_size: int, clock: int = 0) -> Membership:
        """A membership that no worker has joined yet."""
        return Membership(world_size, self.config.lease_s, clock, self.config.on_worker_failure, self.starting)

    def new_initial(self) -> InitialValues:
        """Make the record of initial values that nobody has offered yet."""
        return InitialValues(self.life, chooses=self.config.shard_index == 0)

    @property
    def is_tentative(self) -> bool:
        """True if nothing can be done before a worker says, by Rollback, which timeline begins."""
        return self.life.now in (Life.TENTATIVE, Life.LOST)

    @property
    def began_at(self) -> int:
        """The clock at which the job began here: the step of its checkpoint, or 0."""
        checkpoint = CutName.of(self.restored_from)
        return 0 if checkpoint is None else checkpoint.step

    @property
    def push_ids_max(self) -> int:
        """The most ids of rows in one push, or one pull. If the job has tables, their files were made with this limit."""
        job = self.job  # once: asked without the lock, too
        return self.config.limits.push_ids_max if job is None or job.tables is None else job.tables.checks.ids_max

    @property
    def how_to_begin_afresh(self) -> str:
        """Advice for the error of a worker that declares another job than the one that is here."""
        if self.restored_from:
            return (
                f"The job goes on from checkpoint {self.restored_from}; to begin another one, start the shards with another "
                "--checkpoint-dir; --from-checkpoint with --parameters-only takes the parameters alone"
            )
        if self.config.state_dir and self.job is not None and self.job.arena.word("restarts"):
            return "The job goes on from --state-dir; to begin another one, remove that directory, or name another"
        return "All workers of a job declare the same; to begin another job, start other shards, as psd-run does each time"

    def recover(self, can_go_back: Callable[[], bool]) -> bool:
        """Go on with the job that an earlier process of this shard held; False if there is none, or if it is damaged and
        `can_go_back`."""
        found = self.storage.recover(can_go_back)
        if found is None:
            return False
        try:
            self._go_on(*found)
        except LeftDamaged as error:
            if self.job is not None or not can_go_back():
                self.storage.close(keep=True)
                raise
            self.storage.give_up(error)
            return False
        except BaseException:
            self.storage.close(keep=True)
            raise
        return True

    def _go_on(self, stored: storage_pb2.StoredJob, arena: Arena) -> None:
        spec = JobSpec.from_message(stored.spec)
        members = self.new_members(spec.world_size)
        for rank in range(spec.world_size):
            session, clock, state = arena.member(rank)
            if state:
                # As _save_worker has it, two bits say how far the floor lies below the clock. How much further does not matter:
                # rounds before the worker's last push had closed when that push was counted.
                members.restore(
                    rank,
                    state=WorkerState(state & 0xF),
                    session=session,
                    clock=clock,
                    floor=max(0, clock - min(1, state >> 4)),
                    now=self.now(),
                )
        try:
            limits = replace(self.config.limits, push_ids_max=stored.push_ids_max)
            job = self._job(spec, members, lambda *_: arena, lambda: self.storage.open_tables(len(spec.tables)), limits)
        except InvalidRequest as error:
            raise ConfigError(f"--rule: {self.storage.directory} holds a job that needs it: {error}") from error
        self.storage.open_vectors()
        if job.layout.digest != stored.layout_digest:
            raise ConfigError(
                f"--state-dir: {self.storage.directory}: was written by a version of psd that cuts blocks differently"
            )
        arena.set_word("restarts", arena.word("restarts") + 1)
        if arena.word("undeclared"):
            life = Life.TENTATIVE if arena.word("tentative") else Life.RESTORED
        else:  # values that nobody has used may still be those of an initializing worker that died
            life = Life.SERVING if job.version_max > 0 or stored.restored_from else Life.UNREAD
        self.run_id, self.restored_from, self.timeline = stored.run_id, stored.restored_from, arena.word("timeline")
        with self.lock:
            self.take_job(job, members)
            self.become(life)
        self.initial.choice = arena.word("initialized")
        with self.storage.taking_over():
            self.barriers.restore(self.storage.load_barriers())
            with self.lock:
                self.orders.restore(self.storage.load_orders())
            self.client_states.recover(self.storage.load_client_states())

    def _job(
        self,
        spec: JobSpec,
        members: Membership,
        arena_of: Callable[[Layout, list[BlockShape]], Arena],
        stores_of: Callable[[], list[TableStore]],
        limits: Limits | None = None,
    ) -> Job:
        return Job(
            spec,
            shard_index=self.config.shard_index,
            shard_count=self.config.shard_count,
            membership=members,
            arena_of=arena_of,
            stores_of=stores_of,
            limits=limits or self.config.limits,
            on_lost=self._on_lost,
            rules=self.rules,
            storage=self.storage,
            now=self.now,
            wall=self.wall,
        )

    def _on_lost(self, error: StateLost) -> bool:
        """Note, under a block's lock, that a round was lost; the next tick handles it."""
        if not self.has_checkpoints or self.life.try_to(Life.DAMAGED):
            self.lost_round = error
        return self.has_checkpoints and self.life.now is not Life.STRANDED

    def _save_worker(self, worker: Worker) -> None:
        if self.job is not None:  # else take_job saves it
            below = min(2, worker.clock - worker.floor)
            self.job.arena.set_member(worker.rank, worker.session, worker.clock, worker.state | below << 4)

    def _save_barriers(self, opened: bytes) -> None:
        if self.job is not None:
            self.storage.save_barriers(opened)

    def check_address(self, shard_index: int, shard_count: int) -> None:
        """Raise WrongShard if the caller has mistaken another shard for this one."""
        config = self.config
        if (shard_index, shard_count) != (config.shard_index, config.shard_count):
            raise WrongShard(
                f"this is shard {config.shard_index}/{config.shard_count}, but it was addressed as "
                f"{shard_index}/{shard_count}; servers must be listed in the order of the shards, all of them"
            )

    def check_is_first(self, what: str) -> None:
        """Raise WrongShard unless this is shard 0. what: begins the message, such as "barriers are held by"."""
        if self.config.shard_index != 0:
            raise WrongShard(f"{what} shard 0, this is shard {self.config.shard_index}")

    def check_run(self, run_id: str) -> None:
        """Raise ForeignRun if a reader names another run than this one; NotDeclared while the shard is tentative."""
        if run_id and run_id != self.run_id:
            raise ForeignRun(f"run_id: this shard serves run {self.run_id!r}, not {run_id!r}")
        self._check_timeline()

    @property
    def is_run_open(self) -> bool:
        """True if the run's name may still change: nobody has given one, and nobody has used the job's values."""
        is_unnamed = not self.config.run_id and (not self.run_id or UNNAMED_RUN.fullmatch(self.run_id) is not None)
        return is_unnamed and self.life.now in (Life.EMPTY, Life.UNREAD) and not self.restored_from

    def check_run_id(self, run_id: str, field: str = "caller.run_id") -> None:
        """Raise ForeignRun if a worker means another run. A shard without a name yet is told apart by its incarnation."""
        if not self.run_id or run_id == self.run_id or (self.is_run_open and UNNAMED_RUN.fullmatch(run_id)):
            return
        raise ForeignRun(f"{field}: this shard serves run {self.run_id!r}, not {run_id!r}")

    def check_target(self, caller: job_pb2.Caller) -> None:
        """Raise ForeignRun or ShardRestarted unless the caller means this shard in this life."""
        if caller.run_id != self.run_id:
            self.check_run_id(caller.run_id)
        if caller.incarnation != self.incarnation:
            raise ShardRestarted(
                f"caller.incarnation: shard {self.config.shard_index} is incarnation {self.incarnation}, "
                f"not {caller.incarnation}: it has restarted since the worker joined",
                shard=self.config.shard_index,
            )
        self._check_timeline()

    def _check_timeline(self) -> None:
        if self.is_tentative:
            raise NotDeclared(
                f"shard {self.config.shard_index} has loaded checkpoint {self.restored_from} and waits to be told, by "
                "Rollback, which timeline begins"
            )

    def check_caller(self, caller: job_pb2.Caller) -> Worker:
        """The worker of a live session, whose lease this renews; raises what `check_target` and Membership.check_session do."""
        self.check_target(caller)
        members = self.members
        worker = members.check_session(caller.rank, caller.session)
        members.on_seen(worker, self.now())
        return worker

    def check_clock(self, worker: Worker, clock: int) -> None:
        """Raise InvalidRequest if a worker's clock is further ahead than shards can drift apart."""
        # Without blocks nobody pushes here, and the clock moves by heartbeats alone.
        if clock > worker.clock and (job := self.declared()).trained_count:
            self.members.check_clock(worker, clock, job.version_max)

    def gone_back(self) -> ShardRestarted:
        """The error for a call that was under way when the job went back to a checkpoint."""
        index = self.config.shard_index
        return ShardRestarted(f"shard {index} has gone back to a checkpoint since the call began", shard=index)

    def check_finite(self, values: NDArray[Any], block: int, whose: str, rank: int, clock: int) -> None:
        """Raise NonFiniteGradient, naming worker, tensor and step, if a block's values are not all finite."""
        element = psd_core.first_nonfinite(values)
        if element >= 0:
            job = self.declared()
            tensor = job.layout.tensor_at(job.blocks[block].plan, element)
            raise NonFiniteGradient(
                f"payload: {whose} at step {clock} has {psd_core.widened(values)[element]} in tensor {tensor!r} "
                f"(block {block}, element {element})",
                rank=rank,
                tensor=tensor,
                clock=clock,
            )

    def ticket(
        self, worker: Worker, session: int, kind: WaitKind, clock: int, missing: Callable[[], int], name: str = ""
    ) -> Ticket:
        """A new open ticket; SessionFenced if the session has ended, because nothing would end its wait then."""
        with self.lock:
            self.members.check_session(worker.rank, session)
            return self.waiting.add(Ticket(worker.rank, session, kind, clock, self.now(), missing, name))

    def when(self, block: Trained, version: int, worker: Worker, session: int, kind: WaitKind) -> Ticket:
        """A ticket that resolves when the block reaches a version."""
        round_ = version - 1
        ticket = self.ticket(worker, session, kind, round_, lambda: block.missing_in(round_))
        block.when(version, ticket)
        return ticket

    def on_session_end(self, worker: Worker) -> None:
        """End the waits of and for a session that has ended, because its worker has left, expired or joined again."""
        for ticket in self.waiting.open(worker.rank):
            if ticket.session < worker.session:
                ticket.fail(worker.replaced(ticket.session))
            elif worker.state is not WorkerState.LIVE:
                ticket.fail(self.members.ended(worker))
        self.barriers.on_session_end(worker.rank)
        self.loads.on_session_end(worker.rank)
        self.initial.on_gone(worker.rank, self.members.workers)
        if self.job is not None:
            self.job.on_gone(worker.rank)

    def count_staged(self, decisions: Sequence[tuple[int, int]] = ()) -> None:
        """EXACT: count the pushes whose rounds are now decided as applied, dropped or skipped."""
        if self.job is not None and self.job.is_exact:
            counted, left_out = self.job.participant.count(decisions)
            self.counters.pushes_accepted += counted
            self.counters.pushes_late += left_out

    def add_gate(self, ticket: Ticket) -> None:
        """Keep the ticket of a worker that the staleness bound holds back."""
        self.gates = [t for t in self.gates if not t.future.done()]
        self.gates.append(ticket)
        self._gates_min_clock = None

    def open_gates(self, stepped: Worker | None = None) -> None:
        """Resolve the tickets of workers that the staleness bound no longer holds back. stepped: has just finished a step."""
        if not self.gates or self.job is None:
            return
        min_clock = self.members.min_clock()
        if min_clock is not None and min_clock == self._gates_min_clock:
            return  # only the slowest worker opens gates: for all others there is nothing to do
        self._gates_min_clock = min_clock
        policy = self.job.policy
        opened = [ticket for ticket in self.gates if min_clock is None or policy.lag(ticket.clock) <= min_clock]
        if opened and stepped is not None:
            stepped.awaited_s += self.now() - min(ticket.since for ticket in opened)
        for ticket in opened:
            ticket.resolve()
        self.gates = [t for t in self.gates if not t.future.done()]

    def settle(self) -> None:
        """Open barriers, gates and rounds that are complete now that other workers are waited for. Called without the lock."""
        with self.lock:
            self.barriers.on_members_changed()
            self.loads.settle()
            self.open_gates()
            job = self.job if self.life.has_values else None
            news: list[tuple[int, int]] = []
            if job is not None and job.coordinator is not None:
                news = job.settle_decisions()
                self.count_staged(news)
        if job is not None:
            job.participant.follow(news)
            job.settle()
            self.on_settled()
