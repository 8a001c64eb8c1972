"""The grace of a round: how long shard 0 waits on for other workers, once the round has its quorum.

Either so many seconds; or as long as the learners that have committed go on computing without it: after Decoupled DiLoCo (arXiv
2604.21428), a share of the time that is left to the first that would stand still, less the time that it takes to fetch the
round. Under the shard's lock; must not know workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from psd.state import locks

GRACE_SHARE = 0.8
"""Share of the workers' spare time for which a round waits; the rest is for what takes longer than expected."""


@locks.guarded_by(locks.Level.SHARD)
class Grace:
    """The grace of the open round.

    Args:
        seconds: infinity: by the workers' spare time. now: monotonic seconds.
    """

    def __init__(self, seconds: float, now: Callable[[], float]) -> None:
        self._seconds = seconds
        self._now = now
        self.end()

    def end(self) -> None:
        """Begin anew, with the next round."""
        self._spare_end = self._began = math.inf

    @property
    def has_begun(self) -> bool:
        """True if the open round waits on although it has its quorum."""
        return self._began < math.inf

    def on_commit(self, spare_s: float) -> None:
        """Note for how long one more worker of the round goes on without it."""
        self._spare_end = min(self._spare_end, self._now() + spare_s)

    def left(self) -> float:
        """Seconds that are left; the round has its quorum. 0 or less: none."""
        if not self._seconds:
            return 0.0
        now = self._now()
        self._began = min(self._began, now)
        whole = self._seconds if self._seconds < math.inf else GRACE_SHARE * (self._spare_end - self._began)
        return self._began + whole - now
