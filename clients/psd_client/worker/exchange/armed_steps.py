"""The short way of a worker's push_pulls: as armed steps (lanes/steps.py), as long as all shards offer that, and nothing rides
on them but what a step carries.

A step is an ordinary push, under the same name. So it leaves behind what that would: where it succeeds, the same counts, clock
and versions; where not, a push that the long way goes on with. What is not certain to be such a push is left to the long way,
checks and errors included. Must not know how steps travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from psd.contract.rules import weight_of
from psd.v1 import data_pb2
from psd_client.lanes.flat import FlatBuffers
from psd_client.lanes.steps import SteppingLanes, StepRows
from psd_client.lanes.transport import Call, Lane
from psd_client.lanes.waiting import ShardHealth
from psd_client.worker.exchange.buffers import BufferKeeper
from psd_client.worker.exchange.learner_rider import LearnerRider
from psd_client.worker.exchange.lending import ParameterPlaces
from psd_client.worker.exchange.riders import Attendance, ClientStateRider, FirstGradient, Riders
from psd_client.worker.exchange.row_traffic import PullAhead, RowTraffic
from psd_client.worker.exchange.sent_push import WorkerGradient
from psd_client.worker.rows import Gradients, RowGradients
from psd_client.worker.session.membership import JobMembership
from psd_client.worker.session.session import Session


@dataclass
class RowsOfCall:
    """Rows of one push_pull, made once, for a step and for the push that goes on with it: `pushed` are gradients, `ahead` what
    it fetches. None: not made yet, or there are none."""

    pushed: RowGradients | None = None
    ahead: PullAhead | None = None


NO_TABLES = RowsOfCall()
"""The rows of a call in a job without tables."""


class ArmedSteps:
    """The steps of one worker.

    Args:
        health: hears that shards answer. lanes: of the shards that have trained blocks. totals: as in PushCounts.

    Attributes:
        shards: of the lanes. has_tables: True if the job has tables.
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
            and spec.has_plain_tables
            and not (spec.clip_norm or spec.directed_tensors or places.is_lending)
            and not riders.of(LearnerRider)
            and not any(block.codec or block.pull_codec for block in layout.blocks)
        )
        self.are_armed = False
        self._session = session
        self._gradients = gradients
        self._totals = totals
        self.shards = [lane.shard for lane in lanes]
        self._health = health
        (self._attendance,), (self._client_state,) = riders.of(Attendance), riders.of(ClientStateRider)
        self._first_gradients, self._buffers = riders.of(FirstGradient), riders.of(BufferKeeper)
        self._block_count = sum([len(own) for own in blocks]) + (len(lanes) if spec.tables else 0)
        (self._rows,), self.has_tables = riders.of(RowTraffic), bool(spec.tables)
        self._tables_blocks = {lane.shard: block for lane in lanes if (block := layout.tables_block(lane.shard)) is not None}
        self._groups = spec.groups
        self._trained = [i for i, tensor in enumerate(spec.tensors) if tensor.size and not spec.groups[tensor.group].is_static]
        self._membership: JobMembership | None = None
        self._looks, self._sends_versions = spec.nan_policy != "allow", not spec.consistency.has_rounds
        self._versions = places.current.versions
        self.offered = SteppingLanes(
            lanes,
            blocks,
            gradients,
            places.current,
            looks=self._looks,
            sends_versions=self._sends_versions,
            looks_out=spec.world_size == 1,  # others would wait for the core, or the shard for them
        )

    def renew(self) -> None:
        """Take over what the shards have offered in their replies to a push_pull. Only if `are_wanted`."""
        self.are_armed = self.offered.renew() and all(rider.is_over for rider in self._first_gradients)
        if self.are_armed:
            self._membership = self._session.memberships.held

    def push_pull(self, gradient: WorkerGradient, made: RowsOfCall) -> bool:
        """Make a push_pull as a step, if they are armed. True: it has succeeded. False: make it the long way, which goes on
        with the step if it is under way: `finish` it at each shard, then `renew`, or `end` it. made: gets the rows.

        Raises InvalidRequest, as the long way would; or what a signal's handler raises.
        """
        session, (scalars, weight, present, rows, skip, feed, read, part, spare, put) = self._session, gradient
        if (
            ((rows and not self.has_tables) or skip or put)
            or (feed is not None or read is not None or part is not None or spare is not None)
            or (self._client_state.state or not session.is_settled or (self._buffers and self._buffers[0].is_due))
            or session.memberships.held is not self._membership
        ):
            return False
        weight = weight_of(weight)
        if session.orders.are_given:
            scaled = session.orders.of_step(scalars, self._groups, session.clock)
            if scaled is None:
                return False
            scalars = scaled
        if present is not None and self._gradients.zero_absent(present) != np.count_nonzero(~present[self._trained]):
            return False  # a step would look at all of a space in which nothing is present
        of_shards = self._rows_by_shard(rows or {}, made) if self.has_tables else ()
        if of_shards is None:
            return False  # a step would not say whose number is not finite
        clock, number = session.clock, self._membership.session
        session.pushing = clock  # from now on the position that is chosen in a cut lies behind this push
        took = None
        if not session.cuts.are_untold:
            since = self._attendance.since(number, clock)
            took = self.offered.run(number, clock, since, weight, scalars, present, of_shards)
        if took:
            if of_shards:
                self._note_rows(made, self.shards)
                self._rows.came(made.ahead, self._totals)
                self._totals["rows_pushed"] += sum([len(rows.ids) for each in of_shards for rows in each.pushed])
            if self._health.failing_since:
                for shard in self.shards:
                    self._health.answered(shard)
            self._totals["pushes"] += 1
            self._totals["blocks_counted"] += self._block_count
            session.clock = clock + 1  # from here on nothing calls, so that no signal comes between: the push is over
            self.offered.are_under_way = False
        if took is not False:
            session.pushing = None
        return took is True

    def _rows_by_shard(self, gradients: Gradients, made: RowsOfCall) -> list[StepRows] | None:
        """The rows of a step, for each shard; None if some are not finite."""
        made.pushed = pushed = self._rows.gradients(gradients)
        made.ahead = ahead = self._rows.pull_ahead(self.shards)
        if self._looks and not pushed.is_empty and pushed.first_nonfinite() is not None:
            return None
        at = {} if ahead is None else ahead.at
        found = []
        for shard in self.shards:
            if self._sends_versions and shard in self._rows.versions_read:
                self._versions[self._tables_blocks[shard]] = self._rows.versions_read[shard]
            found.append(StepRows(pushed.by_shard[shard], at[shard].wanted if shard in at else ()))
        return found

    def finish(self, shard: int, call: Call, made: RowsOfCall) -> data_pb2.PushReply | None:
        """Go on with a step at one shard: see SteppingLanes.finish. made: the rows of the call. Cuts and orders are as in the
        last reply."""
        reply = self.offered.finish(shard, call)
        if reply is not None:
            self._note_rows(made, [shard])
            reply.cuts.extend(self._session.cuts.named_by(shard))
            if shard == 0:
                reply.orders.CopyFrom(self._session.orders.heard)
        return reply

    def _note_rows(self, made: RowsOfCall, shards: Sequence[int]) -> None:
        """Note that steps have brought the rows that were asked for ahead from these shards."""
        for shard in shards:
            if made.ahead is not None and shard in made.ahead.at:
                made.ahead.at[shard].version = int(self._versions[self._tables_blocks[shard]])
