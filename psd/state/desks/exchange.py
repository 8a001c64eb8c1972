"""The exchange: takes gradients in, and gives parameters out. The middle of a push's life, between the frames and the blocks.

push: begin_push -> gate -> push_block for every block -> end_push        pull: begin_pull -> gate -> read, unpin
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import psd_core
from psd.contract import frames
from psd.contract.errors import InvalidRequest, InvalidTensor
from psd.contract.jobspec import JobSpec
from psd.contract.rows import TableRows
from psd.contract.rules import weight_of
from psd.state.aggregation.agreement import Voice
from psd.state.aggregation.block import BlockState
from psd.state.aggregation.rounds import Contribution, Outcome
from psd.state.aggregation.trained import Trained
from psd.state.core import ShardCore, check_begun_as
from psd.state.cuts.cuts import Cuts
from psd.state.cuts.snapshots import check_cuts
from psd.state.desks.buffers import wants_buffers
from psd.state.desks.cut_schedule import CutSchedule
from psd.state.desks.transfers import Found, Pull, Push
from psd.state.durability.client_states import check_client_state
from psd.state.job import Job
from psd.state.tables.block import TablesBlock
from psd.state.tickets import Ticket, WaitKind
from psd.state.workers.membership import WorkerState
from psd.v1 import data_pb2
from psd_core.arena import StoreClosed

FIRST_GRADIENT_BYTES = 16


class Exchange:
    """Handles gradients and parameters."""

    def __init__(self, core: ShardCore, cuts: Cuts, schedule: CutSchedule) -> None:
        self._core = core
        self._cuts = cuts
        self._schedule = schedule

    # -- push ----------------------------------------------------------------------------------------------------------

    def begin_push(self, header: data_pb2.PushHeader) -> Push:
        """Check the whole header before any block is touched."""
        scalars = tuple([tuple(group.values) for group in header.scalars])
        with self._core.lock:
            worker = self._core.check_caller(header.caller)
            job = self._core.initialized()
            job.check_digest(header.layout_digest)
            weight_of(header.weight)
            job.check_scalars(scalars)
            self._core.check_clock(worker, header.clock)
            decisions = job.participant.check(header.decisions)
            check_cuts(header.cuts)
            check_client_state(header.client_state)
            check_first_gradient(header.first_gradient)
            has_rounds = job.policy.has_rounds
            versions = {} if has_rounds else job.versions_read(header.versions)
            scale = check_scale(header, job.spec) if header.HasField("scale") else 1.0
            begun_as = check_begun_as(header.session, header.caller)
            if header.since > header.clock + 1:
                raise InvalidRequest(f"since: {header.since} is beyond clock {header.clock}")
            if has_rounds:
                job.agreement.check(header.clock, Voice(header.since, worker.rank, scalars))
            # Without rounds a clock decides only which workers wait at the gate, this one included. With rounds, it is noted
            # with the first valid block (_enter).
            skipped = not has_rounds and self._core.members.on_clock(worker, header.clock)
            if job.is_exact:
                self._core.count_staged(decisions)
        if decisions:
            job.participant.follow(decisions)
        if skipped:
            self._core.settle()
        if self._cuts.awaits_positions and header.cuts:
            self._cuts.hear(header.cuts, worker, header.caller.session)
        return Push(
            job,
            worker,
            header.caller.session,
            begun_as,
            header.clock,
            header.weight,
            scalars,
            scale=scale,
            since=header.since,
            is_finite=header.is_finite,
            client_state=header.client_state,
            first_gradient=header.first_gradient,
            cuts=tuple(header.cuts),
            versions=versions,
        )

    def _enter(self, push: Push, job: Job) -> None:
        """Note that the push has brought a valid block: from here on it takes part."""
        if push.client_state:
            self._check_session(push)
            self._keep_client_state(push, job)
        with self._core.lock:
            self._check_session(push)
            if job.policy.has_rounds:
                job.agreement.hear(push.clock, push.voice)
            self._core.on_used()
            push.worker.has_pushed = True
            skipped = self._core.members.on_clock(push.worker, push.clock)
        if push.cuts:
            self._cuts.learn(job, push.cuts, push.worker, push.session)
        push.is_entered = True
        if skipped:
            self._core.settle()

    def _keep_client_state(self, push: Push, job: Job) -> None:
        """Store the state that the worker saves with this push, before any block counts the push."""
        rank, members = push.worker.rank, self._core.members
        self._core.client_states.on_push(
            rank,
            (push.begun_as, push.clock + 1),
            push.client_state,
            counted=job.last_counted(rank),
            is_current=lambda: members.session_of(rank) == push.session,
        )

    def gate(self, call: Push | Pull, clock: int) -> Ticket | None:
        """A ticket if a worker at `clock` must wait for slower ones before it may push or pull."""
        needed = call.job.policy.lag(clock)
        if needed == 0:
            return None
        with self._core.lock:
            min_clock = self._core.members.min_clock()
            if min_clock is None or needed <= min_clock:
                return None
            if isinstance(call, Push) and self._cuts.needs(call.worker, call.session, clock):
                return None  # slower workers may be held for a cut, which waits for this push
            ticket = self._core.ticket(
                call.worker, call.session, WaitKind.STALENESS, clock, lambda: self._core.members.slower_than(needed)
            )
            self._core.add_gate(ticket)
            return ticket

    def hold(self, push: Push) -> Ticket | None:
        """A ticket if a push must wait until cuts that do not include it are taken. Call it before the push's first block."""
        return self._cuts.hold(push.worker, push.session, push.clock) if self._cuts.awaits_positions else None

    def _check_session(self, call: Push | Pull) -> None:
        """Raise SessionFenced if the session has ended since the call began, and ShardRestarted if the shard has gone back to a
        checkpoint. Takes no lock, because it is called for every block."""
        if call.worker is not self._core.members.worker(call.worker.rank):
            raise self._core.gone_back()
        if call.worker.session != call.session or call.worker.state is not WorkerState.LIVE:
            self._core.members.check_session(call.worker.rank, call.session)

    def check_arrival(self, push: Push) -> None:
        """Note that a block has come; InvalidRequest if a push brings far more than the shard has, and so might never end."""
        push.arrived += 1
        limit = 2 * push.job.block_count
        if push.arrived > limit:
            raise InvalidRequest(f"block: the push has brought more than {limit} blocks, twice as many as the shard has")

    def push_block(
        self,
        push: Push,
        index: int,
        present: bytes,
        payload: memoryview,
        *,
        is_lent: bool = False,
        rows: Sequence[data_pb2.RowsPart] = (),
        memory: Sequence[memoryview] = (),
        more: bool = False,
    ) -> Ticket | None:
        """Count one block of a push. Returns a ticket if its round is not open yet: call again when it resolves.

        Args:
            is_lent: True if the payload does not change before the push's loan has ended.
            rows, memory, more: as in PushedBlock.
        """
        job = push.job
        block = job.trained(index)
        if isinstance(block, BlockState) and (rows or more):
            raise InvalidRequest(f"rows: block {index} is not the tables' block")
        values: Any
        scalars: Sequence[Any]
        if isinstance(block, BlockState):
            values, mask = self._gradient(push, block, present, payload)
            scalars = push.scalars[block.plan.group]
        elif more:
            if present:
                raise InvalidRequest("present: stands on a frame of rows that others follow")
            block.checks.stage(push.staged, rows, payload, memory)
            return None
        else:
            values, mask, scalars = block.checks.gradients(push.staged, rows, payload, present, memory), None, push.scalars
            if job.spec.nan_policy != "allow" and not push.is_finite:
                block.checks.check_finite(values, push.worker.rank, push.clock)
        if not push.is_entered:
            self._enter(push, job)
        else:
            self._check_session(push)
        push.worker.last_seen = self._core.now()
        read = push.versions.get(index)
        part = Contribution(
            push.worker.rank,
            push.begun_as,
            push.clock,
            push.weight,
            values,
            mask,
            scalars,
            read,
            push.scale,
            push.loan if is_lent else None,
            since=push.since,
            sent_by=push.session,
        )
        try:
            outcome = block.contribute(part)
        except StoreClosed:
            raise self._core.gone_back() from None
        if outcome is Outcome.EARLY:
            return self._core.when(block, push.clock, push.worker, push.session, WaitKind.EARLIER_ROUND)
        if block is job.tables:
            push.staged.clear()
        if index not in push.covered:
            push.covered.add(index)
            push.outcomes[outcome] += 1
            if outcome in (Outcome.COUNTED, Outcome.STAGED) and push.outcomes[outcome] == 1:
                with self._core.lock:
                    job.agreement.on_counted(push.clock, push.worker.rank)
        return None

    def _gradient(
        self, push: Push, block: BlockState, present: bytes, payload: memoryview
    ) -> tuple[NDArray[Any] | None, NDArray[np.uint8] | None]:
        """A block's gradient (None if it is empty), and the mask of the segments that have one (None if all have)."""
        plan = block.plan
        mask = frames.present_mask(present, len(plan.segment_ends)) if present else None
        if mask is not None and not mask.any():
            if payload.nbytes:
                raise InvalidTensor(
                    f"block {plan.index}: payload has {payload.nbytes} bytes, but present says that there is nothing"
                )
            return None, mask
        values = frames.numbers(payload, plan.gradient_dtype, plan.length, f"block {plan.index}")
        if push.job.spec.nan_policy != "allow" and not push.is_finite:
            whose = f"the gradient of worker {push.worker.rank}"
            self._core.check_finite(values, plan.index, whose, push.worker.rank, push.clock)
        if mask is not None:
            lengths = np.diff(plan.segment_ends, prepend=np.uint32(0))
            if np.any(psd_core.widened(values)[np.repeat(mask, lengths) == 0]):
                raise InvalidTensor(f"block {plan.index}: payload must be zero where present is 0")
        return values, mask

    def end_push(self, push: Push) -> data_pb2.PushReply:
        """Finish a push whose blocks have all come, and move the worker's clock."""
        job, members = push.job, self._core.members
        if len(push.covered) < job.trained_count:
            raise InvalidRequest(
                f"block: {job.lacking(push.covered)} is missing; the push of clock {push.clock} ended after "
                f"{len(push.covered)} of {job.trained_count} blocks"
            )
        outcomes = push.outcomes
        counted, late, staged = outcomes[Outcome.COUNTED], outcomes[Outcome.LATE], outcomes[Outcome.STAGED]
        clock = push.clock + 1
        with self._core.lock:
            self._check_session(push)
            members.on_step(push.worker, clock)
            if staged:
                job.participant.on_staged(push.clock, push.worker.rank)
                self._core.count_staged()
            elif counted or job.trained_count == 0:
                self._core.counters.pushes_accepted += 1
            elif late:
                self._core.counters.pushes_late += 1
            else:
                self._core.counters.pushes_duplicate += 1
            self._core.open_gates(push.worker)
            overruled = job.agreement.overruled(push.clock, push.worker.rank)
            wants = job.wants_buffers and wants_buffers(job, members, push.worker)
            same = job.same_gradient_as(push.worker.rank, push.first_gradient) if push.first_gradient else None
            orders = self._core.orders.current()
        if self._cuts.awaits_positions:
            self._cuts.advance()
        self._schedule.announce_due()
        return data_pb2.PushReply(
            clock=max(clock, job.version_max) if late else clock,
            blocks_counted=counted,
            blocks_duplicate=outcomes[Outcome.DUPLICATE],
            blocks_late=late,
            blocks_staged=staged,
            cuts=self._cuts.latest(),
            overruled=overruled,
            wants_buffers=wants,
            same_gradient_as=same,
            orders=orders,
        )

    # -- pull ----------------------------------------------------------------------------------------------------------

    def begin_pull(self, request: data_pb2.PullRequest) -> tuple[Pull, list[Trained]]:
        """Check a pull; return it with the blocks to read, in the order requested."""
        with self._core.lock:
            worker = self._core.check_caller(request.caller)
            job = self._core.initialized()
            job.check_digest(request.layout_digest)
            if len(request.blocks) > job.block_count:
                raise InvalidRequest(f"blocks: {len(request.blocks)} are asked for, the shard has {job.block_count}")
            blocks = job.read_from(request.blocks)
            decisions = job.participant.check(request.decisions)
            verdict = job.participant.verdict_of(request)
            if verdict is not None and not verdict.is_final:
                raise InvalidRequest(
                    "verdict.is_final: updates are still to be measured; a round is applied by a final verdict"
                )
            self._core.check_clock(worker, request.clock)
            skipped = self._core.members.on_clock(worker, request.clock)
            self._core.on_used()
            self._core.counters.pulls += 1
            self._core.count_staged(decisions)
        job.participant.follow(decisions, verdict)
        if skipped:
            self._core.settle()
        reader = None if request.versions_only else worker.rank
        return Pull(job, worker, request.caller.session, request.clock, reader), blocks

    def begin_answer(self, push: Push) -> Pull:
        """The pull that answers a push: at the next clock, of the blocks that the push has covered.

        Raises:
            InvalidRequest: aggregation is exact: a round then closes by a decision, which comes after the push.
        """
        if push.job.is_exact:
            raise InvalidRequest("PushPull: not with exact aggregation; use Push, Commit and Pull")
        with self._core.lock:
            self._core.counters.pulls += 1
        return Pull(push.job, push.worker, push.session, push.clock + 1, push.worker.rank)

    def begin_pull_rows(self, request: data_pb2.PullRequest) -> tuple[Pull, TablesBlock]:
        """Check a pull of rows; return it with the tables' block, whose version is to be read before any rows."""
        if request.blocks:
            raise InvalidRequest(f"blocks: {len(request.blocks)} are asked for with rows, expected none")
        pull, _ = self.begin_pull(request)
        return pull, tables_of(pull.job)

    def begin_read_rows(self, request: data_pb2.ReadRequest) -> TablesBlock:
        """Check a read of rows by a reader, which is no worker; return the tables' block."""
        self._core.check_run(request.run_id)
        job = self._core.initialized()
        job.check_digest(request.layout_digest)
        if request.HasField("cut"):
            raise InvalidRequest(f"cut: rows are read as they are now, not at cut {request.cut.id!r}")
        return tables_of(job)

    def read_rows(
        self,
        tables: TablesBlock,
        parts: Sequence[data_pb2.RowsPart],
        payload: memoryview,
        before: int,
        memory: Sequence[memoryview] = (),
        *,
        is_use: bool,
    ) -> list[TableRows]:
        """The rows that a frame asks for; see RowChecks.rows and TablesBlock.fill."""
        rows = tables.checks.rows(parts, payload, before, has_values=False, memory=memory)
        self.fill_rows(tables, rows, is_use=is_use)
        return rows

    def fill_rows(self, tables: TablesBlock, rows: Sequence[TableRows], *, is_use: bool) -> None:
        """Read the present rows into the arrays of `rows`."""
        try:
            tables.fill(rows, is_use=is_use)
        except StoreClosed:
            raise self._core.gone_back() from None

    def read(self, block: Trained, pull: Pull) -> Found | Ticket:
        """A block's version and pinned page for a pull, or a ticket that resolves when its round closes.

        The caller gives the page back with `BlockState.unpin`.
        """
        self._check_session(pull)
        version_min = pull.clock if pull.has_rounds and block.is_trained else 0
        try:
            found = block.read(version_min, pull.reader)
        except StoreClosed:
            raise self._core.gone_back() from None
        return found if found is not None else self._core.when(block, version_min, pull.worker, pull.session, WaitKind.ROUND)

    def peek(self, block: Trained, pull: Pull) -> Found | None:
        """Do as `read`, but return None instead of a ticket; for answers that are sent early, while more of a push arrives."""
        if not pull.has_rounds and pull.job.policy.lag(pull.clock) != 0:
            return None
        try:
            return block.read(pull.clock, None) if pull.has_rounds else block.read(0, pull.reader)
        except StoreClosed:
            raise self._core.gone_back() from None


def tables_of(job: Job) -> TablesBlock:
    """The job's tables; InvalidRequest if it has none."""
    if job.tables is None:
        raise InvalidRequest("rows: the job has no tables")
    return job.tables


def check_scale(header: data_pb2.PushHeader, spec: JobSpec) -> float:
    """The factor by which a push is multiplied; InvalidRequest if the worker may not choose it, or it is out of range."""
    if spec.consistency.has_rounds or not spec.clip_norm:
        raise InvalidRequest("scale: only in a job without rounds that has clip_norm; in rounds, a verdict has it")
    if not 0 <= header.scale <= 1:  # also refuses NaN
        raise InvalidRequest(f"scale: must be from 0 to 1, got {header.scale}")
    return header.scale


def check_first_gradient(digest: bytes) -> None:
    """Raise InvalidRequest unless the digest has the right length or is empty."""
    if len(digest) not in (0, FIRST_GRADIENT_BYTES):
        raise InvalidRequest(f"first_gradient: has {len(digest)} bytes, expected {FIRST_GRADIENT_BYTES} or none")
