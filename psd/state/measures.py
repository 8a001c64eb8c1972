"""The desk where a shard tells what its part of a decided round amounts to, for the verdict on it (psd/state/verdicts.py).

Must not know how rules compute.
"""

from __future__ import annotations

from psd.contract.errors import InvalidRequest
from psd.contract.verdicts import Squares, Verdict, measure_message, measures_gradients
from psd.state.block import BlockState, Unmeasured
from psd.state.core import ShardCore
from psd.state.decisions import check_decisions
from psd.state.job import Job
from psd.state.membership import Worker
from psd.state.tickets import Ticket, WaitKind
from psd.v1 import control_pb2


class Measures:
    """Answers ControlService.Measure."""

    def __init__(self, core: ShardCore) -> None:
        self._core = core

    def measure(self, request: control_pb2.MeasureRequest) -> control_pb2.MeasureReply | Ticket:
        """Measure a round; a ticket if gradients are still to come: ask again when it resolves."""
        with self._core.lock:
            worker = self._core.check_caller(request.caller)
            job = self._core.initialized()
            if not job.spec.has_verdicts:
                raise InvalidRequest("round: only a job with rounds that has clip_norm or a layer-wise rule is measured")
            decisions = check_decisions(request.decisions, job.spec.world_size)
            under = Verdict.from_message(request.verdict, job.spec) if request.HasField("verdict") else None
            self._core.check_clock(worker, request.clock)
            skipped = self._core.members.on_clock(worker, request.clock)
        job.decide(decisions)
        if skipped:
            self._core.settle()
        if measures_gradients(job.spec, under):
            return self._measured(job, worker, request, None)
        return self._measured(job, worker, request, under or Verdict(request.round))

    def _measured(
        self, job: Job, worker: Worker, request: control_pb2.MeasureRequest, under: Verdict | None
    ) -> control_pb2.MeasureReply | Ticket:
        totals: Squares = [0] * (1 if under is None else 2 * len(job.spec.layerwise_tensors))
        blocks = [b for b in job.blocks.values() if b.plan.trained and (under is None or b.ratio_places is not None)]
        # Workers that measure at the same time begin at different blocks, and so share the work.
        start = worker.rank * len(blocks) // job.spec.world_size
        for block in blocks[start:] + blocks[:start]:
            found = block.measure(request.round, under)
            if found is Unmeasured.CLOSED:
                return control_pb2.MeasureReply(is_closed=True)
            if found is Unmeasured.OPEN:
                return self._when_measurable(block, worker, request)
            if found is None or totals is None:
                totals = None
            elif under is None or block.ratio_places is None:
                totals[0] += found[0]
            else:
                for segment, place in enumerate(block.ratio_places.tolist()):
                    totals[2 * place] += found[2 * segment]
                    totals[2 * place + 1] += found[2 * segment + 1]
        return control_pb2.MeasureReply(measure=measure_message(totals))

    def _when_measurable(self, block: BlockState, worker: Worker, request: control_pb2.MeasureRequest) -> Ticket:
        round_ = request.round
        missing = lambda: block.missing_in(round_)  # noqa: E731
        ticket = self._core.ticket(worker, request.caller.session, WaitKind.ROUND, round_, missing)
        block.when_measurable(round_, ticket)
        return ticket
