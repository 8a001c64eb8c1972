"""What follows from the orders of an operator to a job, which `JobOrders` in proto/psd/v1/job.proto holds."""

from __future__ import annotations

from collections.abc import Iterable

from psd.v1.job_pb2 import LearningRateScale


def scale_at(rates: Iterable[LearningRateScale], clock: int) -> float:
    """The scale of the learning rate of a push at that clock: the last one that has begun; 1 if none has."""
    scale = 1.0
    for rate in rates:
        scale = rate.scale if rate.clock <= clock else scale
    return scale
