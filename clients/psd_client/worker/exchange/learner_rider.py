"""The note that a learner sends with each push, and the fastest learner's pace, which it hears from shard 0.

Must not know what a learner does.
"""

from __future__ import annotations

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

    def write(self, sent: SentPush) -> None:
        """Write the note."""
        sent.header.learner.CopyFrom(self.note)

    def hear(self, sent: SentPush) -> None:
        """Take shard 0's word."""
        if 0 in sent.replies:
            self.fastest_step_s = sent.replies[0].fastest_step_s
