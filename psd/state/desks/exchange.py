"""The exchange: takes gradients in, and gives parameters out. The middle of a push's life, between the frames and the blocks.

push: begin_push -> gate -> push_block for every block -> end_push        pull: begin_pull -> gate -> read, unpin
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import psd_core
from psd.contract import frames
from psd.contract.errors import InvalidRequest, InvalidTensor, StateLost
from psd.contract.jobspec import JobSpec
from psd.contract.layout import Block
from psd.contract.rows import TableRows
from psd.contract.rules import weight_of
from psd.state.aggregation.block import BlockState
from psd.state.aggregation.rounds import Contribution, Outcome
from psd.state.aggregation.trained import Trained
from psd.state.core import ShardCore
from psd.state.cuts.cuts import Cuts
from psd.state.desks.cut_schedule import CutSchedule
from psd.state.desks.transfers import Found, Pull, Push, PushRiders, check_begun_as, check_session, riders_of
from psd.state.job import Job
from psd.state.tables.block import TablesBlock
from psd.state.tickets import Ticket, WaitKind
from psd.state.workers.learners import check_note
from psd.v1 import control_pb2, data_pb2
from psd_core.arena import StoreClosed
from psd_core.codecs import Encoded, InvalidEncoding


class Exchange:
    """Handles gradients and parameters."""

    def __init__(self, core: ShardCore, cuts: Cuts, schedule: CutSchedule) -> None:
        self._core = core
        self._riders_of = partial(riders_of, core, cuts, schedule)
        self._riders: PushRiders | None = None  # of the job that was pushed to last

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
            if header.since > header.clock + 1:
                raise InvalidRequest(f"since: {header.since} is beyond clock {header.clock}")
            has_rounds = job.policy.has_rounds
            assert self._core.membership is not None
            ranks = self._core.membership.ranks
            ranks.revoke_one(worker.rank)
            push = Push(
                job,
                self._riders if self._riders is not None and self._riders.job() is job else self._ride(job),
                header,
                worker,
                header.caller.session,
                check_begun_as(header.session, header.caller),
                header.clock,
                header.weight,
                scalars,
                scale=check_scale(header, job.spec) if header.HasField("scale") else 1.0,
                since=header.since,
                is_finite=header.is_finite,
                versions={} if has_rounds else job.versions_read(header.versions),
                held=job.held(header.held) if header.held else {},
            )
            push.half = ranks.half(worker.rank, push.begun_as, push.clock)
            if header.HasField("learner"):
                check_note(header.learner)
            for check in push.riders.check:
                check(push)
            # Without rounds a clock decides nothing but who waits for this worker, itself at the gate included. With rounds it
            # waits for the first valid block, see _enter.
            skipped = not has_rounds and self._core.members.on_clock(worker, header.clock)
        if skipped:
            self._core.settle()
        for begin in push.riders.begin:
            begin(push)
        return push

    def _ride(self, job: Job) -> PushRiders:
        """The riders of a job that there was none of before."""
        self._riders = self._riders_of(job)
        return self._riders

    def _enter(self, push: Push) -> None:
        """Note that the push has brought a valid block: from here on it takes part."""
        for keep in push.riders.keep:
            keep(push)
        with self._core.lock:
            check_session(self._core, push)
            for enter in push.riders.enter:
                enter(push)
            self._core.on_used()
            push.worker.has_pushed = True
            skipped = self._core.members.on_clock(push.worker, push.clock)
        for entered in push.riders.entered:
            entered(push)
        push.is_entered = True
        if skipped:
            self._core.settle()

    def gate(self, call: Push | Pull, clock: int) -> Ticket | None:
        """A ticket if a worker at `clock` must wait for slower ones before it may push or pull."""
        needed = call.job.policy.lag(clock)
        if needed == 0:
            return None
        with self._core.lock:
            if call.job.steps is not None:
                call.job.steps.has_gates = True  # steps that come after this open them
            min_clock = self._core.members.min_clock()
            if min_clock is None or needed <= min_clock:
                return None
            if isinstance(call, Push) and any(is_awaited(call) for is_awaited in call.riders.is_awaited):
                return None
            ticket = self._core.ticket(
                call.worker, call.session, WaitKind.STALENESS, clock, lambda: self._core.members.slower_than(needed)
            )
            self._core.add_gate(ticket)
            return ticket

    def hold(self, push: Push) -> Ticket | None:
        """A ticket if a push has to wait for what rides on it; to be asked until there is none, before its first block."""
        for hold in push.riders.hold:
            if (ticket := hold(push)) is not None:
                return ticket
        return None

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
        already: bool = False,
    ) -> Ticket | None:
        """Count one block of a push. Returns a ticket if its round is not open yet: call again when it resolves.

        Args:
            is_lent: True if the payload does not change before the push's loan has ended.
            rows, memory, more, already: as in PushedBlock.
        """
        job = push.job
        block = job.trained(index)
        if isinstance(block, BlockState) and (rows or more):
            raise InvalidRequest(f"rows: block {index} is not the tables' block")
        values: Any = None
        mask = None
        scalars: Sequence[Any] = push.scalars
        if already:
            if payload.nbytes or present or rows or not isinstance(block, BlockState):
                raise InvalidRequest(f"already: the frame of block {index} has more than that, or is that of the tables' block")
            scalars = push.scalars[block.plan.group]
        elif isinstance(block, BlockState):
            values, mask = self._gradient(push, block, present, payload)
            scalars = push.scalars[block.plan.group]
        elif more:
            if present:
                raise InvalidRequest("present: stands on a frame of rows that others follow")
            block.checks.stage(push.staged, rows, payload, memory)
            return None
        else:
            values = block.checks.gradients(push.staged, rows, payload, present, memory)
            if job.spec.nan_policy != "allow" and not push.is_finite:
                block.checks.check_finite(values, push.worker.rank, push.clock)
        if not push.is_entered:
            self._enter(push)
        else:
            check_session(self._core, push)
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
            norms=push.norms,
            already=already,
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
            if push.half and outcome is Outcome.DUPLICATE and push.half >> job.place_of(index) & 1:
                outcome = Outcome.COUNTED  # by a step that this push is made in place of
            push.outcomes[outcome] += 1
            if outcome is Outcome.LATE:
                push.late.append(index)
            if outcome in (Outcome.COUNTED, Outcome.STAGED) and push.outcomes[outcome] == 1:
                with self._core.lock:
                    for count in push.riders.count:
                        count(push)
        return None

    def counted(self, request: control_pb2.CountedRequest) -> list[int]:
        """Indices of the blocks, without the tables', that have the push of this name."""
        with self._core.lock:
            worker = self._core.check_caller(request.caller)
            job = self._core.initialized()
            job.check_digest(request.layout_digest)
            session = check_begun_as(request.session, request.caller)
        return [
            index for index, block in job.blocks.items() if block.is_trained and block.has(worker.rank, session, request.clock)
        ]

    def _gradient(
        self, push: Push, block: BlockState, present: bytes, payload: memoryview
    ) -> tuple[NDArray[Any] | Encoded | None, NDArray[np.uint8] | None]:
        """A block's gradient (None if it is empty), and the mask of the segments that have one (None if all have)."""
        plan = block.plan
        mask = frames.present_mask(present, len(plan.segment_ends)) if present else None
        if plan.publisher >= 0:
            check_published(push, plan, mask)
        if mask is not None and not mask.any():
            if payload.nbytes:
                raise InvalidTensor(
                    f"block {plan.index}: payload has {payload.nbytes} bytes, but present says that there is nothing"
                )
            return None, mask
        if plan.codec:
            return encoded(plan, payload, mask), mask
        values = frames.numbers(payload, plan.gradient_dtype, plan.length, f"block {plan.index}")
        if push.job.spec.nan_policy != "allow" and not push.is_finite and plan.dtype.kind == "f":
            whose = f"the gradient of worker {push.worker.rank}"
            self._core.check_finite(values, plan.index, whose, push.worker.rank, push.clock)
        if mask is not None and np.any(psd_core.widened(values)[plan.elements_without(mask)]):
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
        reply = data_pb2.PushReply(
            clock=push.clock + 1,
            blocks_counted=counted,
            blocks_duplicate=outcomes[Outcome.DUPLICATE],
            blocks_late=late,
            late=push.late,
            blocks_staged=staged,
        )
        with self._core.lock:
            check_session(self._core, push)
            members.on_step(push.worker, push.clock + 1)
            if staged:
                job.participant.on_staged(push.clock, push.worker.rank)
                self._core.count_staged()
            elif counted or job.trained_count == 0:
                self._core.counters.pushes_accepted += 1
            elif late:
                self._core.counters.pushes_late += 1
            else:
                self._core.counters.pushes_duplicate += 1
            if staged or counted or late or job.trained_count == 0:
                push.worker.samples += push.weight
            if push.half:
                members.ranks.forget_half(push.worker.rank)
            self._core.open_gates(push.worker)
            for answer in push.riders.answer:
                answer(push, reply)
        for end in push.riders.end:
            end(push, reply)
        if late:
            reply.clock = max(reply.clock, job.version_max)
        return reply

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
            for block in blocks if request.slot else ():
                if request.slot > (count := block.slot_count if isinstance(block, BlockState) and block.is_trained else 0):
                    raise InvalidRequest(f"slot: {request.slot} is asked for, and block {block.index} has {count} slots")
            held = job.held(request.held) if request.held else {}
            decisions = job.participant.check(request.decisions)
            verdict = job.participant.verdict_of(request)
            if verdict is not None and not verdict.is_final:
                raise InvalidRequest(
                    "verdict.is_final: updates are still to be measured; a round is applied by a final verdict"
                )
            self._core.check_clock(worker, request.clock)
            self._core.members.ranks.revoke_one(worker.rank)
            skipped = self._core.members.on_clock(worker, request.clock)
            self._core.on_used()
            self._core.counters.pulls += 1
            self._core.count_staged(decisions)
        job.participant.follow(decisions, verdict)
        if skipped:
            self._core.settle()
        return Pull(job, worker, request.caller.session, request.clock, held), blocks

    def begin_answer(self, push: Push) -> Pull:
        """The pull that answers a push: at the next clock, of the blocks that the push has covered.

        Raises:
            InvalidRequest: aggregation is exact: a round then closes by a decision, which comes after the push.
        """
        if push.job.is_exact:
            raise InvalidRequest("PushPull: not with exact aggregation; use Push, Commit and Pull")
        with self._core.lock:
            self._core.counters.pulls += 1
        return Pull(push.job, push.worker, push.session, push.clock + 1, push.held)

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
        check_session(self._core, pull)
        version_min = pull.clock if pull.has_rounds and block.is_trained else 0
        try:
            found = block.read(version_min)
        except StoreClosed:
            raise self._core.gone_back() from None
        if found is not None and found[0] < version_min and pull.worker.floor < version_min:
            if isinstance(block, BlockState) and found[1] is not None:
                block.unpin(found[1])
            raise StateLost(
                f"version {version_min} is lost: a worker that had put its part of it has died, and so had this shard before "
                "it knew that the part counts",
                version=version_min,
            )
        return found if found is not None else self._core.when(block, version_min, pull.worker, pull.session, WaitKind.ROUND)

    def peek(self, block: Trained, pull: Pull) -> Found | None:
        """Look up as `read` does, but return None instead of a ticket; for answers that leave early while more of a push
        arrives."""
        policy = pull.job.policy
        if not policy.has_rounds and policy.lag(pull.clock) != 0:
            return None
        try:
            return block.read(pull.clock if policy.has_rounds else 0)
        except StoreClosed:
            raise self._core.gone_back() from None


