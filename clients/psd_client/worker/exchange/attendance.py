"""The clock since which a worker has been in the job without a gap, which decides whose scalars a round has; and the notices
about it.

The shards let the worker speak that has been there longest (psd/state/aggregation/agreement.py). So a worker that was started
again, or has fallen behind, and whose learning-rate schedule may lag by that, changes nobody's update and ends nobody. Must
not know lanes, blocks or frameworks.
"""

from __future__ import annotations

import logging

from psd.contract.jobspec import JobSpec
from psd_client.worker.exchange.rider import Rider
from psd_client.worker.exchange.sent_push import SentPush

logger = logging.getLogger("psd_client")


class Attendance(Rider):
    """Attendance of one worker.

    Args:
        counts: `pushes_overruled` are rounds in which scalars of this worker's have given way to others.
    """

    def __init__(self, rank: int, spec: JobSpec, counts: dict[str, int]) -> None:
        self._rank = rank
        self._groups = spec.groups
        self._since = 0
        self._last: tuple[int, int] | None = None  # session and clock of the last push
        self._round_told = -1
        self._said: set[tuple[int, int, int]] = set()
        self._counts = counts

    def write(self, sent: SentPush) -> None:
        """Write the clock since which this process has pushed at every step; 0 only from the job's start."""
        session, clock = sent.session, sent.header.clock
        if self._last is None or clock not in (self._last[1], self._last[1] + 1):
            self._since = clock
        if self._last is not None and self._last[0] != session:
            # Something went wrong between the two, of which the program's schedule may know or not: it is to give way if it
            # differs from those that were there all the time, and not to be refused.
            self._since = max(1, self._since)
        self._last = session, clock
        sent.header.since = self._since

    def hear(self, sent: SentPush) -> None:
        """Log the shards' remarks on this worker's scalars; each once, until the worker joins or falls behind again."""
        for reply in sent.replies.values():
            if not reply.HasField("overruled"):
                continue
            told = reply.overruled
            if told.round != self._round_told:
                self._round_told = told.round
                self._counts["pushes_overruled"] += 1
            if (self._since, told.group, told.scalar) in self._said:
                continue
            self._said.add((self._since, told.group, told.scalar))
            logger.warning(
                "psd: worker %d: in step %d its %s of group %d, %r, gives way to worker %d's, %r, which has been in the job "
                "for longer. A schedule that begins anew with its process is behind the job's clock: see "
                "psd_client.torch.scheduler, and docs/resuming.md",
                self._rank,
                told.round,
                self._groups[told.group].info.scalars[told.scalar],
                told.group,
                told.own,
                told.rank,
                told.held,
            )
