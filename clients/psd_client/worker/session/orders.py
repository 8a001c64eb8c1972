"""Orders to the job that this worker follows: a scale for the learning rate, given by psdctl, and the end, for which a worker
may have asked.

Shard 0's replies bring them. Must not know how they travel.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from psd.contract.jobspec import GroupSpec
from psd.contract.orders import asker_of, end_text, reason_text, scale_at, scale_text
from psd.v1 import data_pb2, job_pb2

logger = logging.getLogger("psd_client")


class Drained(SystemExit):
    """The job ends before this step, for all workers, because one has called `stop` or an operator has ordered it (psdctl
    drain).

    As a SystemExit it ends the program in order, with status 0, unless the program catches it to finish in its own way.

    Attributes:
        clock: the step. asked_by: rank of the worker that has called `stop`; None: an operator has ordered it.
    """

    def __init__(self, clock: int, asked_by: int | None = None) -> None:
        super().__init__(0)
        self.clock = clock
        self.asked_by = asked_by

    def __str__(self) -> str:
        return f"the job ends at step {self.clock}, {reason_text(self.asked_by)}"


class FollowedOrders:
    """The orders that one worker follows.

    Attributes:
        are_given: True if there are any. heard: those that shard 0 has stated last.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.heard = job_pb2.JobOrders()
        self.are_given = False
        self._rates: list[job_pb2.LearningRateScale] = []
        self._ends_at = 0
        self._asked_by: int | None = None
        self._scaled_from: tuple[float, Sequence[Sequence[float]]] = 0.0, []
        self._scaled: list[data_pb2.GroupScalars] = []

    def hear(self, orders: job_pb2.JobOrders) -> None:
        """Take over all of shard 0's present orders."""
        if orders == self.heard:
            return
        self.heard = orders
        self.are_given = orders.ByteSize() > 0
        for rate in orders.learning_rates:
            if rate not in self._rates:
                logger.info("psd: worker %d: %s, as an operator has ordered", self._rank, scale_text(rate))
        if orders.ends_at not in (0, self._ends_at):
            logger.info("psd: worker %d: %s, %s", self._rank, end_text(orders.ends_at), reason_text(asker_of(orders)))
        self._rates, self._ends_at, self._asked_by = list(orders.learning_rates), orders.ends_at, asker_of(orders)

    def scaled(
        self, scalars: Sequence[Sequence[float]], groups: Sequence[GroupSpec], clock: int
    ) -> list[data_pb2.GroupScalars]:
        """The scalars of a push at that clock, by group, with the learning rate scaled. Do not change the messages."""
        scale = scale_at(self._rates, clock) if self._rates else 1.0
        if (scale, scalars) != self._scaled_from:  # making the messages anew takes ten times as long
            self._scaled_from = scale, [list(values) for values in scalars]
            self._scaled = self._with_scale(scale, scalars, groups)
        return self._scaled

    def of_step(
        self, scalars: Sequence[Sequence[float]], groups: Sequence[GroupSpec], clock: int
    ) -> Sequence[Sequence[float]] | None:
        """The values of `scaled`; None: the job ends before this clock."""
        if self._ends_at and clock >= self._ends_at:
            return None
        return [list(group.values) for group in self.scaled(scalars, groups, clock)]

    @staticmethod
    def _with_scale(
        scale: float, scalars: Sequence[Sequence[float]], groups: Sequence[GroupSpec]
    ) -> list[data_pb2.GroupScalars]:
        if scale == 1.0:
            return [data_pb2.GroupScalars(values=values) for values in scalars]
        return [
            data_pb2.GroupScalars(
                values=[
                    value * scale if name == "lr" else value for name, value in zip(group.info.scalars, values, strict=True)
                ]
                if len(values) == len(group.info.scalars)
                else values  # which the shards refuse
            )
            for values, group in zip(scalars, groups, strict=True)
        ]

    def end(self, clock: int) -> int | None:
        """The step at which the job ends for a worker at this clock, as far as it has heard; None: no order says so."""
        return max(clock, self._ends_at) if self._ends_at else None

    def check_end(self, clock: int, *, is_begun: bool = False) -> None:
        """Raise Drained if the job ends before this clock. is_begun: the push has begun, and was checked then."""
        if not is_begun and self._ends_at and clock >= self._ends_at:
            raise Drained(clock, self._asked_by)