def encoded(plan: Block, payload: memoryview, mask: NDArray[np.uint8] | None) -> NDArray[Any] | Encoded:
    """A block's gradient in its codec, looked at; as numbers if it is not all present.

    Raises:
        InvalidTensor: it is malformed; the message names the field.
    """
    try:
        gradient = Encoded(plan.codec, payload, plan.length)
    except InvalidEncoding as error:
        raise InvalidTensor(f"block {plan.index}: payload in {plan.codec}: {error}") from None
    if mask is None:
        return gradient
    values: NDArray[Any] = np.empty(plan.length, plan.dtype)
    gradient.decode(values)
    values[plan.elements_without(mask)] = 0
    return values


def check_published(push: Push, plan: Block, mask: NDArray[np.uint8] | None) -> None:
    """Raise InvalidRequest unless a worker sends all values of the blocks that it publishes, and none of others' blocks."""
    is_own = plan.publisher == push.worker.rank
    if mask is not None if is_own else mask is None or mask.any():
        what = "some of its values are missing" if is_own else f"worker {push.worker.rank} sends values"
        raise InvalidRequest(f"present: block {plan.index} is published by worker {plan.publisher}, whole, and {what}")


def tables_of(job: Job) -> TablesBlock:
    """The job's tables; InvalidRequest if it has none."""
    if job.tables is None:
        raise InvalidRequest("rows: the job has no tables")
    return job.tables


def check_scale(header: data_pb2.PushHeader, spec: JobSpec) -> float:
    """The factor by which a push is multiplied; InvalidRequest if the worker may not choose it, or it is out of range."""
    if not spec.clip_norm or spec.consistency.has_rounds:
        raise InvalidRequest("scale: only in a job without rounds that has clip_norm; in rounds, a verdict has it")
    if not 0 <= header.scale <= 1:  # also refuses NaN
        raise InvalidRequest(f"scale: must be from 0 to 1, got {header.scale}")
    return header.scale
