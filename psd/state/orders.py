"""Orders of an operator to a running job: another scale for its learning rate, or to end. On shard 0.

Workers hear of it by the replies to their pushes. An order begins at a clock that nobody can have reached before hearing of it:
a worker pushes for a round only after the one before it has closed on shard 0, and so after a reply to an earlier push. Kept
beside the arena before anybody hears of it. Must not know workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from psd.contract.errors import InvalidRequest
from psd.state import locks
from psd.v1 import job_pb2

SCALE_MAX = 1e6
ORDERS_MAX = 8
"""Scales that are kept; of those that lie further back only the last one matters."""


@locks.guarded_by(locks.Level.SHARD)
class JobOrdersDesk:
    """The orders of one job.

    Args:
        save: keeps them, or raises.
    """

    def __init__(self, save: Callable[[bytes], None]) -> None:
        self._save = save
        self._orders = job_pb2.JobOrders()

    def restore(self, stored: bytes) -> None:
        """Go on with what an earlier process of this shard has kept."""
        self._orders.ParseFromString(stored)

    def current(self) -> job_pb2.JobOrders | None:
        """The orders, for replies, which copy them; None if there are none."""
        return self._orders if self._orders.ByteSize() else None

    def scale_learning_rate(self, scale: float, clock: int, progress: int) -> job_pb2.LearningRateScale:
        """Scale the learning rate from a clock on; the order that holds, which is an earlier one if that says the same.

        Raises:
            InvalidRequest: no learning rate is scaled so. OutOfSpace: it cannot be kept; nothing has changed.
        """
        if not (math.isfinite(scale) and 0 < scale <= SCALE_MAX):
            raise InvalidRequest(f"scale: expected more than 0 and at most {SCALE_MAX:g}, got {scale}")
        rates = list(self._orders.learning_rates)
        if rates and rates[-1].scale == scale:
            return rates[-1]
        while len(rates) > 1 and (rates[1].clock <= progress or len(rates) >= ORDERS_MAX):
            rates.pop(0)
        begin = max(clock, rates[-1].clock) if rates else clock
        found = job_pb2.LearningRateScale(clock=begin, scale=scale)
        self._change(job_pb2.JobOrders(learning_rates=[*rates, found], ends_at=self._orders.ends_at))
        return found

    def end(self, clock: int) -> int:
        """End the job before the pushes of a clock; the clock, which is an earlier order's if there was one."""
        if not self._orders.ends_at:
            self._change(job_pb2.JobOrders(learning_rates=self._orders.learning_rates, ends_at=max(1, clock)))
        return self._orders.ends_at

    def on_ended(self) -> None:
        """Forget the order to end: everybody has left."""
        if self._orders.ends_at:
            self._change(job_pb2.JobOrders(learning_rates=self._orders.learning_rates))

    def _change(self, orders: job_pb2.JobOrders) -> None:
        self._save(orders.SerializeToString())
        self._orders = orders
