"""Joining: at shard 0, which issues the session, then at the others; and again at a shard that was restarted.

Must not know what a worker does in the job, or when it joins.
"""

from __future__ import annotations

import logging
import math
import os
import socket

from psd.contract.config import ClientConfig
from psd.contract.errors import ForeignRun, InternalError, ShardRestarted, StateLost
from psd.contract.integers import INTEGER_MAX, drawn_integer
from psd.contract.printable import printable
from psd.v1 import control_pb2
from psd_client.lanes.shards import Shards
from psd_client.lanes.transport import Call, Cancelled, Lane
from psd_client.worker.session.membership import JobMembership, Memberships
from psd_client.worker.session.timeline import join_one_timeline

logger = logging.getLogger("psd_client")

JOIN_TIMEOUT_S = 10.0


class Entrance:
    """The steps by which one worker joins the job.

    Args:
        memberships: notes every shard that has let the worker in, so that its lease there is renewed from then on.

    Attributes:
        run_id: the run's name; empty while it is not known.
    """

    def __init__(self, config: ClientConfig, shards: Shards, memberships: Memberships) -> None:
        self._config = config
        self._shards = shards
        self._memberships = memberships
        self._connection = drawn_integer()
        self.run_id = config.run_id

    def join(self) -> list[control_pb2.JoinReply]:
        """Join as a new session, with all shards on one timeline; return their replies. The caller then completes the
        membership, or gives it up."""
        before = self._memberships.latest
        return join_one_timeline(self._join_all, self._shards, 0 if before is None else before.timeline)

    def _join_all(self) -> list[control_pb2.JoinReply]:
        lanes, timeout_s = self._shards.lanes, JOIN_TIMEOUT_S + self._config.retry_timeout_s
        request = self._join_request()
        request.run_id = self.run_id

        def join_at(lane: Lane, call: Call) -> control_pb2.JoinReply:
            own = control_pb2.JoinRequest()
            own.CopyFrom(request)
            own.shard_index = lane.shard
            reply = lane.join(own, Call(min(call.timeout_s, JOIN_TIMEOUT_S), call.scope))
            _check(reply, lane)
            # A tentative shard takes no heartbeats, and ends all sessions when it goes back.
            incarnation = 0 if reply.is_tentative else reply.incarnation
            if lane.shard == 0:
                incarnations = (incarnation, *(0 for _ in lanes[1:]))
                first = JobMembership(
                    request.rank, reply.run_id, reply.session, incarnations, reply.lease_s, timeline=reply.timeline
                )
                self._memberships.begin(first)
            else:
                self._memberships.on_joined(own.session, lane.shard, incarnation, reply.lease_s)
            return reply

        replies = self._shards.run(join_at, timeout_s, lanes[:1])
        request.run_id, request.session = replies[0].run_id, replies[0].session
        try:
            return replies + self._shards.run(join_at, timeout_s, lanes[1:])
        except ForeignRun as error:
            if self.run_id in ("", request.run_id):
                raise
            raise StateLost(
                f"shard 0 at {lanes[0].address} has come back without what it held, and the others have not: {error}", shard=0
            ) from error

    def _join_request(self) -> control_pb2.JoinRequest:
        config = self._config
        return control_pb2.JoinRequest(
            shard_count=len(config.servers),
            rank=config.rank,
            world_size=config.world_size,
            host=printable(socket.gethostname())[:256],
            pid=os.getpid(),
            connection=self._connection,
        )

    def resume(self, lane: Lane, call: Call, error: ShardRestarted) -> None:
        """Resume the same session at a shard that was killed and came back with its state.

        Operations' threads and the heartbeats' thread call this. Changes nothing if another thread has resumed the session
        first, or there is a new session.

        Raises:
            StateLost: the shard came back without its state. RolledBack: the job has gone, or must go, back to a checkpoint.
            SessionFenced: the session has ended there meanwhile.
        """
        seen = self._memberships.latest
        if seen is None:
            raise Cancelled from error
        request = self._join_request()
        request.run_id, request.session, request.resume = seen.run_id, seen.session, True
        request.timeline = seen.timeline
        request.shard_index = lane.shard
        reply = lane.join(request, Call(min(call.timeout_s, JOIN_TIMEOUT_S), call.scope))
        _check(reply, lane)
        if self._memberships.on_resumed(seen, lane.shard, reply.incarnation):
            logger.info(
                "psd: worker %d: shard %d at %s was restarted; going on with it", self._config.rank, lane.shard, lane.address
            )


def _check(reply: control_pb2.JoinReply, lane: Lane) -> None:
    """Raise InternalError for a reply that no working shard sends."""
    if not (
        reply.incarnation
        and reply.session
        and reply.push_ids_max
        and reply.timeline < INTEGER_MAX
        and 0 < reply.lease_s < math.inf
    ):
        raise InternalError(f"shard {lane.shard} at {lane.address}: its answer to a worker that joins makes no sense")
