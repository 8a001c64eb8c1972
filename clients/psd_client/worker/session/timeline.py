"""Brings all shards of a job onto one timeline, when some have begun from a checkpoint.

A shard that lost its state comes back tentative: with a checkpoint, but without knowing whether the others are further ahead.
States of different times must not be mixed, so all shards go back to the same checkpoint, and a new timeline begins. Any worker
can bring that about; several that do it at once agree, because a shard only ever moves to a later timeline. Must not know
sessions, clocks or gradients.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence

from psd.contract.errors import CheckpointCorrupt, StateLost
from psd.v1 import control_pb2
from psd_client.lanes.shards import Shards
from psd_client.lanes.transport import Call, Lane, Scope

logger = logging.getLogger("psd_client")

ROLLBACK_TIMEOUT_S = 600.0
"""Seconds to load a shard's part of a checkpoint."""

ATTEMPTS_MAX = 20
LOOK_AGAIN_S = 0.5
"""Seconds to wait for another worker to bring shards of different timelines together, before this worker does it."""

VERSIONS_PER_SECOND = 500
"""Puts that a store may have had in each second since 1970, and more than it can have."""

_STATES = (
    control_pb2.WORKER_STATE_LIVE,
    control_pb2.WORKER_STATE_ABSENT,
    control_pb2.WORKER_STATE_EXPIRED,
    control_pb2.WORKER_STATE_FINISHED,
)
"""States of a worker. If shards state different ones, the first of them in this list holds."""


def join_one_timeline(
    join_all: Callable[[], list[control_pb2.JoinReply]],
    shards: Shards,
    known: int = 0,
    uniform: Callable[[], float] = random.random,
) -> list[control_pb2.JoinReply]:
    """The replies of `join_all`, once all shards are on one timeline.

    Args:
        known: the latest timeline that the worker knows; all shards may have forgotten it.

    Raises:
        StateLost: the shards cannot be brought together: one of them has no state and there is no checkpoint.
        CheckpointFailed, CheckpointCorrupt: a shard cannot read the checkpoint from which the others begin, nor another one.
    """
    has_looked_again, instead = False, ""
    for _ in range(ATTEMPTS_MAX):
        replies = join_all()
        if _is_one_timeline(replies):
            return replies
        if not has_looked_again and not all(reply.is_tentative for reply in replies):
            has_looked_again = True
            Scope().sleep(LOOK_AGAIN_S * (1 + uniform()))
            continue
        has_looked_again = False
        try:
            _bring_together(replies, shards, instead, known)
        except CheckpointCorrupt as error:
            instead = error.detail.get("instead", "")
            if not instead:
                raise
            logger.warning("psd: %s. The shards go back to %s instead", error, instead)
    raise StateLost("the shards could not be brought onto one timeline; are checkpoints written by two jobs to one directory?")


def _is_one_timeline(replies: Sequence[control_pb2.JoinReply]) -> bool:
    """True if all replies agree on the timeline and on what it began with: two workers may have begun timelines at once."""
    if len({reply.restored_version for reply in replies if reply.restored_version}) > 1:
        return False
    return len({(reply.timeline, reply.checkpoint) for reply in replies}) == 1 and not any(r.is_tentative for r in replies)


def _bring_together(replies: Sequence[control_pb2.JoinReply], shards: Shards, instead: str, known: int) -> None:
    """Let all shards go back to one checkpoint. instead: the one that a shard has named after it could not read another."""
    latest = max(reply.timeline for reply in replies)
    sources = [r for r in replies if r.is_tentative] or [r for r in replies if r.timeline == latest]
    # The oldest, if they differ: a newer one may be damaged for some shards.
    checkpoint = instead or min((reply.checkpoint for reply in sources if reply.checkpoint), default=None)
    if checkpoint is None:
        raise StateLost("the shards are on different timelines, and none names a checkpoint to which all could go back")
    # Later than any shard's: shards on the latest timeline may have been trained since. And later than any timeline that this
    # worker was on: otherwise it would not hear that the job has gone back.
    timeline = max(latest, known) + 1
    of_ranks = list(zip(*(reply.workers for reply in replies if not reply.is_tentative), strict=False))
    workers = [next((state for state in _STATES if state in states), control_pb2.WORKER_STATE_ABSENT) for states in of_ranks]
    # If all shards are tentative, the job simply begins from its checkpoint, as intended: no warning.
    level = logging.INFO if all(reply.is_tentative for reply in replies) else logging.WARNING
    logger.log(level, "psd: the shards go back to checkpoint %s, timeline %d", checkpoint, timeline)

    # Versions that were published after the checkpoint may have been read, and nobody may remember how many: they are fewer
    # than this, whoever published them, as long as clocks do not go back.
    version = max([int(time.time() * VERSIONS_PER_SECOND), *[reply.clock + 1 for reply in replies]])

    def roll_back(lane: Lane, call: Call) -> control_pb2.RollbackReply:
        request = control_pb2.RollbackRequest(
            run_id=replies[0].run_id, checkpoint=checkpoint, timeline=timeline, workers=workers
        )
        # A shard in another incarnation has followed another worker, or was lost again: the next attempt to join will tell.
        request.incarnation = replies[lane.shard].incarnation
        request.version = version
        return lane.rollback(request, call)

    shards.run(roll_back, ROLLBACK_TIMEOUT_S)
