"""Buffers: values that workers compute beside the parameters, such as BatchNorm's running statistics, and store at cuts.

Either the live worker of the lowest rank stores its own, or all workers store theirs and the shards hold the mean. They do so
seldom, by a separate call before the push that reaches a cut. If nobody pushes to a shard, this call tells it of cuts.
"""

from __future__ import annotations

from psd.contract import frames
from psd.contract.config import CUTS_MAX
from psd.contract.errors import InvalidRequest
from psd.state.core import ShardCore
from psd.state.cuts.cuts import Cuts
from psd.state.cuts.snapshots import check_cuts
from psd.state.workers.membership import WorkerState
from psd.v1 import data_pb2
from psd_core.arena import StoreClosed


class BufferDesk:
    """Handles StoreBuffers."""

    def __init__(self, core: ShardCore, cuts: Cuts) -> None:
        self._core = core
        self._cuts = cuts
        self._brought: dict[str, set[int]] = {}  # by cut, the ranks that have stored their buffers for it

    def store(self, request: data_pb2.BuffersRequest) -> int:
        """Store a worker's buffers; return their size in bytes. See DataService.StoreBuffers."""
        core = self._core
        with core.lock:
            worker = core.check_caller(request.caller)
            job = core.initialized()
            job.check_digest(request.layout_digest)
            check_cuts(request.cuts)
            if len(request.buffers) > len(job.buffer_blocks):
                limit = len(job.buffer_blocks)
                raise InvalidRequest(
                    f"buffers: has {len(request.buffers)} entries, the limit is {limit}, the shard's blocks of buffers"
                )
            core.check_clock(worker, request.clock)
            core.on_used()
            skipped = job.trained_count == 0 and core.members.on_clock(worker, request.clock)
            live = {w.rank for w in core.members.workers if w.state is WorkerState.LIVE}
            there = live | {w.rank for w in core.members.workers if w.state is WorkerState.FINISHED}
        if skipped:
            core.settle()
        checked = []
        for entry in request.buffers:
            plan = job.block(entry.block).plan
            if entry.block not in job.buffer_blocks:
                raise InvalidRequest(f"buffers.block: {entry.block} belongs to group {plan.group}, which is not one of buffers")
            values = frames.numbers(memoryview(entry.payload), plan.dtype, plan.length, f"block {entry.block}")
            checked.append((job.buffer_blocks[entry.block], values))
        try:
            for block, values in checked:
                block.store(worker.rank, values, there)
        except StoreClosed:
            raise core.gone_back() from None
        self._cuts.learn(job, request.cuts, worker, request.caller.session)
        for cut in request.cuts:
            self._brought.setdefault(cut.id, set()).add(worker.rank)
        self._cuts.take_buffers({cut.id for cut in request.cuts if not job.wants_all_buffers or live <= self._brought[cut.id]})
        for old in list(self._brought)[:-CUTS_MAX]:
            self._brought.pop(old, None)
        return sum(values.nbytes for _, values in checked)
