"""Outcomes of a worker's pushes, which `stats()` shows: exactly what shards and decisions said.

Must not know shards, or when anything is sent.
"""

from __future__ import annotations

import threading

from psd.v1 import data_pb2
from psd_client.worker.exchange.rider import Rider
from psd_client.worker.exchange.sent_push import SentPush

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


class PushCounts(Rider):
    """Totals by name; see ParameterServer.stats.

    Attributes:
        totals: as they are now.
    """

    def __init__(self) -> None:
        self.totals = dict.fromkeys(NAMES, 0)
        self._lock = threading.Lock()

    def on_reply(self, sent: SentPush, shard: int, reply: data_pb2.PushReply) -> None:
        """Note a shard's reply to a push; it replaces the shard's earlier reply. From any thread.

        A shard that is sent the push again, because it was killed, has staged it, although the decision is known.
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

    def on_decision(self, sent: SentPush, *, is_member: bool, is_skipped: bool) -> None:
        """Exact aggregation: a push's gradient counts, or not, on all shards that have staged it; neither, if skipped."""
        sent.is_decided = True
        sent.staged_are = "" if is_skipped else "blocks_counted" if is_member else "blocks_late"
        for shard, reply in list(sent.replies.items()):
            self.on_reply(sent, shard, reply)

    def _add(self, reply: data_pb2.PushReply, sign: int) -> None:
        self.totals["blocks_counted"] += sign * reply.blocks_counted
        self.totals["blocks_duplicate"] += sign * reply.blocks_duplicate
        self.totals["blocks_late"] += sign * reply.blocks_late
        self.totals["blocks_staged"] += sign * reply.blocks_staged
