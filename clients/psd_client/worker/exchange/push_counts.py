"""Counts the outcomes of a worker's pushes, which `stats()` shows: exactly as shards' replies and decisions state them.

Must not know shards, or when anything is sent.
"""

from __future__ import annotations

import logging
import threading

from psd.contract.verdicts import members_mask
from psd.v1 import control_pb2, data_pb2
from psd_client.worker.exchange.rider import Rider
from psd_client.worker.exchange.sent_push import SentPush

logger = logging.getLogger("psd_client")

NAMES = (
    "pushes",
    "blocks_counted",
    "blocks_duplicate",
    "blocks_late",
    "blocks_staged",
    "pushes_dropped",
    "pushes_overruled",
    "rounds_skipped",
    "rows_pushed",
    "rows_pulled",
)


class RoundGone(Exception):
    """A gradient is not sent: its part's round was over before its call was made.

    Attributes:
        clock: of that round.
    """

    def __init__(self, clock: int) -> None:
        super().__init__(clock)
        self.clock = clock


class PushCounts(Rider):
    """Totals by name, for ParameterServer.stats.

    Attributes:
        totals: the present totals.
    """

    def __init__(self) -> None:
        self.totals = dict.fromkeys(NAMES, 0)
        self._lock = threading.Lock()

    def on_reply(self, sent: SentPush, shard: int, reply: data_pb2.PushReply) -> None:
        """Note a shard's reply to a push, in place of the shard's earlier reply. Any thread may call this.

        A shard that was killed, and gets the push again, says that it has staged it, although the decision is known here.
        """
        known = reply
        if reply.blocks_staged and sent.staged_are != "blocks_staged":
            known = data_pb2.PushReply()
            known.CopyFrom(reply)
            known.blocks_staged = 0
            if sent.staged_are:
                setattr(known, sent.staged_are, getattr(known, sent.staged_are) + reply.blocks_staged)
        with self._lock:
            before = sent.replies.get(shard)
            sent.replies[shard] = known
            if before is not None:
                self._add(before, -1)
            self._add(known, 1)

    def hear(self, sent: SentPush) -> None:
        """Count a push that all shards have."""
        self.totals["pushes"] += 1
        self.totals["rows_pushed"] += sum([len(rows.ids) for shard in sent.tables for rows in shard])

    def on_commit(self, sent: SentPush, rank: int, reply: control_pb2.CommitReply, nan_policy: str) -> bool | None:
        """Exact aggregation: note what was decided on a push's round. True if it was skipped; None if that is not known."""
        decision = next((d for d in reply.decisions if d.round == sent.header.clock), None)
        if decision is None:
            if reply.is_left_out:  # so long ago that the decision is no longer kept
                self.on_decision(sent, is_member=False, is_skipped=False)
            return None
        members = members_mask(decision.members)
        # Without that policy, a round has no members if all workers had gone beyond it: then this gradient came too late.
        is_skipped = not members and nan_policy == "skip"
        self.on_decision(sent, is_member=bool(members >> rank & 1), is_skipped=is_skipped)
        self.totals["rounds_skipped"] += is_skipped
        return is_skipped

    def on_skipped_norm(self, rank: int, clock: int) -> None:
        """Count, and tell of, a round that was skipped because of a norm over all workers."""
        self.totals["rounds_skipped"] += 1
        logger.warning("psd: worker %d: step %d was skipped: a norm over all workers is not finite", rank, clock)

    def on_decision(self, sent: SentPush, *, is_member: bool, is_skipped: bool) -> None:
        """Exact aggregation: count the staged blocks of a push as counted or as late; as neither if the round was skipped."""
        sent.is_decided = True
        sent.staged_are = "" if is_skipped else "blocks_counted" if is_member else "blocks_late"
        for shard, reply in list(sent.replies.items()):
            self.on_reply(sent, shard, reply)

    def on_gone(self, rank: int, clock: int, blocks: int) -> None:
        """Count, and tell of, a gradient that was not sent: its round was over before it was made."""
        self.totals["blocks_late"] += blocks
        what = "the gradient of step %d came too late for its round, because the worker has joined again; it does not count"
        logger.warning("psd: worker %d: " + what, rank, clock)

    def _add(self, reply: data_pb2.PushReply, sign: int) -> None:
        self.totals["blocks_counted"] += sign * reply.blocks_counted
        self.totals["blocks_duplicate"] += sign * reply.blocks_duplicate
        self.totals["blocks_late"] += sign * reply.blocks_late
        self.totals["blocks_staged"] += sign * reply.blocks_staged
