"""The short way of a worker's push_pulls: as armed steps (lanes/steps.py), as long as all shards offer that, and nothing rides
on them but what a step carries.

A step is an ordinary push, under the same name. So it leaves behind what that would: where it succeeds, the same counts, clock
and versions; where not, a push that the long way goes on with. What is not certain to be such a push is left to the long way,
checks and errors included. Must not know how steps travel.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from psd.contract.rules import weight_of
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.steps import SteppingLanes
from psd_client.lanes.transport import Lane
from psd_client.lanes.waiting import ShardHealth
from psd_client.worker.exchange.learner_rider import LearnerRider
from psd_client.worker.exchange.lending import ParameterPlaces
from psd_client.worker.exchange.riders import Attendance, ClientStateRider, FirstGradient, Riders
from psd_client.worker.exchange.sent_push import WorkerGradient
from psd_client.worker.session.membership import JobMembership
from psd_client.worker.session.session import Session


class ArmedSteps:
    """The steps of one worker.

    Args:
        health: hears that shards answer. lanes: of the shards that have trained blocks. totals: as in PushCounts.

    Attributes:
        are_wanted: True if the shards are to be asked for offers.
        are_armed: True if all have made one. offered: the steps.
    """

    def __init__(
        self,
        session: Session,
        health: ShardHealth,
        lanes: Sequence[Lane],
        gradients: FlatBuffers,
        places: ParameterPlaces,
        riders: Riders,
        totals: dict[str, int],
    ) -> None:
        layout = gradients.layout
        spec, blocks = layout.spec, [[block for block in layout.blocks_of(lane.shard) if block.trained] for lane in lanes]
        self.are_wanted = (
            len(lanes) > 0
            and spec.aggregation == "fast"
            and not (spec.tables or spec.clip_norm or spec.directed_tensors or places.is_lending)
            and not riders.of(LearnerRider)
            and not any(block.codec or block.pull_codec for block in layout.blocks)
        )
        self.are_armed = False
        self._session = session
        self._gradients = gradients
        self._totals = totals
        self._shards = [lane.shard for lane in lanes]
        self._health = health
        (self._attendance,), (self._client_state,) = riders.of(Attendance), riders.of(ClientStateRider)
        self._first_gradients = riders.of(FirstGradient)
        self._block_count = sum([len(own) for own in blocks])
        self._trained = [i for i, tensor in enumerate(spec.tensors) if tensor.size and not spec.groups[tensor.group].is_static]
        self._membership: JobMembership | None = None
        self.offered = SteppingLanes(
            lanes,
            blocks,
            gradients,
            places.current,
            looks=spec.nan_policy != "allow",
            sends_versions=not spec.consistency.has_rounds,
        )

    def renew(self) -> None:
        """Take over what the shards have offered in their replies to a push_pull. Only if `are_wanted`."""
        self.are_armed = self.offered.renew() and all(rider.is_over for rider in self._first_gradients)
        if self.are_armed:
            self._membership = self._session.memberships.held

    def push_pull(self, gradient: WorkerGradient) -> bool:
        """Make a push_pull as a step, if they are armed. True: it has succeeded. False: make it the long way, which goes on
        with the step if it is under way: `finish` it at each shard, then `renew`, or `end` it.

        Raises InvalidRequest, as the long way would; or what a signal's handler raises.
        """
        session, (scalars, weight, present, rows, skip, feed, read, part, spare, put) = self._session, gradient
        if (
            (rows or skip or put or feed is not None or read is not None or part is not None or spare is not None)
            or (self._client_state.state or session.orders.are_given)
            or not session.is_settled
            or session.memberships.held is not self._membership
        ):
            return False
        weight = weight_of(weight)
        if present is not None and self._gradients.zero_absent(present) != np.count_nonzero(~present[self._trained]):
            return False  # a step would look at all of a space in which nothing is present
        clock, number = session.clock, self._membership.session
        session.pushing = clock  # from now on the position that is chosen in a cut lies behind this push
        took = None
        if not session.cuts.are_named or session.cuts.are_told:
            since = self._attendance.since(number, clock)
            took = self.offered.run(number, clock, since, weight, scalars, present)
        if took:
            session.clock = clock + 1
            self._totals["pushes"] += 1
            self._totals["blocks_counted"] += self._block_count
            self.offered.are_under_way = False
            if self._health.failing_since:
                for shard in self._shards:
                    self._health.answered(shard)
        if took is not False:
            session.pushing = None
        return took is True
