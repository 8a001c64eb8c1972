"""Parameters and slots that workers load in the midst of a job: one worker sets them on all shards, and the others wait at
shard 0.

Each block changes in one step, like an update, but keeps its version and its dedup window. workers/loading.py chooses the
worker that sets them.
"""

from __future__ import annotations

import contextlib
from typing import Any

from numpy.typing import NDArray

from psd.contract import frames
from psd.contract.errors import InvalidRequest
from psd.state.core import ShardCore
from psd.state.job import Job
from psd.state.pages import Change, SetMark
from psd.state.tickets import Ticket, WaitKind
from psd.state.workers.loading import DIGEST_BYTES, stamp_of
from psd.v1 import control_pb2, data_pb2
from psd_core.arena import StoreClosed

STEPS_MAX = 1 << 53
"""Most steps that a load may state for a segment: a rule computes with them as float64, and goes on counting."""


class ParameterDesk:
    """Handles Load and SetParameters."""

    def __init__(self, core: ShardCore) -> None:
        self._core = core

    def load(self, request: control_pb2.LoadRequest) -> Ticket | None:
        """Register a worker that loads. The ticket resolves with True if it must set the values; None: they are set already.

        See ControlService.Load.
        """
        core = self._core
        core.check_is_first("loads are coordinated by")
        with core.lock:
            worker = core.check_caller(request.caller)
            job = core.initialized()
            core.check_clock(worker, request.clock)
            _check_seq(request.seq)
            if len(request.digest) != DIGEST_BYTES:
                raise InvalidRequest(f"digest: has {len(request.digest)} bytes, expected {DIGEST_BYTES}")
            # At one clock both parameters and slots may be loaded; a worker that was restarted since repeats both calls.
            word, stamp = "loaded_slots" if request.resets_slots else "loaded", stamp_of(request.digest, request.clock)
            moment = core.timeline, job.layout.digest, request.clock
            if request.is_set:
                job.arena.set_word(word, stamp)
                core.loads.on_set(worker.rank, word, moment, stamp)
                return None
            was_set = core.loads.was_set(worker.rank, worker.session, request.seq, word, moment, stamp)
            if job.policy.has_rounds and (was_set or job.arena.word(word) == stamp):
                return None
            if request.resets_slots and job.tables is not None:
                job.tables.check_reset()
            ticket = core.ticket(worker, worker.session, WaitKind.BARRIER, worker.clock, core.loads.missing, "load_parameters")
            try:
                core.loads.on_arrive(ticket, request.seq, request.digest)
            except InvalidRequest as error:
                ticket.fail(error)
            return ticket

    def set(self, request: data_pb2.ParametersRequest) -> int:
        """Set blocks; return their size in bytes. See DataService.SetParameters."""
        core = self._core
        with core.lock:
            worker = core.check_caller(request.caller)
            job = core.initialized()
            job.check_digest(request.layout_digest)
            core.check_clock(worker, request.clock)
            _check_seq(request.seq)
            limit = sum(1 + block.slot_count for block in job.blocks.values())
            if len(request.parameters) > limit:
                raise InvalidRequest(
                    f"parameters: has {len(request.parameters)} entries, the limit is {limit}, the shard's blocks and slots"
                )
            if request.resets_slots and job.tables is not None:
                job.tables.check_reset()
            core.on_used()
            core.revoke()
        mark, clock = SetMark(request.caller.session, request.seq), request.clock
        changes: dict[int, Change] = {}
        if request.resets_slots:
            changes = {index: Change(resets=True) for index, block in job.blocks.items() if block.is_trained}
        nbytes = 0
        for entry in request.parameters:
            values = self._checked(job, entry, worker.rank, clock)
            changes[entry.block] = changes.get(entry.block, Change()).and_also(entry.slot, values, entry.steps)
            nbytes += values.nbytes
        try:
            with contextlib.ExitStack() as setting:  # if there is no room for all blocks, none changes
                for index in sorted(changes):
                    setting.enter_context(job.blocks[index].setting(changes[index], mark, clock))
            if request.resets_slots and job.tables is not None:
                job.tables.reset_slots(mark, clock)
        except StoreClosed:
            raise core.gone_back() from None
        return nbytes

    def _checked(self, job: Job, entry: data_pb2.ParameterBlock, rank: int, clock: int) -> NDArray[Any]:
        """The values of an entry, after all checks."""
        block = job.block(entry.block)
        if entry.block in job.buffer_blocks:
            raise InvalidRequest(f"parameters.block: {entry.block} is one of buffers; StoreBuffers stores those")
        if entry.slot > (block.slot_count if block.is_trained else 0):
            raise InvalidRequest(f"parameters.slot: {entry.slot}, and block {entry.block} has {block.slot_count} slots")
        if len(entry.steps) != (len(block.plan.segment_ends) if entry.slot else 0):
            raise InvalidRequest(
                f"parameters.steps: has {len(entry.steps)} entries; one for each segment of the block, with a slot"
            )
        if max(entry.steps, default=0) > STEPS_MAX:
            raise InvalidRequest(f"parameters.steps: {max(entry.steps)} is above the limit, {STEPS_MAX}")
        values = frames.numbers(memoryview(entry.payload), block.plan.dtype, block.plan.length, f"block {entry.block}")
        self._core.check_finite(values, entry.block, f"a parameter set by worker {rank}", rank, clock)
        return values


def _check_seq(seq: int) -> None:
    if seq < 1:
        raise InvalidRequest(f"seq: must be at least 1, got {seq}")
