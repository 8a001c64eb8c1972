"""Parameters that the workers load in the midst of a job: one sets them on all shards, while shard 0 has the others wait.

Each block changes as by an update, in one step, and keeps its version, its slots and its dedup window. Who sets them is decided
in workers/loads.py.
"""

from __future__ import annotations

from psd.contract import frames
from psd.contract.errors import InvalidRequest
from psd.state.aggregation.block import SetMark
from psd.state.core import ShardCore
from psd.state.tickets import Ticket, WaitKind
from psd.state.workers.loads import DIGEST_BYTES, stamp_of
from psd.v1 import control_pb2, data_pb2
from psd_core.arena import ArenaClosed


class ParameterDesk:
    """Handles Load and SetParameters."""

    def __init__(self, core: ShardCore) -> None:
        self._core = core

    def load(self, request: control_pb2.LoadRequest) -> Ticket | None:
        """Enter a worker; the ticket resolves with whether it is to set the values; None: they are set. See Load."""
        core = self._core
        core.check_is_first("loads are coordinated by")
        with core.lock:
            worker = core.check_caller(request.caller)
            job = core.initialized()
            core.check_clock(worker, request.clock)
            _check_seq(request.seq)
            if len(request.digest) != DIGEST_BYTES:
                raise InvalidRequest(f"digest: has {len(request.digest)} bytes, expected {DIGEST_BYTES}")
            stamp = stamp_of(request.digest, request.clock)
            if request.is_set:
                job.arena.set_word("loaded", stamp)
                core.loads.on_set(worker.rank)
                return None
            if job.policy.has_rounds and job.arena.word("loaded") == stamp:
                return None
            ticket = core.ticket(worker, worker.session, WaitKind.BARRIER, worker.clock, core.loads.missing, "load_parameters")
            try:
                core.loads.on_arrive(ticket, request.seq, request.digest)
            except InvalidRequest as error:
                ticket.fail(error)
            return ticket

    def set(self, request: data_pb2.ParametersRequest) -> int:
        """Set blocks; return how many bytes they are. See DataService.SetParameters."""
        core = self._core
        with core.lock:
            worker = core.check_caller(request.caller)
            job = core.initialized()
            job.check_digest(request.layout_digest)
            core.check_clock(worker, request.clock)
            _check_seq(request.seq)
            if len(request.parameters) > len(job.blocks):
                raise InvalidRequest(
                    f"parameters: has {len(request.parameters)} entries, the limit is {len(job.blocks)}, the shard's blocks"
                )
            core.on_used()
        checked = []
        for entry in request.parameters:
            block = job.block(entry.block)
            if entry.block in job.buffer_blocks:
                raise InvalidRequest(f"parameters.block: {entry.block} is one of buffers; StoreBuffers stores those")
            values = frames.numbers(memoryview(entry.payload), block.plan.dtype, block.plan.length, f"block {entry.block}")
            core.check_finite(values, entry.block, f"a parameter set by worker {worker.rank}", worker.rank, request.clock)
            checked.append((block, values))
        mark = SetMark(request.caller.session, request.seq)
        try:
            for block, values in checked:
                block.set_values(values, mark, request.clock)
        except ArenaClosed:
            raise core.gone_back() from None
        return sum(values.nbytes for _, values in checked)


def _check_seq(seq: int) -> None:
    if seq < 1:
        raise InvalidRequest(f"seq: must be at least 1, got {seq}")
