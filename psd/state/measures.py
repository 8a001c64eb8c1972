"""The desk where a shard tells what its part of a decided round amounts to, for the verdict on it (psd/state/verdicts.py).

Must not know how rules compute.
"""

from __future__ import annotations

from psd.contract.errors import InvalidRequest
from psd.contract.verdicts import Squares, Verdict, measure_message, measures_gradients
from psd.state.consistency import ranks_in
from psd.state.core import ShardCore
from psd.state.decisions import check_decisions
from psd.state.job import Job
from psd.state.rounds import Unmeasured
from psd.v1 import control_pb2


class Measures:
    """Answers ControlService.Measure."""

    def __init__(self, core: ShardCore) -> None:
        self._core = core

    def measure(self, request: control_pb2.MeasureRequest) -> control_pb2.MeasureReply:
        """Measure a round; see ControlService.Measure."""
        with self._core.lock:
            worker = self._core.check_caller(request.caller)
            job = self._core.initialized()
            if not job.spec.has_verdicts:
                raise InvalidRequest("round: only a job with rounds that has clip_norm or a layer-wise rule is measured")
            decisions = check_decisions(request.decisions, job.spec)
            under = Verdict.from_message(request.verdict, job.spec) if request.HasField("verdict") else None
            self._core.check_clock(worker, request.clock)
            skipped = self._core.members.on_clock(worker, request.clock)
        job.decide(decisions)
        if skipped:
            self._core.settle()
        if not measures_gradients(job.spec, under):
            under = under or Verdict(request.round)
        return self._measured(job, request.round, under, worker.rank)

    @staticmethod
    def _measured(job: Job, round_: int, under: Verdict | None, rank: int) -> control_pb2.MeasureReply:
        totals: Squares = [0] * (1 if under is None else 2 * len(job.spec.layerwise_tensors))
        blocks = [b for b in job.blocks.values() if b.plan.trained and (under is None or b.ratio_places is not None)]
        # Workers that measure at the same time begin at different blocks, and so share the work.
        start = rank * len(blocks) // job.spec.world_size
        for block in blocks[start:] + blocks[:start]:
            found = block.measure(round_, under)
            if found is Unmeasured.CLOSED:
                return control_pb2.MeasureReply(is_closed=True)
            if found is Unmeasured.OPEN:
                return control_pb2.MeasureReply(is_open=True, missing=ranks_in(block.missing_in(round_)))
            if found is None or totals is None:
                totals = None
            elif under is None or block.ratio_places is None:
                totals[0] += found[0]
            else:
                for segment, place in enumerate(block.ratio_places.tolist()):
                    totals[2 * place] += found[2 * segment]
                    totals[2 * place + 1] += found[2 * segment + 1]
        return control_pb2.MeasureReply(measure=measure_message(totals))
