"""Orders to a running job: to scale its learning rate, which an operator gives, or to end, which a worker may ask for, too. On
shard 0.

Workers hear of an order in the replies to their pushes. An order begins at a clock that nobody can reach before hearing of it:
a worker pushes for a round only after the one before it has closed on shard 0, and so after a reply to an earlier push. Orders
are stored beside the arena before anybody hears of them. Checkpoints have the scales, too: a job that goes on from one has the
scale that it had there. Each scale holds from its clock on, so that a job that goes back has the same scales at the same steps
again, and ends at the same step. Must not know workers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from psd.contract.errors import InvalidRequest
from psd.contract.orders import NEXT_PUSH, asker_of, end_text, reason_text
from psd.state import locks
from psd.v1 import job_pb2

logger = logging.getLogger(__name__)

HEARD = 2
"""Rounds from the open one to the first that no worker pushes for before it hears of an order given now: the reply to its push
for the round between brings it, at the latest. Without rounds likewise, from the foremost worker's next step: a worker that has
come back may have made one more than shard 0 knows."""

SCALE_MAX = 1e6
ORDERS_MAX = 8
"""Number of scales that are kept, the latest ones. A job that goes back needs earlier ones, too."""


@locks.guarded_by(locks.Level.SHARD, but=("learning_rates_from",))
class JobOrdersDesk:
    """The orders of one job.

    Args:
        save: keeps them, or raises.

    Attributes:
        current: the orders, for replies, which copy them; None if there are none.
        fulfilled: the last order to end that all workers have followed; None before.
    """

    def __init__(self, save: Callable[[bytes], None]) -> None:
        self._save = save
        self._orders = job_pb2.JobOrders()
        self.current: job_pb2.JobOrders | None = None
        self.fulfilled: job_pb2.JobOrders | None = None

    def restore(self, stored: bytes) -> None:
        """Take over the orders that an earlier process of this shard has stored."""
        self._take(job_pb2.JobOrders.FromString(stored))

    def learning_rates_from(self, clock: int) -> list[job_pb2.LearningRateScale]:
        """The scales for pushes at that clock and later, for a checkpoint. Needs no lock: orders are replaced as a whole."""
        rates = [*self._orders.learning_rates]
        begun = sum(rate.clock <= clock for rate in rates)
        return rates[max(0, begun - 1) :]

    def on_restore(self, stored: Sequence[job_pb2.LearningRateScale]) -> None:
        """Take over the scales of a checkpoint that come before this shard's own first scale: its own ones are newer.

        Raises:
            OutOfSpace: the scales cannot be stored; nothing has changed.
        """
        own = [*self._orders.learning_rates]
        earlier = [rate for rate in stored if not own or rate.clock < own[0].clock]
        if earlier:
            self._set_rates([*earlier, *own])

    def scale_learning_rate(self, scale: float, clock: int) -> job_pb2.LearningRateScale:
        """Scale the learning rate from a clock on, and return the order that holds: an earlier one if it has the same scale.

        Orders that begin later are dropped: they were given before the job went back to a checkpoint.

        Raises:
            InvalidRequest: the scale is out of range. OutOfSpace: the order cannot be stored; nothing has changed.
        """
        if not (math.isfinite(scale) and 0 < scale <= SCALE_MAX):
            raise InvalidRequest(f"scale: expected more than 0 and at most {SCALE_MAX:g}, got {scale}")
        rates = self._orders.learning_rates
        if rates and rates[-1].scale == scale and rates[-1].clock <= clock:
            return rates[-1]
        earlier = [rate for rate in rates if rate.clock < clock]
        found = job_pb2.LearningRateScale(clock=clock, scale=scale)
        self._set_rates([*earlier, found][-ORDERS_MAX:])
        return found

    def end(self, clock: int, asked_by: int | None = None) -> bool:
        """End the job before the pushes of a clock; False if nothing has changed, because it is to end already.

        Args:
            asked_by: rank of the worker that wants it; None: an operator does, whose order also puts an end forward.

        Raises:
            OutOfSpace: the order cannot be stored; nothing has changed.
        """
        clock = max(NEXT_PUSH, clock)
        known = self._orders.ends_at
        if known and (asked_by is not None or known <= clock):
            return False
        self._change(job_pb2.JobOrders(learning_rates=self._orders.learning_rates, ends_at=clock, asked_by=asked_by))
        return True

    def on_ended(self) -> None:
        """Forget the order to end: everybody has left."""
        if self._orders.ends_at:
            followed = self._orders
            self._change(job_pb2.JobOrders(learning_rates=followed.learning_rates))
            self.fulfilled = followed

    def _set_rates(self, rates: Sequence[job_pb2.LearningRateScale]) -> None:
        orders = job_pb2.JobOrders()
        orders.CopyFrom(self._orders)
        del orders.learning_rates[:]
        orders.learning_rates.extend(rates)
        self._change(orders)

    def _change(self, orders: job_pb2.JobOrders) -> None:
        self._save(orders.SerializeToString())
        self._take(orders)

    def _take(self, orders: job_pb2.JobOrders) -> None:
        self._orders = orders
        self.current = orders if orders.ByteSize() else None


def told_end(orders: job_pb2.JobOrders | None, level: int) -> job_pb2.JobOrders:
    """Log when the job is to end; return the orders."""
    assert orders is not None
    logger.log(level, "%s, %s", end_text(orders.ends_at), reason_text(asker_of(orders)))
    return orders
