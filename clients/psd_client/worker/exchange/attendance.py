"""The clock since which a worker has been in the job without a gap, which decides whether its scalars hold; and the shards'
notices that they do not.

The shards use the scalars of the worker that has been there longest (psd/state/aggregation/agreement.py). A worker that was
started again, or has fallen behind, may have a learning-rate schedule that lags: this way it changes no other worker's update,
and causes no error. Must not know lanes, blocks or frameworks.
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
        counts: totals, in which `pushes_overruled` counts the rounds in which other scalars were used than this worker's.
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
        """Write the clock since which this process has pushed at every step. It is 0 only if that is since the job's start."""
        session, clock = sent.session, sent.header.clock
        if self._last is None or clock not in (self._last[1], self._last[1] + 1):
            self._since = clock
        if self._last is not None and self._last[0] != session:
            # Something went wrong between the two sessions, and the program's schedule may not know it. If it differs from that
            # of workers that were there all the time, it must give way, and not be refused: so this is never 0.
            self._since = max(1, self._since)
        self._last = session, clock
        sent.header.since = self._since

    def hear(self, sent: SentPush) -> None:
        """Log the shards' notices about this worker's scalars; each once, until the worker joins or falls behind again."""
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
