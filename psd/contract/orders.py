"""Orders to a job, of an operator or a worker (`JobOrders` in proto/psd/v1/job.proto): their effects, and their sentences.

Without rounds an operator's order begins with each worker's next push: its clock is lower than that of any push.
"""

from __future__ import annotations

from collections.abc import Iterable

from psd.v1.job_pb2 import JobOrders, LearningRateScale

NEXT_PUSH = 1
"""Clocks up to this one mean each worker's next push; no order to a job with rounds has one, and no worker's."""


def scale_at(rates: Iterable[LearningRateScale], clock: int) -> float:
    """The scale for the learning rate of a push at this clock: that of the last order that has begun; 1 if none has."""
    scale = 1.0
    for rate in rates:
        scale = rate.scale if rate.clock <= clock else scale
    return scale


def scale_text(rate: LearningRateScale) -> str:
    """An order to scale the learning rate, as a sentence."""
    begin = "each worker's next push" if rate.clock <= NEXT_PUSH else f"step {rate.clock}"
    return f"the learning rate is scaled by {rate.scale:g} from {begin} on"


def end_text(ends_at: int) -> str:
    """An order to end, as a sentence."""
    return "each worker ends before its next push" if ends_at <= NEXT_PUSH else f"the job ends at step {ends_at}"


def reason_text(asked_by: int | None) -> str:
    """The reason why the job ends, as a clause. asked_by: the worker that wants it; None: an operator does."""
    return "as an operator has ordered (psdctl drain)" if asked_by is None else f"as worker {asked_by} has asked (stop)"


def orders_text(rates: Iterable[LearningRateScale], ends_at: int, clock: int) -> list[str]:
    """The orders in force at a clock, and those that begin later, as sentences."""
    rates = [*rates]
    scale = scale_at(rates, clock)
    found = [f"the learning rate is scaled by {scale:g}"] if scale != 1 else []
    found += [scale_text(rate) for rate in rates if rate.clock > clock]
    return [*found, end_text(ends_at)] if ends_at else found


def asker_of(orders: JobOrders) -> int | None:
    """Rank of the worker that has asked for the end; None: an operator has ordered it."""
    return orders.asked_by if orders.HasField("asked_by") else None
