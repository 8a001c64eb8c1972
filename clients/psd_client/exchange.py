"""The data plane of one worker: pushes, pulls and push_pulls of whole flat buffers, over all shards that hold trained blocks.

Invariants. A push is named by (rank, session, clock); the clock moves only when every shard has the push, so a push that failed
on the way and is called again is the same push. Nothing is sent unless all of it is valid. Static blocks are never pushed, and
pulled only once, by `pull_all`. Must not know names of parameters, optimizers or gRPC.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psd.contract.errors import InvalidRequest, NonFiniteGradient, SessionFenced
from psd.contract.layout import Block, Layout
from psd.v1 import data_pb2
from psd_client.flat import FlatBuffers
from psd_client.session import Session
from psd_client.shards import Shards, transfer_s
from psd_client.transport import Call, GradientPart, Lane

logger = logging.getLogger("psd_client")


class Exchange:
    """Moves gradients out and parameters in.

    Attributes:
        gradients: what the next push sends. parameters: what the last pull brought; undefined after one that failed.
        counts: pushes, blocks_counted, blocks_duplicate, blocks_late, pushes_dropped.
    """

    def __init__(self, rank: int, wait_timeout_s: float, session: Session, shards: Shards, layout: Layout) -> None:
        self._rank = rank
        self._session = session
        self._shards = shards
        self._layout = layout
        self._blocks: list[list[Block]] = [
            [block for block in layout.blocks_of(lane.shard) if block.trained] for lane in shards.lanes
        ]
        self._lanes = [lane for lane in shards.lanes if self._blocks[lane.shard]]
        self._has_static = any(not block.trained for block in layout.blocks)
        self._timeout_s = wait_timeout_s + transfer_s(layout, shards.lanes)
        self.gradients = FlatBuffers(layout)
        self.parameters = FlatBuffers(layout)
        self.counts = dict.fromkeys(("pushes", "blocks_counted", "blocks_duplicate", "blocks_late", "pushes_dropped"), 0)

    def pull_all(self) -> None:
        """Fetch every block, static ones too."""
        self._session.while_fenced(self._pull_all)

    def _pull_all(self) -> None:
        def pull_at(lane: Lane, call: Call) -> None:
            lane.pull(self._pull_request(lane, ()), self._layout.blocks_of(lane.shard), self.parameters, call)

        lanes = [lane for lane in self._shards.lanes if self._layout.blocks_of(lane.shard)]
        self._shards.run(pull_at, self._timeout_s, lanes)

    def pull(self) -> None:
        """Fetch the trained blocks, at the worker's clock."""
        self._session.while_fenced(lambda: self._pull(self._lanes))

    def _pull(self, lanes: Sequence[Lane]) -> None:
        def pull_at(lane: Lane, call: Call) -> None:
            blocks = self._blocks[lane.shard]
            lane.pull(self._pull_request(lane, blocks if self._has_static else ()), blocks, self.parameters, call)

        self._shards.run(pull_at, self._timeout_s, lanes)

    def push(self, scalars: Sequence[Sequence[float]], weight: float, present: NDArray[np.bool_] | None) -> None:
        """Send the gradients; returns when every shard has them."""
        header = self._header(scalars, weight, present)
        try:
            replies = self._shards.run(
                lambda lane, call: lane.push(self._part(lane, header, present), call), self._timeout_s, self._lanes
            )
        except SessionFenced as error:
            self._drop(error)
        else:
            self._on_pushed(replies)

    def push_pull(self, scalars: Sequence[Sequence[float]], weight: float, present: NDArray[np.bool_] | None) -> None:
        """Send the gradients and fetch the parameters of the clock after them."""
        header = self._header(scalars, weight, present)
        try:
            replies = self._shards.run(
                lambda lane, call: lane.push_pull(self._part(lane, header, present), self.parameters, call),
                self._timeout_s,
                self._lanes,
            )
        except SessionFenced as error:
            self._drop(error)
            self.pull()
            return
        self._on_pushed(replies)
        # Late at one shard and in time at another: there the answer is older than the clock at which this worker goes on.
        behind = [lane for lane, reply in zip(self._lanes, replies, strict=True) if reply.clock < self._session.clock]
        if behind:
            self._session.while_fenced(lambda: self._pull(behind))

    def _header(
        self, scalars: Sequence[Sequence[float]], weight: float, present: NDArray[np.bool_] | None
    ) -> data_pb2.PushHeader:
        """The header of the next push, without its caller; raises for anything that must not be sent."""
        if not (math.isfinite(weight) and weight >= 0):
            raise InvalidRequest(f"weight: must be finite and at least 0, got {weight}")
        if present is not None:
            for tensor in np.flatnonzero(~present).tolist():
                self.gradients.views[tensor][...] = 0
        tensor_name = self.gradients.first_nonfinite()
        clock = self._session.clock
        if tensor_name is not None:
            raise NonFiniteGradient(
                f"worker {self._rank}: the gradient of {tensor_name!r} at step {clock} holds NaN or infinity; nothing was sent",
                rank=self._rank,
                tensor=tensor_name,
                clock=clock,
            )
        return data_pb2.PushHeader(
            clock=clock,
            weight=weight,
            layout_digest=self._layout.digest,
            scalars=[data_pb2.GroupScalars(values=values) for values in scalars],
        )

    def _part(self, lane: Lane, header: data_pb2.PushHeader, present: NDArray[np.bool_] | None) -> GradientPart:
        own = data_pb2.PushHeader()
        own.CopyFrom(header)
        own.caller.CopyFrom(self._session.caller(lane.shard))
        return GradientPart(own, self._blocks[lane.shard], self.gradients, present)

    def _pull_request(self, lane: Lane, blocks: Sequence[Block]) -> data_pb2.PullRequest:
        return data_pb2.PullRequest(
            caller=self._session.caller(lane.shard),
            clock=self._session.clock,
            layout_digest=self._layout.digest,
            blocks=[block.index for block in blocks],
        )

    def _on_pushed(self, replies: Sequence[data_pb2.PushReply]) -> None:
        """Every shard has the push: go on at the largest clock, which lies beyond the next one where it came late."""
        self._session.clock = max(self._session.clock + 1, *(reply.clock for reply in replies), 0)
        self.counts["pushes"] += 1
        for reply in replies:
            self.counts["blocks_counted"] += reply.blocks_counted
            self.counts["blocks_duplicate"] += reply.blocks_duplicate
            self.counts["blocks_late"] += reply.blocks_late

    def _drop(self, error: SessionFenced) -> None:
        """The session ended during a push: it belonged to that session, and is not sent again by the next one."""
        step = self._session.clock
        self._session.rejoin(error)
        self.counts["pushes_dropped"] += 1
        logger.warning(
            "psd: worker %d: the gradient of step %d was dropped, because the worker's lease ran out before all shards had it",
            self._rank,
            step,
        )
