"""Admission: how a worker joins, agrees on the job, provides or awaits initial values, renews its lease, and leaves.

Must not know gradients: psd/state/desks/exchange.py has them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from psd.checkpoint.cut import TIME_S_MAX
from psd.contract import frames
from psd.contract.config import RUN_ID_BYTES_MAX
from psd.contract.errors import (
    InvalidRequest,
    InvalidTensor,
    RolledBack,
    SpecMismatch,
    StateLost,
)
from psd.contract.integers import INTEGER_MAX
from psd.contract.jobspec import JobSpec
from psd.contract.printable import is_printable, printable
from psd.contract.spec_limits import check_counts, check_limits
from psd.state.core import UNNAMED_RUN, ShardCore
from psd.state.job import Job
from psd.state.life import Life
from psd.state.tickets import Ticket, WaitKind
from psd.state.workers.membership import Membership, Worker, WorkerState
from psd.v1 import control_pb2, job_pb2
from psd_core.arena import Page

TRANSPORT_BYTES_MAX = 256
HOST_BYTES_MAX = 256

GIVEN = 1
"""Number of the choice (psd/state/workers/initial.py) for values that no worker has provided; smaller than any session."""


@dataclass(slots=True)
class Initialization:
    """Initial values that are arriving. Until all blocks are there, they wait on pages that nobody reads yet, or in `aside`.

    Attributes:
        is_first: True if the shard has no values yet, and so a spare page for each block. Otherwise the values replace others:
            they wait in `aside`, and pages are asked for when all blocks are there.
    """

    worker: Worker
    session: int
    choice: int
    is_accepted: bool
    is_first: bool
    job: Job
    pages: dict[int, Page] = field(default_factory=dict)
    aside: dict[int, NDArray[Any]] = field(default_factory=dict)

    def give_back(self) -> None:
        """Give back the pages that have not become current."""
        while self.pages:
            index, page = self.pages.popitem()
            self.job.blocks[index].discard(page)


class Admission:
    """Handles workers that join and leave.

    Args:
        wall: returns seconds since 1970, for sessions that grow over restarts.
        redeclare: changes a restored job to another spec.
        give_values: gives a new job its initial values; returns False if this shard has none to give.
    """

    def __init__(
        self,
        core: ShardCore,
        wall: Callable[[], float],
        redeclare: Callable[[JobSpec], None],
        give_values: Callable[[Job], bool],
    ) -> None:
        self._give_values = give_values
        self._core = core
        self._redeclare = redeclare
        self._wall = wall
        self._last_session = 0

    def join(self, request: control_pb2.JoinRequest) -> control_pb2.JoinReply:
        """Let a worker join; see ControlService.Join."""
        config = self._core.config
        self._check_join(request)
        # A worker that resumes does not wait while a checkpoint is loaded: that has ended its session.
        with contextlib.nullcontext() if request.resume else self._core.job_lock, self._core.lock:
            if request.run_id:
                self._core.check_run_id(request.run_id, "run_id")
            is_behind = self._core.life.has_values and request.timeline != self._core.timeline
            is_loading = self._core.life.now is Life.LOADING
            if request.resume and (self._core.is_tentative or is_behind or is_loading):
                if self._core.membership is not None:
                    self._core.membership.on_heard_again(request.rank, self._core.now())
                raise self._gone_back()
            if request.resume and not self._core.life.has_values:
                raise StateLost(
                    f"shard {config.shard_index} has come back without the parameters that it held, and has found no "
                    "checkpoint to go back to; start the job anew, with --checkpoint-dir to survive this the next time",
                    shard=config.shard_index,
                )
            members = self._membership_for(request.world_size)
            before = members.worker(request.rank)
            if request.resume and not before.session and self._core.restored_from:
                raise self._gone_back()  # it comes from another timeline of the same number, which nobody else remembered
            if request.resume and not before.session:
                raise StateLost(
                    f"shard {config.shard_index} has come back without the parameters that it held, and serves a job that "
                    f"worker {request.rank} has never joined",
                    shard=config.shard_index,
                )
            if request.connection and before.kicked == request.connection:
                raise before.kicked_out()
            earlier, was_absent = before.session, before.state is WorkerState.ABSENT
            session = request.session or self._next_session()
            whose: Any = {"host": request.host, "pid": request.pid, "connection": request.connection, "now": self._core.now()}
            if request.resume:
                worker = members.check_session(request.rank, session)
                members.on_return(worker, **whose)
            else:
                worker = members.on_join(request.rank, session, **whose)
            self._core.membership = members
            self._core.run_id = self._run_id(request.run_id, session)
            if session != earlier:
                self._core.counters.sessions += 1
                self._core.on_session_end(worker)
                if self._core.life.now is Life.STRANDED:
                    self._core.become(Life.SERVING)
                members.on_enter(worker, self._entry_clock(worker, is_awaited=was_absent))
            reply = control_pb2.JoinReply(
                run_id=self._core.run_id,
                incarnation=self._core.incarnation,
                session=session,
                clock=worker.clock,
                lease_s=config.lease_s,
                decisions=self._latest_decisions(),
                timeline=self._core.timeline,
                checkpoint=self._core.restored_from,
                is_tentative=self._core.is_tentative,
                workers=[member.state.value for member in members.workers],  # type: ignore[misc]
                orders=self._core.orders.current,
                push_ids_max=self._core.push_ids_max,
                restored_version=self._core.restored_version,
            )
        self._core.settle()
        return reply

    def _gone_back(self) -> RolledBack:
        core = self._core
        text = f"shard {core.config.shard_index} has gone back to checkpoint {core.restored_from}"
        return RolledBack(text, timeline=core.timeline, checkpoint=core.restored_from)

    def _check_join(self, request: control_pb2.JoinRequest) -> None:
        """Raise InvalidRequest or WrongShard if the request is wrong in itself, whatever the job."""
        config = self._core.config
        self._core.check_address(request.shard_index, request.shard_count)
        members = self._core.membership  # the limit may be smaller now than when they joined
        is_known = members is not None and len(members.workers) == request.world_size
        if not is_known and not 1 <= request.world_size <= config.limits.workers_max:
            raise InvalidRequest(
                f"world_size: must be 1 to {config.limits.workers_max} (the shard's --max-workers), got {request.world_size}"
            )
        if request.rank >= request.world_size:
            raise InvalidRequest(f"rank: {request.rank} is not below world_size {request.world_size}")
        if (request.session == 0) != (config.shard_index == 0 and not request.resume):
            raise InvalidRequest(
                f"session: {request.session} at shard {config.shard_index}; shard 0 issues sessions, so it is 0 there, and "
                "that session at the others, and in a worker that resumes"
            )
        if request.session > INTEGER_MAX and not request.resume:
            raise InvalidRequest(f"session: {request.session} is above the limit of {INTEGER_MAX}")
        for name, text, limit in (("host", request.host, HOST_BYTES_MAX), ("run_id", request.run_id, RUN_ID_BYTES_MAX)):
            if len(text.encode()) > limit:
                raise InvalidRequest(f"{name}: has {len(text.encode())} bytes, the limit is {limit}")
            if not is_printable(text):
                raise InvalidRequest(f"{name}: {text!r} has control characters")

    def _membership_for(self, world_size: int) -> Membership:
        members = self._core.membership
        is_open = self._core.job is None or (
            self._core.life.now in (Life.TENTATIVE, Life.RESTORED)
            and members is not None
            and len(members.workers) != world_size
        )
        if members is None or (is_open and not any(w.state is WorkerState.LIVE for w in members.workers)):
            return self._core.new_members(world_size, clock=self._core.began_at)
        if len(members.workers) != world_size:
            raise SpecMismatch(
                f"world_size: {len(members.workers)} in the job, {world_size} with this worker. "
                f"{self._core.how_to_begin_afresh}"
            )
        return members

    def _run_id(self, asked: str, session: int) -> str:
        """Name of the run once a worker has joined that knows it as `asked`; see UNNAMED_RUN in core.py."""
        known = self._core.run_id
        if self._core.config.shard_index == 0:
            return known or ("" if UNNAMED_RUN.fullmatch(asked) else asked) or f"run-{session:016x}"
        return max(known, asked) if self._core.is_run_open else known

    def _next_session(self) -> int:
        known = max((w.session for w in self._core.membership.workers), default=0) if self._core.membership else 0
        self._last_session = max(self._last_session + 1, known + 1, int(self._wall() * 1e6))
        return self._last_session

    def _latest_decisions(self) -> list[job_pb2.Decision]:
        job = self._core.job
        return job.coordinator.latest() if job is not None and job.coordinator is not None else []

    def _entry_clock(self, worker: Worker, *, is_awaited: bool) -> int:
        """The clock at which a joining worker takes part.

        With rounds: the open round. Without: where its rank was before; but not behind the slowest of the others, and no
        further ahead of it than the bound allows. If a bound has made the others wait for this worker (`is_awaited`), it stays
        where its rank was: a worker that comes a moment after the others at the start makes as many steps as they do.
        """
        job = self._core.job
        if job is None:
            return 0
        if job.coordinator is not None:
            job.coordinator.on_joined_anew(worker.rank)
            return job.coordinator.entry_clock(worker.rank)
        if job.policy.has_rounds:
            # A shard without trained blocks has no rounds, and knows only its workers' clocks.
            return job.entry_round(worker.rank) if job.trained_count else max(w.clock for w in self._core.members.workers)
        if job.policy.has_bound and is_awaited:
            return worker.clock
        others = [w.clock for w in self._core.members.workers if w is not worker and w.state is WorkerState.LIVE]
        slowest = min(others, default=worker.clock)
        return max(slowest, worker.clock - max(0, job.policy.lag(worker.clock) - slowest))

    def declare(self, request: control_pb2.DeclareRequest) -> tuple[control_pb2.DeclareReply, Ticket | None]:
        """Agree with a worker on the job. If a ticket is returned, the reply is valid once it resolves, with its result as
        `choice`."""
        spec = self._spec_of(request.spec)
        with self._core.job_lock:
            self._make_job(request.caller, spec)
            reply, ticket = self._agree(request.caller, spec)
        self._core.settle()
        return reply, ticket

    def _spec_of(self, message: job_pb2.JobSpec) -> JobSpec:
        """The job that a worker declares; InvalidRequest or InvalidTensor if it exceeds the limits."""
        limits = self._core.config.limits
        try:
            check_counts(message, limits)
            spec = JobSpec.from_message(message)
            check_limits(spec, limits)
        except (InvalidRequest, InvalidTensor):
            job = self._core.job
            if job is None or message != job.spec.to_message():
                raise
            return job.spec  # the limits have become smaller since the job was made
        return spec

    def _make_job(self, caller: job_pb2.Caller, spec: JobSpec) -> None:
        """Make the job if this is its first declaration; if the job was restored, change it to what is declared."""
        with self._core.lock:
            self._core.check_caller(caller)
            members, job = self._core.members, self._core.job
            if spec.world_size != len(members.workers):
                raise SpecMismatch(f"world_size: joined with {len(members.workers)}, declared {spec.world_size}")
        grows = job is not None and job.spec.is_empty and not spec.is_empty
        if job is None or (grows and self._core.life.now in (Life.UNREAD, Life.SERVING)):
            new = self._core.make_job(spec, members, grows=grows)
            try:
                has_values = self._give_values(new)
            except BaseException:
                if job is not None:
                    self._core.shrink_job(job.spec, members)
                else:
                    self._core.storage.close(keep=False)
                raise
            with self._core.lock:
                if grows:
                    self._core.take_grown_job(new, members)
                else:
                    self._core.take_job(new, members)
                if has_values:
                    new.arena.set_word("initialized", GIVEN)
                    self._core.become(Life.UNREAD)
                    self._core.initial.on_set(GIVEN)
        elif job.spec != spec and spec.is_empty <= job.spec.is_empty and self._core.life.now is Life.RESTORED:
            self._redeclare(spec)

    def _agree(self, caller: job_pb2.Caller, spec: JobSpec) -> tuple[control_pb2.DeclareReply, Ticket | None]:
        with self._core.lock:
            worker = self._core.check_caller(caller)
            job = self._core.declared()
            if spec.is_empty and not job.spec.is_empty:  # the worker uses vectors alone, and trains nothing, or not yet
                reply = control_pb2.DeclareReply(layout_digest=job.layout.digest, initialized=True, clock=worker.clock)
                return reply, None
            if job.spec != spec:
                raise SpecMismatch(f"{job.spec.difference(spec)}. {self._core.how_to_begin_afresh}")
            if self._core.life.now is Life.RESTORED:
                self._core.become(Life.SERVING)
            choice = self._core.initial.on_declare(worker)
            ticket = None
            if self._core.config.shard_index == 0 and not self._core.life.has_values and not choice:
                ticket = self._core.ticket(worker, worker.session, WaitKind.INITIAL_VALUES, 0, self._core.initial.missing)
                self._core.initial.wait(ticket)
            client_state = b""
            if self._core.life.has_values and self._core.config.shard_index == job.layout.client_state_shard:
                client_state = self._core.client_states.settle(worker.rank, job.counted(worker.rank))
            if self._core.life.has_values and not worker.has_pushed:
                self._core.members.on_enter(worker, max(worker.clock, self._entry_clock(worker, is_awaited=True)))
            reply = control_pb2.DeclareReply(
                layout_digest=job.layout.digest,
                initializer=choice > 0,
                choice=choice,
                initialized=self._core.life.has_values,
                clock=worker.clock,
                client_state=client_state,
                layout=job.layout_message,
            )
        return reply, ticket

    def begin_initialize(self, caller: job_pb2.Caller, layout_digest: bytes, choice: int) -> Initialization:
        """Check an offer of initial values, and whether it is wanted. The caller always ends it by its `give_back`."""
        with self._core.lock:
            worker = self._core.check_caller(caller)
            job = self._core.declared()
            job.check_digest(layout_digest)
            is_accepted = self._core.initial.accepts(worker, choice)
            return Initialization(worker, caller.session, choice, is_accepted, not self._core.life.has_values, job)

    def initialize_block(self, init: Initialization, index: int, payload: memoryview) -> None:
        """Take one block's values. They are read only once, because they may lie in memory that the worker can still change.

        Raises:
            OutOfSpace: other offers take all the room.
        """
        block = init.job.block(index)
        values = frames.numbers(payload, block.plan.dtype, block.plan.length, f"block {index}")
        if init.is_accepted and init.is_first:
            page = block.prepare(values)
            if index in init.pages:
                block.discard(init.pages[index])
            init.pages[index], values = page, page.parameter
        elif init.is_accepted:
            init.aside[index] = values = values.copy()
        if block.plan.dtype.kind == "f" and not init.job.spec.groups[block.plan.group].is_of_buffers:
            self._core.check_finite(values, index, f"the initial values of worker {init.worker.rank}", init.worker.rank, 0)

    def end_initialize(self, init: Initialization) -> bool:
        """Let the job begin with these values, all blocks or none; False if the shard has other values already.

        Raises:
            OutOfSpace: there is no room for all of them; the shard keeps what it had before.
        """
        with self._core.job_lock:
            job = init.job
            lacking = job.blocks.keys() - init.pages.keys() - init.aside.keys()
            if lacking and init.is_accepted:
                count = len(job.blocks) - len(lacking)
                raise InvalidRequest(f"block: {min(lacking)} is missing; the call had {count} of {len(job.blocks)} blocks")
            if not self._is_wanted(init):
                return self._core.initial.has(init.choice)
            try:
                for index, values in init.aside.items():
                    init.pages[index] = job.blocks[index].prepare(values)
                with self._core.lock:
                    if not self._is_wanted(init):
                        return self._core.initial.has(init.choice)
                    for index in job.blocks:
                        job.blocks[index].begin(init.pages.pop(index))
                    job.arena.set_word("initialized", init.choice)
                    self._core.become(Life.UNREAD)
                    self._core.initial.on_set(init.choice)
            finally:
                init.give_back()
        self._core.settle()  # for members that changed before there were blocks
        return True

    def _is_wanted(self, init: Initialization) -> bool:
        if not init.is_accepted:
            return False
        with self._core.lock:
            if self._core.job is not init.job:
                return False
            self._core.members.check_session(init.worker.rank, init.session)
            return self._core.initial.accepts(init.worker, init.choice)

    def heartbeat(self, request: control_pb2.HeartbeatRequest) -> list[Ticket]:
        """Renew a lease and note the worker's clock; return its waits on this shard."""
        if len(request.transport.encode()) > TRANSPORT_BYTES_MAX:
            raise InvalidRequest(f"transport: expected at most {TRANSPORT_BYTES_MAX} bytes")
        if not 0 <= request.transfer_bytes_per_s < math.inf:
            raise InvalidRequest(f"transfer_bytes_per_s: must be finite and >= 0, got {request.transfer_bytes_per_s}")
        with self._core.lock:
            worker = self._core.check_caller(request.caller)
            worker.transport = printable(request.transport)
            worker.transfer_left_bytes, worker.transfer_bytes_per_s = request.transfer_left_bytes, request.transfer_bytes_per_s
            skipped = False
            if self._core.job is not None:
                self._core.check_clock(worker, request.clock)
                if self._core.job.coordinator is None:
                    skipped = self._core.members.on_clock(worker, request.clock)
                elif request.clock > worker.clock:
                    # Not on_clock: this shard may have seen no push yet, while the commit for that round is still on its way.
                    self._core.members.on_step(worker, request.clock)
            if request.leaving:
                skipped |= self._core.members.on_leaving(worker)
        if skipped:
            self._core.settle()
        return self._core.waiting.open(worker.rank)

    def kick(self, rank: int, session: int) -> bool:
        """End a worker's session for an operator; False if it has ended already. See ControlService.Kick."""
        with self._core.lock:
            worker = self._core.members.worker(rank)
            if worker.session != session or worker.state is not WorkerState.LIVE:
                return False
            self._core.members.on_kick(worker)
            self._core.on_session_end(worker)
        self._core.settle()
        return True

    def leave(self, caller: job_pb2.Caller, *, failed: bool, left_at: float = 0.0) -> None:
        """End a session because its worker leaves. If it has ended already, nothing changes.

        The worker need not know the shard's present incarnation: a worker that ends will not resume.
        """
        with self._core.lock:
            self._core.check_run_id(caller.run_id)
            worker = self._core.members.worker(caller.rank)
            if worker.session == caller.session:
                if self._core.job is not None and not failed and 0 <= left_at <= TIME_S_MAX:  # NaN is not
                    self._core.job.note_left(left_at)  # before the shard knows for good that the worker has left
                for ended in self._core.members.on_leave(worker, failed=failed):
                    self._core.on_session_end(ended)
        self._core.settle()
