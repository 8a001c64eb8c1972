"""The note that a learner sends with each push; the fastest learner's pace, which it hears from shard 0; and which blocks have
not counted its last push.

Must not know what a learner does.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from psd.contract.layout import Layout
from psd.v1 import data_pb2
from psd_client.worker.exchange.riders import Rider
from psd_client.worker.exchange.sent_push import SentPush


class LearnerRider(Rider):
    """Carries a learner's note.

    Attributes:
        note: to send with the next push. fastest_step_s: seconds that a local step of the fastest learner takes; 0: not known.
    """

    def __init__(self) -> None:
        self.note = data_pb2.LearnerNote()
        self.fastest_step_s = 0.0
        self._last: SentPush | None = None

    @staticmethod
    def make_note(**fields: Any) -> data_pb2.LearnerNote:
        """A note, of these fields of LearnerNote."""
        return data_pb2.LearnerNote(**fields)

    def write(self, sent: SentPush) -> None:
        """Write the note."""
        self._last = sent
        sent.header.learner.CopyFrom(self.note)

    def hear(self, sent: SentPush) -> None:
        """Take shard 0's word."""
        if 0 in sent.replies:
            self.fastest_step_s = sent.replies[0].fastest_step_s

    def late_blocks(self, since: int, groups: Collection[int], layout: Layout) -> set[int]:
        """The blocks that have not counted a push of these groups, of the clock `since` or a later one, which came late. All of
        these groups' if none was made, because its round was over before, or if a push counts as a whole."""
        last = self._last
        if last is None or last.header.clock < since or layout.spec.aggregation == "exact":
            return {block.index for block in layout.blocks if block.group in groups}
        return {index for reply in last.replies.values() for index in reply.late}
